"""The process of a trial: its start, its evaluations while it trains, and its end."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, Self

from lockstep.lab.sweep import trial as trial_process
from lockstep.lab.sweep.searches import Search, Trial
from lockstep.launch.process.environment import set_defaults
from lockstep.rundir.folder import RunDir, or_else

#: Seconds between two looks at the evaluations of a running trial.
_PRUNE_S = 1.0


class Process(Protocol):
    """The part of :class:`subprocess.Popen` that a sweep needs; the process may be on another machine."""

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def communicate(self) -> object: ...


#: Starts the process of a trial with its pickled task and settings, number of threads, and log.
StartProcess = Callable[[bytes, int | None, Path], Process]


def start_process(job: bytes, threads: int | None, log: Path) -> subprocess.Popen[bytes]:
    """Start a trial here. It ends when this process ends. ``threads``: its number, where trials share cores."""
    environment = dict(os.environ)
    set_defaults(environment)
    if threads is not None:
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", trial_process.__name__],
            stdin=subprocess.PIPE,  # it ends when this end is closed
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C in a terminal reaches it through the sweep alone
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended, and its log has the reason
        pickle.dump({"path": sys.path, "argv": sys.argv}, process.stdin)
        pickle.dump(job, process.stdin)
        process.stdin.flush()
    return process


class TrialProcess:
    """A trial that is being trained, on ``devices``; its output goes to ``log``."""

    _process: Process

    def __init__(self, trial: Trial, run: RunDir, devices: tuple[str, ...], log: Path) -> None:
        self.trial = trial
        self.run = run
        self.devices = devices
        self.log = log
        self.began = self._looked = time.monotonic()
        self._is_stopped = self._is_pruned = False

    def start(self, start: StartProcess, job: bytes, threads: int | None) -> Self:
        """Start the process with its pickled task and settings; ``threads``: its number, where cores are shared."""
        self._process = start(job, threads, self.log)
        return self

    def has_ended(self) -> bool:
        """Return whether the process has ended."""
        if self._process.poll() is None:
            return False
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()  # closes the pipe
        return True

    def status(self) -> str:
        """Return the status of its run, ``pruned``, or ``failed`` without a run."""
        status = self.run.status() if self.run.run_file.exists() else "failed"
        return "pruned" if status == "stopped" and self._is_pruned else status

    def stop(self) -> None:
        """Ask for its end with a checkpoint, once: it ends after the step that it is in."""
        if not self._is_stopped:
            self._is_stopped = True
            self._process.terminate()

    def kill(self) -> None:
        """End it without a checkpoint."""
        self._process.kill()
        self._process.communicate()

    def prune(self, search: Search) -> None:
        """Stop it if its evaluations are worse than those of other trials."""
        if self._is_stopped or time.monotonic() - self._looked < _PRUNE_S:
            return
        self._looked = time.monotonic()
        monitor = str(or_else(self.run.plan, {}).get("monitor"))
        rows = sorted([*self.run.epochs(), *self.run.evaluations()], key=lambda row: row.get("step") or 0)
        scores = [value for row in rows if isinstance(value := row.get(monitor), int | float) and math.isfinite(value)]
        if search.should_prune(self.trial, scores):
            self._is_pruned = True
            self.stop()

    def error(self) -> str:
        """Return the first line of the error of a trial that failed."""
        record = or_else(self.run.read, None) if self.run.run_file.exists() else None
        if record is not None and record.error:
            return str(record.error).strip().splitlines()[0]
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        return (errors or lines or [f"exit code {self._process.returncode}"])[-1].removeprefix("error: ")
