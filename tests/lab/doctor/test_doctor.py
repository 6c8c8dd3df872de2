"""``lockstep doctor`` as a user runs it: real ranks, a real training step, real exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.cli.main import main
from tests.conftest import RunCli
from tests.disks import make_read_only, small_disk
from tests.e2e.test_train import finish, start

REHEARSED = ("ranks", "all-reduce", "bandwidth", "training step")


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the commands of a test keep temporary files; a short path, since sockets lie there (108 characters)."""
    with tempfile.TemporaryDirectory(prefix="d-") as name:
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


def left_behind(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if "doctor" in path.name or path.is_file()]


def test_two_ranks_on_the_cpu(tmp_path: Path, temporary: Path) -> None:
    process = start("doctor", "--devices", "cpu,cpu", "--json", "--runs-dir", "runs", cwd=tmp_path)
    output = finish(process)
    report = json.loads(output[output.index("\n{") :])
    found = {finding["name"]: finding for finding in report["findings"]}
    assert report["fit"] and report["devices"] == ["cpu", "cpu"]
    assert [found[name]["status"] for name in (*REHEARSED, "run folder", "atomic rename")] == ["ok"] * 6
    meeting = report["meeting"]
    assert meeting["backend"] == "gloo" and [rank["rank"] for rank in meeting["ranks"]] == [0, 1]
    assert [row["bytes"] for row in meeting["all_reduce"]] == [4 << 10, 1 << 20, 64 << 20]
    assert all(row["seconds"] > 0 and row["wrong"] == [] for row in meeting["all_reduce"])
    assert left_behind(tmp_path) == []


@pytest.mark.slow
def test_ranks_of_torchrun_on_two_nodes(tmp_path: Path, temporary: Path) -> None:
    """Two agents, a rank each; the first one's rank reports for both."""
    port = str(free_port())
    agents = [
        start(
            "doctor",
            module=(
                *("torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", f"--node_rank={node}"),
                *("--master_addr=127.0.0.1", f"--master_port={port}", "-m", "lockstep"),
            ),
            cwd=tmp_path,
        )
        for node in (0, 1)
    ]
    first, second = (finish(agent) for agent in agents)
    for name in REHEARSED:
        assert re.search(rf"^OK +{name} ", first, re.MULTILINE), first
    assert "2 ranks met over gloo" in first
    assert "READY for training on cpu, cpu" in first
    assert "READY" not in second
    assert left_behind(tmp_path) == []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def read_only_folder(folder: Path) -> Iterator[Path]:
    """A folder in which this user cannot write: root can everywhere but on a read-only disk."""
    if os.geteuid() == 0:
        with small_disk(folder, "1m") as disk:
            make_read_only(disk)
            yield disk
    else:
        folder.mkdir(mode=0o555)
        yield folder


def test_a_read_only_run_folder_fails_with_its_fix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with read_only_folder(tmp_path / "disk") as folder:
        code = main(["doctor", "--quick", "--devices", "cpu,cpu", "--runs-dir", str(folder / "runs")])
    output = capsys.readouterr().out
    assert code == 1
    assert "FAIL  run folder" in output
    assert re.search(r"^ *fix: .*--runs-dir", output, re.MULTILINE)
    assert "NOT READY for training on cpu, cpu: 1 failed" in output


@pytest.mark.slow
def test_ranks_that_cannot_meet_fail_with_the_reason(run_cli: RunCli, tmp_path: Path, temporary: Path) -> None:
    result = run_cli("doctor", "--devices", "cpu,cpu", env={"GLOO_SOCKET_IFNAME": "absent0", "TMPDIR": str(temporary)})
    assert result.code == 1
    for name in ("FAIL  ranks", "SKIP  training step"):
        assert name in result.out
    assert "absent0" in result.out.partition("FAIL ranks: ")[2].splitlines()[0]
    assert "Traceback" not in result.out + result.err
    assert left_behind(tmp_path) == []


def test_one_device_and_wrong_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--devices", "cpu", "--quick"]) == 0
    assert "\nREADY for training on cpu:" in capsys.readouterr().out
    assert main(["doctor", "--devices", "gpu:77"]) == 2
    output = capsys.readouterr()
    assert re.match(r"error: .*gpu:77", output.err) and output.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.drill
def test_a_stop_leaves_nothing_behind(tmp_path: Path, temporary: Path) -> None:
    process = start("doctor", "--devices", "cpu,cpu", cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not list(temporary.glob("lockstep-doctor-*/ranks/logs/launcher.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    output = finish(process, code=130)
    assert "Traceback" not in output
    assert left_behind(tmp_path) == []
    assert list(temporary.iterdir()) == []
