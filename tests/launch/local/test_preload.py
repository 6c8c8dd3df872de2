"""What the ranks of a command need not import again: the libraries with which the task's file begins."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from lockstep.launch.local.fork_server import import_libraries, source_of
from tests.conftest import RunCli

TASK = """
import own_quiet, own_threads
import torch
import lockstep

class Small(lockstep.Task):
    defaults = {"training": {"max_steps": 1}}

    def datasets(self):
        return lockstep.Datasets(torch.utils.data.TensorDataset(torch.randn(32, 4), torch.zeros(32, dtype=torch.long)))

    def model(self):
        return torch.nn.Linear(4, 2)

    def loss(self, model, batch):
        inputs, labels = batch
        return lockstep.Loss(torch.nn.functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels))
"""
QUIET = """
import os
with open("imported.txt", "a") as file:
    print(os.getpid(), file=file)
"""
THREADS = "import threading, time\nthreading.Thread(target=time.sleep, args=(3600,), daemon=True).start()\n"


@pytest.mark.parametrize(("more", "processes"), [("", 1), (THREADS, 3)])
def test_ranks_share_what_the_file_imports_unless_it_has_threads(
    more: str, processes: int, run_cli: RunCli, tmp_path: Path
) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "own_quiet.py").write_text(QUIET)
    (packages / "own_threads.py").write_text(more)
    (tmp_path / "small.py").write_text(TASK)
    path = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])
    ended = run_cli("train", "small.py:Small", "--devices", "cpu,cpu", env={"PYTHONPATH": path})
    assert ended.code == 0, ended.err
    assert len((tmp_path / "imported.txt").read_text().split()) == processes


@pytest.mark.parametrize(
    ("text", "imported"),
    [
        ('"""Text."""\nfrom __future__ import annotations\nimport os\nimport pa\nfrom pb.sub import x\n', {"pa", "pb"}),
        ("import pa\nimport os\nos.environ.setdefault('A', '')\nimport pb.sub\n", {"pa"}),
        ("import pa, own\nimport pb.sub\n", set()),
        ("import pa\nfrom . import own\nimport pb.sub\n", {"pa"}),
        ("import pa\nimport near\nimport pb.sub\n", {"pa"}),
        ("import pa\nfrom pb.sub import absent\nimport pc\n", {"pa", "pb"}),
        ("import pa\nimport absent\nimport pc\n", {"pa"}),
        ("import pa\nthis is no Python", set()),
    ],
)
def test_only_the_first_imports_and_only_of_installed_packages(
    text: str, imported: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages, own = tmp_path / "site-packages", tmp_path / "own"
    (packages / "pb").mkdir(parents=True)
    own.mkdir()
    for file in ("pa.py", "pc.py", "near.py", "pb/__init__.py"):
        (packages / file).touch()
    (packages / "pb/sub.py").write_text("x = 1")
    (own / "near.py").touch()
    (own / "task.py").write_text(text)
    monkeypatch.syspath_prepend(str(packages))
    before = set(sys.modules)
    import_libraries(own / "task.py")
    found = set(sys.modules) - before
    for name in found:
        del sys.modules[name]
    assert {name for name in found if "." not in name} == imported


def test_the_file_of_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("src").mkdir()
    Path("src/net.py").touch()
    file = (tmp_path / "src/net.py").resolve()
    assert [source_of(name) for name in ("src/net.py:Net", "src.net:Net", "src/net.py")] == [file] * 3
    assert [source_of(name) for name in ("har", "", "src/absent.py:Net", "torch.nn:Linear")] == [None] * 4


@pytest.mark.parametrize("devices", ["cpu", pytest.param("cpu,cpu", marks=pytest.mark.drill)])
def test_ranks_of_a_script_share_the_compiler_that_its_optimizers_import(
    devices: str, run_cli: RunCli, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text("import sys\nprint('shared', 'torch._dynamo' in sys.modules)\n")
    ended = run_cli("run", "script.py", "--devices", devices)
    assert "shared True" in ended.out and "no lockstep.Session was made" in ended.err
