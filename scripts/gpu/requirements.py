"""What a machine without internet needs beside its torch: requirements of pyproject.toml, and stand-ins for torch.

::

    python scripts/gpu/requirements.py core tests               # one requirement a line
    python scripts/gpu/requirements.py --stand-ins FOLDER       # empty wheels with the names of what the machine has
    python scripts/gpu/requirements.py --missing FOLDER core    # the wheels of FOLDER that this Python lacks

Used by ``bundle.sh`` and ``install.sh``. Needs nothing but Python; ``--missing`` needs pip.
"""

from __future__ import annotations

import argparse
import re
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: What the machine brings: torch, since its build belongs to the driver, and NumPy, which is beside every torch.
PROVIDED = ("torch", "numpy")
#: Packages of the extra ``dev`` that no test of training needs, or without which tests are skipped, and which alone
#: would fill the folder. Linters, browsers, loggers of other services, the documentation's, Arrow and pandas, SciPy,
#: Matplotlib and the packages of Hugging Face.
LEFT_OUT = (
    "codespell", "datasets", "espeakng-loader", "ipykernel", "jiwer", "matplotlib", "mkdocs", "mkdocs-material",
    "mkdocstrings", "mlflow-skinny", "mypy", "nbclient", "nbstripout", "pandas", "peft", "pillow", "playwright",
    "pre-commit", "pyarrow", "pyright", "pytest-cov", "ruff", "scipy", "soundfile", "tensorboard", "tokenizers",
    "transformers", "types-psutil", "types-pyyaml", "wandb",
)  # fmt: skip
#: What `install.sh` builds Lockstep's own editable installation with.
BUILD = ("hatchling>=1.26", "editables>=0.3")
PEERS = ("lightning", "accelerate", "transformers")


def name_of(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def requirements(parts: list[str]) -> list[str]:
    """Of ``core``, ``tests`` (the extra dev without :data:`LEFT_OUT`), other extras, and packages by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    found: list[str] = []
    for part in parts:
        if part == "core":
            found += [*BUILD, *project["dependencies"]]
        elif part == "tests":
            found += [entry for entry in extras["dev"] if name_of(entry) not in LEFT_OUT]
        elif part == "peers":
            found += PEERS
        else:
            found += extras.get(part, [part])
    return [entry for entry in dict.fromkeys(found) if name_of(entry) not in PROVIDED]


def pins() -> list[str]:
    """constraints.txt without what the machine has: its versions are other ones."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#") and name_of(line) not in PROVIDED]


def write_stand_ins(folder: Path) -> None:
    """Empty wheels, so that pip finds the dependencies of everything else without downloading those of torch."""
    folder.mkdir(parents=True, exist_ok=True)
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for name in PROVIDED:
        version = f"{pinned[name]}+stand.in"
        info = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            tags = "Wheel-Version: 1.0\nGenerator: lockstep\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            wheel.writestr(f"{info}/WHEEL", tags)
            wheel.writestr(f"{info}/RECORD", "")


def missing(folder: Path, wanted: list[str]) -> list[Path]:
    """The wheels to install for ``wanted`` and what they need, without what this Python has already.

    What is installed is left alone with all its own dependencies: a machine's torch need not be as pip would have it.

    Raises:
        SystemExit: a package is neither here nor in ``folder``.
    """
    from importlib import metadata

    from pip._vendor.packaging.requirements import Requirement
    from pip._vendor.packaging.tags import sys_tags
    from pip._vendor.packaging.utils import parse_wheel_filename

    tags = set(sys_tags())
    wheels: dict[str, Path] = {}
    for path in sorted(folder.glob("*.whl")):
        name, _, _, of_wheel = parse_wheel_filename(path.name)
        if tags & of_wheel:
            wheels[name] = path
    left, found = [Requirement(text) for text in wanted], dict[str, Path]()
    while left:
        requirement = left.pop()
        name = name_of(requirement.name)
        try:
            is_here = requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
        except metadata.PackageNotFoundError:
            is_here = False
        if (is_here and not requirement.extras) or name in PROVIDED:
            continue
        if name not in wheels and not is_here:
            raise SystemExit(
                f"error: {requirement} is neither installed nor in {folder}. fix: bundle.sh with that part"
            )
        if not is_here and name not in found:
            found[name] = wheels[name]
        elif not requirement.extras:
            continue
        needed = metadata.requires(requirement.name) if is_here else _requires(wheels[name])
        for line in needed or []:
            other = Requirement(line)
            extras = requirement.extras or {""}
            if other.marker is None or any(other.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
                left.append(other)
    return list(found.values())


def _requires(wheel: Path) -> list[str]:
    from email.parser import Parser

    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help="core, tests, peers, extras of pyproject.toml, packages by name")
    parser.add_argument("--pins", action="store_true", help="print the tested versions instead")
    parser.add_argument("--stand-ins", type=Path, metavar="FOLDER")
    parser.add_argument("--missing", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.stand_ins is not None:
        write_stand_ins(options.stand_ins)
        return
    if options.missing is not None:
        print("\n".join(map(str, missing(options.missing, requirements(options.parts)))))
        return
    print("\n".join(pins() if options.pins else requirements(options.parts)))


if __name__ == "__main__":
    main()
