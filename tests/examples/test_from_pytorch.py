"""``examples/from_pytorch``: five ways to the same losses; and the pages that go through them show the real code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.e2e.test_train import finish, start
from tests.gloo import ROOT

FOLDER = ROOT / "examples" / "from_pytorch"
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node=2")
#: Program → its launcher, and what follows the name of the result.
PROGRAMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "single_device": ((), ()),
    "many_devices": (TORCHRUN, ()),
    "with_lightning": ((), ("cpu,cpu",)),
    "with_lockstep": ((), ("cpu,cpu",)),
}
EXCERPT = re.compile(r"<!-- excerpt: (\S+) -->\n```\w+\n(.*?)```", re.S)


@pytest.mark.slow
@pytest.mark.parametrize(("epochs", "learned"), [(3, 0.6), pytest.param(10, 0.15, marks=pytest.mark.drill)])
def test_all_programs_compute_the_same_losses(epochs: int, learned: float, tmp_path: Path) -> None:
    for file in FOLDER.glob("*.py"):
        code = file.read_text(encoding="utf-8").replace("EPOCHS = 10\n", f"EPOCHS = {epochs}\n")
        (tmp_path / file.name).write_text(code, encoding="utf-8")
    processes = [
        start(
            f"{name}.py",
            f"{name}.json",
            *arguments,
            module=launcher,
            cwd=tmp_path,
            lightning="lightning" in name,
            script=True,
        )
        for name, (launcher, arguments) in PROGRAMS.items()
    ]
    for process in processes:
        assert f"epoch {epochs}: loss" in finish(process)
    losses = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in PROGRAMS}
    alone = losses["single_device"]
    assert len(alone) == epochs
    assert alone[-1] < learned * alone[0], "it learns"
    for name, found in losses.items():
        assert found == pytest.approx(alone, rel=1e-5), name


@pytest.mark.parametrize("page", ["from-pytorch.md", "from-lightning.md"])
def test_the_page_shows_the_code_of_the_files(page: str) -> None:
    found = EXCERPT.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
    assert len(found) >= 4
    for file, excerpt in found:
        assert excerpt in (ROOT / file).read_text(encoding="utf-8"), f"{page} shows what {file} no longer says"
