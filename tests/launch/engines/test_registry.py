"""An engine of another package: an entry point of the group ``lockstep.engines``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import RunCli
from tests.e2e.test_train import TOY
from tests.gloo import ROOT

MODULE = """
from lockstep.launch.engines.spec import EngineOption, EngineSpec

class Mine:
    def check(self, job): ...

    def manifest(self, job):
        return f"{job.nodes} nodes with {job.ranks_per_node} ranks, {job.options['queue']}: {job.arguments()}"

    def submit(self, job):
        (job.run_folder / "submitted").write_text(job.options["queue"])
        return 7

SPEC = EngineSpec(name="mine", summary="for a test", make=Mine, options=(EngineOption(name="queue", help="A queue."),))
"""


@pytest.mark.slow
def test_an_engine_of_a_package_has_its_flags_and_gets_the_job(run_cli: RunCli, tmp_path: Path) -> None:
    package = tmp_path / "site"
    (package / "mine-1.0.dist-info").mkdir(parents=True)
    (package / "mine.py").write_text(MODULE)
    (package / "mine-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (package / "mine-1.0.dist-info" / "entry_points.txt").write_text("[lockstep.engines]\nmine = mine:SPEC\n")
    env = {"PYTHONPATH": f"{ROOT / 'src'}:{package}"}
    job = ("train", TOY, "--on", "mine", "--queue", "long", "--nodes", "1:3", "--devices", "cpu,cpu", "--lr", "0.5")
    printed = run_cli(*job, "--save-dir", "run", "--print", env=env, fresh=True)
    assert printed.code == 0, printed.err
    assert printed.out.startswith("1:3 nodes with 2 ranks, long: ['-m', 'lockstep', 'train', ")
    assert "'optimizer.lr=0.5'" in printed.out and "launch.nodes" not in printed.out
    assert not (tmp_path / "run").exists()
    submitted = run_cli(*job, "--save-dir", "run", env=env, fresh=True)
    assert submitted.code == 7, "the exit code of the engine is that of the command"
    assert (tmp_path / "run" / "submitted").read_text() == "long"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "pending"
    other = run_cli("train", TOY, "--on", "slurm", "--queue", "long", env=env, fresh=True)
    assert other.code == 2
    assert "--queue is for --on mine" in other.err
