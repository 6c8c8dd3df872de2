"""One attempt of one rank: joining the other ranks, building what trains, and the record of how it ended."""

from __future__ import annotations

import contextlib
import traceback

from lockstep.engine.rank_context import Attempt, join_ranks
from lockstep.engine.run_log import RunLog
from lockstep.engine.runner import runner_of
from lockstep.engine.state import RunResult
from lockstep.engine.task import Datasets, Task
from lockstep.errors import LockstepError
from lockstep.events import RunEnded, Sink


def run_attempt(attempt: Attempt, task: Task, datasets: Datasets | None = None) -> RunResult:
    """Train until the plan is fulfilled, or a stop is agreed on. Called once per rank.

    Args:
        datasets: already opened ones (in the process that made the plan).
    """
    sink = attempt.sink
    log: RunLog | None = None
    with contextlib.closing(sink), contextlib.ExitStack() as ending:
        try:
            with join_ranks(attempt, ending) as rank:
                fit = runner_of(task).fitting(rank, datasets, ending)
                log = fit.log
                return fit.run()
        except BaseException as error:
            attempt.on_error(error)
            record_failure(sink, log, error)
            raise


def record_failure(sink: Sink, log: RunLog | None, error: BaseException) -> None:
    text = str(error) if isinstance(error, LockstepError) else "".join(traceback.format_exception(error))
    step, elapsed_s = (log.state.step, log.elapsed_s) if log else (0, 0.0)
    # The folder may be what failed; then the first error is the one to report.
    with contextlib.suppress(LockstepError):
        sink.emit(RunEnded("failed", step, {}, None, {}, elapsed_s, error=text))
