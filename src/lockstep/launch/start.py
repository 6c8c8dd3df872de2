"""Starting what was prepared: in this process for one device, else on ranks of this machine."""

from __future__ import annotations

from lockstep.engine.state import RunResult
from lockstep.hardware import World
from lockstep.launch import rank
from lockstep.launch.failure import records
from lockstep.launch.failure.report import INTERRUPTED, keep_failure, own_failure
from lockstep.launch.local.on_ranks import launch
from lockstep.launch.nodes.preparation import Start
from lockstep.launch.prepare import RunInputs
from lockstep.launch.run_claim import warn
from lockstep.rundir.folder import RunDir
from lockstep.tasks.registry import pack_task


def start(prepared: RunInputs, run: RunDir, *, resumed_from: int) -> RunResult:
    """Train what was prepared, as a new attempt of ``run``; returns when it has ended, raises when it failed.

    ``resumed_from``: the step of the checkpoint that the attempt resumes; 0 without one.
    """
    attempt = run.begin_attempt(prepared.plan.as_dict(), prepared.placement.as_dict(), resumed_from)
    try:
        if prepared.placement.world_size > 1:
            return _train_on_ranks(prepared, run)
        return _train_here(prepared, run, attempt)
    except KeyboardInterrupt:
        keep_failure(run, INTERRUPTED)
        raise


def _train_here(prepared: RunInputs, run: RunDir, attempt: int) -> RunResult:
    planned = Start(run, prepared.task, prepared.config, prepared.datasets, prepared.plan, attempt)
    try:
        return rank.train_as_rank(World(), prepared.config, lambda team, ending: planned)
    except Exception as error:
        failure = own_failure(run, error)
        if failure is None:
            raise
        raise failure.as_error() from error


def _train_on_ranks(prepared: RunInputs, run: RunDir) -> RunResult:
    pack_task(run, prepared.task, prepared.config)
    code = launch(
        run,
        prepared.placement.world_size,
        settings=prepared.config.launch,
        threads=prepared.plan.threads,
        rank_main=f"{rank.__name__}:{rank.train_as_launched.__name__}",
    )
    failure = keep_failure(run, f"the launcher ended with exit code {code}") if code else None
    if failure is not None:
        raise failure.as_error()
    record, beat = run.read(), run.progress()
    if code == 1 and record.status == "completed":
        warn(f"the run is completed, but its launcher ended with exit code 1: see {run.logs / records.LAUNCHER_FILE}")
    return RunResult(
        status=record.status,
        exit_code=code,
        run_dir=run.path,
        step=beat.step if beat else 0,
        metrics=dict(record.final_metrics),
        best_epoch=record.best_epoch,
        best_metric=dict(record.best_metric),
    )
