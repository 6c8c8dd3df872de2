"""Trials: a function on fresh ranks, whose rows survive whatever ends them.

A rank that runs out of memory, is killed or fails ends its trial, not the benchmark: the launcher ends the other
ranks, and what was reported until then counts.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lockstep.bench.rank import ROWS_FILE, Rank
from lockstep.config import RunConfig
from lockstep.engine.task import Task
from lockstep.errors import RankFailed
from lockstep.hardware.host import usable_memory
from lockstep.hardware.resolve import Placement
from lockstep.launch.failure.report import read_failure
from lockstep.launch.local import worker
from lockstep.launch.local.on_ranks import run_on_ranks, temporary_folder
from lockstep.launch.run_claim import create_folder
from lockstep.tasks.registry import pack_task
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
        function: Callable[[Rank], None],
        *,
        ranks: int,
        config: RunConfig,
        task: Task | None = None,
        threads: int = 1,
    ) -> Outcome:
        """Call ``function(rank)`` on ``ranks`` new processes.

        Args:
            function: one that can be imported.
            config: of the trial; where its files go is decided here.
            task: what the ranks shall find with :func:`lockstep.tasks.registry.load_task`.
            threads: intra-op threads of each rank.

        Raises:
            UsageError: a rank refuses its settings.
        """
        path = self.folder / f"trial-{next(self._numbers):03}"
        run = create_folder(config.model_copy(update={"save_dir": path}))
        if task is not None:
            pack_task(run, task, config)
        ended: Literal["done", "out of memory", "failed", "stopped"] = "done"
        said = ""
        try:
            run_on_ranks(_on_rank, function, folder=run, ranks=ranks, threads=threads, stop_grace_s=STOP_GRACE_S)
        except KeyboardInterrupt:
            ended = "stopped"
        except RankFailed as error:
            report = read_failure(run)
            lacks_memory = report is not None and report.cause is not None and report.cause.key.is_memory
            ended, said = "out of memory" if lacks_memory else "failed", error.what.splitlines()[0]
        return Outcome(read_jsonl(path / ROWS_FILE), ended, said)


def _on_rank(rank: worker.Rank, function: Callable[[Rank], None]) -> None:
    function(Rank(rank.folder, rank.world, lambda: rank.stop.requested))


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
    with temporary_folder("lockstep-bench-") as folder:
        yield Trials(folder)
