"""The pace: one process sets it, and the contestants take blocks of steps in turn.

Every contestant is a process (or two ranks) of its own that lives for the whole contest. All but one stand still,
waiting for a word on a socket, so a block is timed on a machine that does nothing else of ours, and the blocks of one
round are neighbours in time: what else the machine does falls on all of them alike.

Step k·period + 50 waits for the word; the clock runs from k·period + 100 to (k + 1)·period. So batches that were
fetched while a contestant stood still are used up before the clock starts, and an epoch ends while it stands.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pace.workload import INTERVAL, UNTIMED, Workload

_WORD = b"."
#: Starting takes seconds, a block less; this only bounds a failure.
_PATIENCE_S = 600.0


class Clocks(NamedTuple):
    """Seconds: on the wall, of the training thread's processor, and of the processors of all threads."""

    wall: float
    thread: float
    process: float

    def since(self, start: Clocks) -> Clocks:
        return Clocks(*(now - then for now, then in zip(self, start, strict=True)))


class Pacer:
    """A contestant's side. Ranks but the first have none to talk to: they wait for the first in their next step."""

    def __init__(self, workload: Workload, *, speaks: bool) -> None:
        self._workload = workload
        self._started = self._elapsed = Clocks(0.0, 0.0, 0.0)
        self._socket: socket.socket | None = None
        if speaks:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(workload.socket)

    def tick(self, step: int) -> None:
        """Every 50 steps: ``step`` are done."""
        if self._socket is None:
            return
        phase = step % self._workload.period
        if phase == UNTIMED:
            self._started = self._clock()
        elif phase == 0:
            self._elapsed = self._clock().since(self._started)
        elif phase == INTERVAL:
            self._socket.sendall(f"{' '.join(map(repr, self._elapsed))}\n".encode())
            if step < self._workload.total_steps and not self._socket.recv(1):
                raise SystemExit("the benchmark has ended before this contestant")

    def _clock(self) -> Clocks:
        if self._workload.device != "cpu":
            torch.cuda.synchronize()
        return Clocks(time.perf_counter(), time.thread_time(), time.process_time())


class Contestant:
    """The benchmark's side of one contestant: starts its processes, and lets it run one block at a time."""

    def __init__(self, workload: Workload, environment: dict[str, str]) -> None:
        self._workload = workload
        self._log = Path(workload.folder) / "log.txt"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(workload.socket)
        listener.listen(1)
        listener.settimeout(1.0)
        several = workload.ranks > 1 and not workload.side.startswith("lockstep")  # which starts its ranks itself
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={workload.ranks}", "-m"]
        command = [sys.executable, "-m", *(launcher if several else []), "pace.worker", workload.as_json()]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            self._socket = self._accept(listener)
            self._lines = self._socket.makefile("rb")
            self._read()  # it has trained a little, and stands
        except BaseException:
            self.close()
            raise
        finally:
            listener.close()

    def block(self) -> Clocks:
        """Seconds a step of the next block."""
        self._socket.sendall(_WORD)
        return Clocks(*(seconds / self._workload.steps for seconds in self._read()))

    def close(self) -> None:
        """After its last block a contestant ends by itself."""
        with contextlib.suppress(AttributeError):
            self._socket.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, 9)
            self._process.wait()

    def _accept(self, listener: socket.socket) -> socket.socket:
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until and self._process.poll() is None:
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                connection.settimeout(_PATIENCE_S)
                return connection
        raise self._failure()

    def _read(self) -> Clocks:
        with contextlib.suppress(TimeoutError, ConnectionError):
            line = self._lines.readline()
            if line.endswith(b"\n"):
                return Clocks(*map(float, line.split()))
        raise self._failure()

    def _failure(self) -> SystemExit:
        text = self._log.read_text(errors="replace")[-4000:]
        return SystemExit(f"{self._workload.side} on {self._workload.ranks} rank(s) failed:\n{text}")


@contextlib.contextmanager
def started(
    sides: Sequence[str], settings: dict[str, Any], workers: Mapping[str, int | None] | None = None
) -> Iterator[dict[str, Contestant]]:
    """The contestants by side. ``workers``: loader processes of each."""
    here = Path(__file__).resolve().parents[1]
    path = os.pathsep.join(filter(None, (str(here), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    if settings["device"] == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        contestants = {}
        for side in sides:
            home = Path(folder) / side
            home.mkdir()
            own = {"side": side, "socket": str(home / "pace"), "folder": str(home)}
            workload = Workload(**settings, **own, workers=(workers or {}).get(side))
            contestants[side] = stack.enter_context(contextlib.closing(Contestant(workload, environment)))
        yield contestants
