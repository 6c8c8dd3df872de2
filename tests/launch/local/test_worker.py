"""Where a rank's output goes, and what it finds in its environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from threadpoolctl import threadpool_limits

from lockstep.launch.process import environment
from lockstep.launch.process.rank_log import log_file, rank_output


def test_other_ranks_write_to_their_logs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with rank_output(tmp_path / "logs", 1):
        os.write(2, b"native\n")
        subprocess.run([sys.executable, "-c", "print('child')"], check=True)
    os.write(1, b"back\n")
    assert capfd.readouterr() == ("back\n", "")
    log = log_file(tmp_path / "logs", 1).read_text()
    for text in ("native", "child"):
        assert text in log


def test_rank_0_keeps_its_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        with rank_output(tmp_path, 0):
            os.write(1, b"bar\n")
    assert capfd.readouterr().out == "bar\nbar\n"
    log = log_file(tmp_path, 0).read_text()
    assert "bar" not in log
    assert log.count("rank 0") == 2


def test_an_outer_launcher_is_forgotten() -> None:
    base = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "HOME": "/home/x"}
    made = environment.for_launcher(base, "mark", [])
    assert not made.keys() & {"RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
    assert made["HOME"] == "/home/x"
    assert (made[environment.LAUNCHER], made[environment.LAUNCH_ID]) == ("1", "mark")


@pytest.mark.parametrize(
    ("base", "threads"),
    [
        ({}, "1"),
        ({"OMP_NUM_THREADS": "3"}, "3"),
    ],
)
def test_threads(base: dict[str, str], threads: str) -> None:
    assert environment.for_launcher(base, "mark", [])["OMP_NUM_THREADS"] == threads
    assert environment.for_launcher(base, "mark", [], threads=2)["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize("given", ["2", "2,1"])
def test_a_fork_uses_the_threads_of_its_environment(given: str) -> None:
    before = torch.get_num_threads()
    with threadpool_limits(user_api="blas"):  # restores those of NumPy
        try:
            environment.set_threads({"OMP_NUM_THREADS": given})
            assert torch.get_num_threads() == 2
            environment.set_threads({})
            assert torch.get_num_threads() == 2
        finally:
            torch.set_num_threads(before)


def test_ranks_import_what_the_caller_can_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    caller_path = ["", "/first", "/at 09:12", *sys.path, "/last"]
    made = environment.for_launcher({"PYTHONPATH": "/given"}, "mark", caller_path)
    before = made["PYTHONPATH"].split(os.pathsep)
    assert before[:2] == [str(tmp_path), "/first"]
    assert "/given" in before
    assert "/last" not in before  # it must not come before Python's own modules
    monkeypatch.setattr(sys, "path", ["/own"])
    environment.restore_sys_path(made)
    assert sys.path[:3] == [str(tmp_path), "/first", "/at 09:12"]
    assert sys.path[-2:] == ["/last", "/own"]
