"""Loader workers that cannot hand over a batch end the run with the reason; long paths are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.errors import DataError
from lockstep.rundir.folder import RunDir
from tests.conftest import RunCli
from tests.gloo import ROOT

FILE = ROOT / "tests" / "e2e" / "loaders.py"
TASK = f"{FILE}:Loading"
SHORT = ("--epochs", "1", "--batch-size", "4", "--num-workers", "1", "--save-dir", "run")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "devices"), [("many", "cpu,cpu"), ("unpicklable", "cpu")])
def test_a_batch_that_a_worker_cannot_hand_over_ends_the_run(
    kind: str, devices: str, run_cli: RunCli, tmp_path: Path
) -> None:
    result = run_cli("train", TASK, *SHORT, "--devices", devices, "--set", f"task.kind={kind}")
    assert result.code == DataError.exit_code
    assert ("open files" if kind == "many" else "pickle") in result.err
    assert RunDir.open(tmp_path / "run").status() == "failed"


@pytest.mark.slow
@pytest.mark.parametrize(("task", "devices"), [(TASK, "cpu"), (f"{FILE}:Streaming", "cpu,cpu")])
def test_workers_and_streams_do_not_depend_on_the_length_of_the_temporary_folder(
    task: str, devices: str, run_cli: RunCli, tmp_path: Path
) -> None:
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    more = ("--devices", devices, "--set", "data.epoch_samples=16")
    result = run_cli("train", task, *SHORT, *more, env={"TMPDIR": str(folder)})
    assert result.code == 0, result.err
    assert not [file for file in folder.rglob("*") if not file.is_dir()]


@pytest.mark.slow
def test_a_first_step_without_data_is_a_hang(run_cli: RunCli) -> None:
    more = ("--devices", "cpu,cpu", "--set", "task.kind=stuck", "--set", "launch.hang_timeout_s=1")
    result = run_cli("train", TASK, *SHORT, *more)
    assert result.code == 1
    assert "each waits for its loader" in result.err and "--num-workers 0" in result.err
