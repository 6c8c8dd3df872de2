"""Asking torch what it can use without importing it: its build from a file, its devices in a short-lived process."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

TIMEOUT_S = 120.0

# Runs in a separate process, so that what torch opens is closed again at once.
_SCRIPT = """
import json, torch
accelerator = torch.accelerator.current_accelerator(check_available=True)
devices = []
for index in range(torch.accelerator.device_count() if accelerator is not None else 0):
    entry = {"kind": accelerator.type, "index": index, "name": accelerator.type}
    module = getattr(torch, accelerator.type, None)
    if accelerator.type == "cuda":
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        entry.update(name=properties.name, total=total, free=free, uuid=str(getattr(properties, "uuid", "")),
                     capability=[properties.major, properties.minor])
    elif hasattr(module, "get_device_name"):
        entry["name"] = module.get_device_name(index)
    devices.append(entry)
print(json.dumps(devices))
"""


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """What the installed torch was built for: versions, or ``None``."""

    cuda: str | None = None
    hip: str | None = None
    xpu: str | None = None


@dataclass(frozen=True, slots=True)
class ProbedDevice:
    """One accelerator as torch numbers it. Memory in bytes."""

    kind: str
    index: int
    name: str
    total: int = 0
    free: int | None = None
    uuid: str = ""
    capability: tuple[int, int] = (0, 0)


def read_torch_build() -> TorchBuild:
    """Read ``torch/version.py`` without importing torch."""
    spec = find_spec("torch")
    folder = next(iter(spec.submodule_search_locations or ()), None) if spec else None
    if folder is None:
        return TorchBuild()
    try:
        values = runpy.run_path(str(Path(folder) / "version.py"))
    except (OSError, SyntaxError, NameError, ImportError):
        return TorchBuild()
    return TorchBuild(cuda=values.get("cuda"), hip=values.get("hip"), xpu=values.get("xpu"))


def worth_probing(build: TorchBuild) -> bool:
    """Whether torch could find an accelerator at all: a probe takes seconds, so not without a reason."""
    from importlib.metadata import entry_points

    if build.hip or build.xpu or sys.platform == "darwin" or entry_points(group="torch.backends"):
        return True
    return build.cuda is not None and _has_cuda_driver()


def probe() -> list[ProbedDevice]:
    """What ``torch.accelerator`` finds, asked in a separate process.

    Raises:
        OSError: the process failed, took too long, or did not answer; the text says why.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _SCRIPT],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"torch did not answer within {TIMEOUT_S:g} s") from None
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return read_answer(done.stdout)


def read_answer(text: str) -> list[ProbedDevice]:
    """The devices in the probe's output; its last line, since libraries may print before it.

    Raises:
        OSError: it is not an answer.
    """
    try:
        entries = json.loads(text.strip().splitlines()[-1])
        return [ProbedDevice(**{**entry, "capability": tuple(entry.get("capability", (0, 0)))}) for entry in entries]
    except (IndexError, ValueError, TypeError) as error:
        raise OSError(f"torch's answer was not understood: {error}") from None


def _has_cuda_driver() -> bool:
    """Loading the driver's library starts nothing; a context would need its ``cuInit``."""
    import ctypes

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
