"""``lockstep top``: once, as JSON, and live on a real terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.events import RankState
from lockstep.hardware.monitor import Monitor, Sample
from lockstep.rundir.files import JsonLines
from lockstep.rundir.folder import RunDir
from lockstep.rundir.summary import live_state
from tests.conftest import RunCli, cli_environment
from tests.fakes import FakeSource
from tests.rundir.runs import make_run


def running(folder: Path) -> RunDir:
    """A run that this process keeps alive, in mid-epoch on two ranks of one node."""
    run = make_run(folder, name="first try")
    run.begin_attempt({"epochs": 3}, {"devices": ["gpu:0", "gpu:1"]})
    run.update(status="running")
    beat = json.loads(run.heartbeat_file.read_text())
    run.heartbeat_file.write_text(
        json.dumps({**beat, "step": 120, "total": 2000, "began": beat["updated"] - 5, "began_at": 20})
    )
    run.append_step({"attempt": 1, "step": 100, "epoch": 2, "loss": 0.25, "lr": 1e-3, "samples_per_s": 4321.0})
    ranks = [RankState(rank, 0.05, 0.001, 0.02 + 0.02 * rank, 11.5, 14.0, 12.5) for rank in (0, 1)]
    row = [{name: getattr(rank, name) for name in RankState.__slots__} for rank in ranks]
    JsonLines(run.ranks_file).append({"attempt": 1, "step": 100, "epoch": 2, "ranks": row, "slow_rank": 1})
    gpu = {"name": "NVIDIA Test", "utilisation": 0.97, "memory_gb": 71.2, "memory_total_gb": 80.0, "power_w": 640.5}
    gpu |= {"power_limit_w": 700.0, "temperature_c": 61, "sm_clock_mhz": 1980, "throttled": ["power cap"]}
    host = {"name": "n1", "cpu": 0.42, "memory_gb": 11.9, "memory_total_gb": 64.0}
    devices = [{"id": "gpu:0", **gpu}, {"id": "gpu:1", **gpu, "utilisation": None}]
    JsonLines(run.path / "system-0.jsonl").append({"time": time.time(), "host": host, "devices": devices})
    return run


def test_without_a_run_it_shows_this_machine(run_cli: RunCli) -> None:
    result = run_cli("top", "--json")
    assert (result.code, result.err) == (0, "")
    document = json.loads(result.out)
    assert document["run"] is None
    (node,) = document["nodes"]
    assert 0 <= node["host"]["cpu"] <= 1
    assert "host" in run_cli("top").out, "in a pipe it prints once and ends"


def test_a_run_once(run_cli: RunCli, tmp_path: Path) -> None:
    running(tmp_path / "runs" / "a")
    result = run_cli("top", "last", "--once")
    assert result.code == 0, result.err
    lines = [" ".join(line.split()) for line in result.out.splitlines()]
    assert "run run-00000001 first try" in lines
    assert "status running" in lines
    assert "progress step 120/2000 (6%), epoch 2, 1:34 left" in lines, "100 steps took 5 s, 1880 remain"
    assert "loss 0.2500" in lines
    assert "rank 1 50.0 ms 40.0 ms 1.0 ms 11.5 GB 12.5 GB slow: the other ranks wait for it" in lines
    assert "gpu:0 NVIDIA Test 97% 71.2/80.0 GB 640/700 W 61 °C 1980 MHz power cap" in lines
    assert "n1 42% 11.9/64.0 GB" in lines


def test_a_monitor_that_has_ended_says_so(run_cli: RunCli, tmp_path: Path) -> None:
    class Broken(FakeSource):
        def sample(self) -> Sample:
            raise RuntimeError("the driver is gone")

    run = running(tmp_path / "runs" / "a")
    with Monitor(Broken([]), JsonLines(run.path / "system-0.jsonl").append, interval_s=0.001) as monitor:
        while monitor.error is None:
            time.sleep(0.001)
    result = run_cli("top", "last")
    assert result.code == 0, result.err
    assert "the monitor has ended: the driver is gone" in result.out


def test_a_run_as_json(run_cli: RunCli, tmp_path: Path) -> None:
    run = running(tmp_path / "runs" / "a")
    document = json.loads(run_cli("top", "run-0000", "--json").out)
    assert document["run"]["step"] == 120
    assert document["run"]["slow_rank"] == 1
    assert document["nodes"][0]["devices"][1]["utilisation"] is None
    later = live_state(run, now=time.time() + 60)
    assert later["nodes"] == [], "samples of a minute ago say nothing about now"


def test_wrong_usage(run_cli: RunCli) -> None:
    for words in (("nope",), ("--interval", "0")):
        result = run_cli("top", *words)
        assert result.code == 2
        assert result.err.startswith("error:")
        assert "Traceback" not in result.err


class Terminal:
    """``lockstep top`` on a pseudo-terminal."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process, self._descriptor, self.output = process, descriptor, ""

    def read_until(self, text: str) -> None:
        deadline = time.monotonic() + 60
        while text not in self.output:
            assert time.monotonic() < deadline, self.output
            if select.select([self._descriptor], [], [], 0.1)[0]:
                self.output += os.read(self._descriptor, 65536).decode(errors="replace")

    def end(self) -> int:
        """Its exit code; what it writes until then is read, so that it never waits for us."""
        deadline = time.monotonic() + 60
        while self.process.poll() is None and time.monotonic() < deadline:
            if select.select([self._descriptor], [], [], 0.1)[0]:
                try:
                    self.output += os.read(self._descriptor, 65536).decode(errors="replace")
                except OSError:  # Linux: the other side is closed
                    break
        return self.process.wait(timeout=30)


@contextmanager
def on_a_terminal(*words: str, cwd: Path) -> Iterator[Terminal]:
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", "top", "--interval", "0.1", *words],
        cwd=cwd,
        env=cli_environment(TERM="xterm-256color"),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    try:
        yield Terminal(process, controller)
    finally:
        process.kill()
        process.wait()
        os.close(controller)


def test_live_it_goes_on_until_it_is_told(tmp_path: Path) -> None:
    run = running(tmp_path / "runs" / "a")
    with on_a_terminal("last", cwd=tmp_path) as terminal:
        terminal.read_until("step 120/2000")
        beat = json.loads(run.heartbeat_file.read_text())
        run.heartbeat_file.write_text(json.dumps({**beat, "step": 777}))
        terminal.read_until("step 777/2000")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 0
    assert "Traceback" not in terminal.output


def test_live_it_ends_with_the_run_and_works_without_one(tmp_path: Path) -> None:
    running(tmp_path / "runs" / "a").update(status="completed")
    with on_a_terminal("last", cwd=tmp_path) as terminal:
        assert terminal.end() == 0
    assert "completed" in terminal.output
    with on_a_terminal(cwd=tmp_path) as terminal:
        terminal.read_until("cpu")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 0
