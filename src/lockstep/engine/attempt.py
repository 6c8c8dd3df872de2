"""One attempt of one rank: joining the other ranks, building what trains, and the record of how it ended."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable

from lockstep.config import RunConfig
from lockstep.engine.fit import build_fit
from lockstep.engine.rank_context import joined
from lockstep.engine.resume import load_latest
from lockstep.engine.run_log import RunLog
from lockstep.engine.state import RunResult
from lockstep.engine.task import Datasets, Task
from lockstep.engine.training_data import check_same_data, end_data, open_data, open_datasets
from lockstep.errors import LockstepError
from lockstep.events import Fanout, RunEnded, Sink
from lockstep.hardware.world import World
from lockstep.lightning.module_task import ModuleTask
from lockstep.planning import Plan
from lockstep.rundir.folder import RunDir


def run_attempt(
    run_dir: RunDir,
    world: World,
    task: Task,
    config: RunConfig,
    plan: Plan,
    *,
    attempt: int,
    sink: Sink,
    stop_signal: Callable[[], int | None],
    datasets: Datasets | None = None,
    keeper: bool | None = None,
) -> RunResult:
    """Train until the plan is fulfilled, or a stop is agreed on. Called once per rank.

    Args:
        datasets: already opened ones (in the process that made the plan).
        keeper: whether this rank writes the run folder that it sees, one rank for each folder; default: rank 0 does.
    """
    keeper = world.is_main if keeper is None else keeper
    sink = sink if keeper else Fanout()
    log: RunLog | None = None
    with contextlib.closing(sink), contextlib.ExitStack() as ending:
        try:
            with joined(run_dir, world, config, plan, attempt, sink, stop_signal, ending, keeper=keeper) as rank:
                if isinstance(task, ModuleTask):
                    from lockstep.lightning.module_fit import ModuleFit

                    module_fit = ModuleFit(rank, task, load_latest(rank))
                    log = module_fit.log
                    return module_fit.run()
                datasets = datasets or open_data(task, config, rank.collectives)
                if world.size > 1:
                    check_same_data(datasets, rank.collectives)
                    if plan.task.opens_files:  # loader workers must open them themselves
                        datasets = open_datasets(task, config)
                ending.callback(end_data, datasets)
                # No name for the snapshot here: it would keep its memory, or its files, until the end.
                fit = build_fit(rank, task, datasets, load_latest(rank, in_pieces=rank.reads_shards))
                log = fit.log
                return fit.run()
        except BaseException as error:
            record_failure(sink, log, error)
            raise


def record_failure(sink: Sink, log: RunLog | None, error: BaseException) -> None:
    text = str(error) if isinstance(error, LockstepError) else "".join(traceback.format_exception(error))
    step, elapsed_s = (log.state.step, log.elapsed_s) if log else (0, 0.0)
    # The folder may be what failed; then the first error is the one to report.
    with contextlib.suppress(LockstepError):
        sink.emit(RunEnded("failed", step, {}, None, {}, elapsed_s, error=text))
