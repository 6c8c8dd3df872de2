"""Trials: a function on fresh ranks, whose rows survive whatever ends them.

A rank that runs out of memory, is killed or fails ends its trial, not the benchmark: the launcher ends the other
ranks, and what was reported until then counts.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import cloudpickle

from lockstep.bench.rank import CALL_FILE, ROWS_FILE
from lockstep.config import RunConfig
from lockstep.engine.task import Task
from lockstep.hardware.host import usable_memory
from lockstep.hardware.resolve import Placement
from lockstep.launch import elastic, failure
from lockstep.launch.carry import pack_task
from lockstep.launch.causes import MEMORY_CAUSES
from lockstep.launch.folder import create_folder
from lockstep.launch.signals import StopRequest
from lockstep.telemetry.files import read_jsonl

#: How long a rank may take to end after a stop.
STOP_GRACE_S = 5.0
#: Share of a machine's free memory that the ranks of a trial on its CPU may take together.
CPU_SHARE = 0.8
#: How long a collective waits for a rank of a trial.
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Outcome:
    """What a trial reported, and how it ended. ``error``: why it failed, in a line."""

    rows: list[dict[str, Any]]
    ended: Literal["done", "out of memory", "failed", "stopped"] = "done"
    error: str = ""


@dataclass
class Trials:
    """Starts trials below ``folder``, one after another."""

    folder: Path
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def run(
        self,
        function: Callable[..., None],
        *arguments: Any,
        ranks: int,
        config: RunConfig,
        task: Task | None = None,
        threads: int = 1,
    ) -> Outcome:
        """Call ``function(rank, *arguments)`` on ``ranks`` new processes.

        Args:
            function: one that can be imported.
            config: of the trial; where its files go is decided here.
            task: what the ranks shall find with :func:`lockstep.launch.carry.load_task`.
            threads: intra-op threads of each rank.

        Raises:
            UsageError: a rank says that what was asked for cannot be.
        """
        path = self.folder / f"trial-{next(self._numbers):03}"
        run = create_folder(config.model_copy(update={"save_dir": path}))
        if task is not None:
            pack_task(run, task, config)
        (path / CALL_FILE).write_bytes(cloudpickle.dumps((function, arguments)))
        code = 0
        with StopRequest() as stop, contextlib.redirect_stdout(sys.stderr):
            if stop.requested is None:  # between two trials, that is
                code = elastic.launch(
                    run,
                    ranks,
                    environ={"LOCKSTEP_THREADS": str(threads)},
                    stop_grace_s=STOP_GRACE_S,
                    worker_module="lockstep.bench.worker",
                )
        rows = read_jsonl(path / ROWS_FILE)
        # Ranks that were still starting are killed after the grace, and the code says that they failed.
        if stop.requested is not None or code >= 128:
            return Outcome(rows, "stopped")
        if code == 0:
            return Outcome(rows)
        report = failure.collect(run)
        if report is None:
            return Outcome(rows, "failed", f"the ranks ended with exit code {code}")
        if report.first is not None and report.first.is_usage_error:
            raise report.as_error()
        lacks_memory = report.cause is not None and report.cause.name in MEMORY_CAUSES
        return Outcome(rows, "out of memory" if lacks_memory else "failed", report.what.splitlines()[0])


def memory_share(placement: Placement) -> int | None:
    """Bytes that each rank on a CPU may allocate, so that its trial runs out of memory and not the machine.

    ``None`` on GPUs, whose memory is the limit.
    """
    if placement.accelerator == "gpu":
        return None
    return int(usable_memory()[1] * CPU_SHARE / placement.world_size)


@contextlib.contextmanager
def new_trials() -> Iterator[Trials]:
    """Trials in a temporary folder, removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-", ignore_cleanup_errors=True) as name:
        yield Trials(Path(name))
