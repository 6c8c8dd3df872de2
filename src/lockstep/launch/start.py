"""Training an attempt that was prepared here: in this process for one device, else on ranks of this machine."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch

from lockstep.config import RunConfig
from lockstep.engine.state import RunResult
from lockstep.errors import LockstepError, RankOutOfMemory
from lockstep.events import Note
from lockstep.launch import rank
from lockstep.launch.failure import records
from lockstep.launch.failure.report import INTERRUPTED, keep_failure, own_failure
from lockstep.launch.local.on_ranks import RankLimits, RanksStopped, run_on_ranks
from lockstep.launch.meeting.membership import Team
from lockstep.launch.meeting.preparation import PlanRequest, Start, begin_again, begin_attempt
from lockstep.launch.process.signals import StopRequest
from lockstep.planning import Plan
from lockstep.rundir.folder import RunDir
from lockstep.tasks.registry import pack_task

T = TypeVar("T")

#: Maximum number of halvings after running out of memory (16 times smaller).
RETRIES = 4
#: Number of steps that count as the start of an attempt.
FIRST_STEPS = 3


def train_with_retries(team: Team, start: Start) -> RunResult:
    """Train; returns when the run has ended, raises when an attempt failed and the settings ask for no other one.

    ``team``: of this process alone.
    """
    try:
        if start.plan.placement["world_size"] > 1:
            return _train_on_ranks(team, start)
        return _with_retries(team, start, partial(_train_in_process, team))
    except KeyboardInterrupt:
        keep_failure(start.run, INTERRUPTED)
        raise


def _train_in_process(team: Team, start: Start, restarts: int) -> RunResult:
    try:
        with ExitStack() as ending:
            return rank.train(team, start, ending)
    except Exception as error:
        failure = own_failure(start.run, error)
        if failure is None:
            raise
        raise failure.as_error() from error


def _train_on_ranks(team: Team, start: Start) -> RunResult:
    run = start.run
    code, _ = run_of_ranks(run, partial(_with_retries, team, start, _start_ranks, start.config.launch.max_restarts))
    record = run.read()
    beat = run.progress()
    return RunResult(
        status=record.status,
        exit_code=0 if record.status == "completed" else code,  # a stop may come too late
        run_dir=run.path,
        step=beat.step if beat else 0,
        metrics=dict(record.final_metrics),
        best_epoch=record.best_epoch,
        best_metric=dict(record.best_metric),
    )


def _start_ranks(start: Start, restarts: int) -> list[Any]:
    return run_on_ranks(
        rank.train_as_launched,
        start.config,
        start.plan,
        start.attempt,
        start.restarted,
        pack_task(start.task, start.config),
        folder=start.run,
        ranks=start.plan.placement["world_size"],
        limits=rank_limits(start.config, start.plan.threads, restarts),
        redirect=False,
    )


def _with_retries(team: Team, start: Start, train: Callable[[Start, int], T], max_restarts: int = 0) -> T:
    """Call ``train(start, restarts)`` and, after a failure, again with the next attempt that the settings ask for.

    Each begins at the latest checkpoint, or at the start. After running out of memory its micro-batch is halved; the
    global batch stays, so losses are those of a run that began with the smaller one. After another failure the plan
    stays. All ranks end with a failed attempt, and its memory with them. A stop ends the attempts.
    """
    restarts = 0
    halvings = 0
    with StopRequest() as stop:
        while True:
            try:
                return train(start, restarts)
            except LockstepError as error:
                is_out_of_memory = isinstance(error, RankOutOfMemory)
                smaller = _halved(start) if is_out_of_memory and halvings < RETRIES else None
                may_restart = restarts < max_restarts and records.read_launcher(start.run).may_restart
                if stop.requested is not None or not (smaller or may_restart):
                    raise
                reason = error.what.splitlines()[0]
            if smaller is not None:
                halvings += 1
                start = _with_smaller_batch(team, start, smaller, reason)
            else:
                restarts += 1
                start = begin_again(start, restarts, reason)


def _with_smaller_batch(team: Team, start: Start, config: RunConfig, reason: str) -> Start:
    gc.collect()
    if torch.cuda.is_initialized():  # to ask whether there is a GPU would keep forks of this process from using it
        torch.cuda.empty_cache()
    change = partial(_with_note, reason=reason[:200])
    return begin_attempt(team, PlanRequest(start.run, start.task, config, change=change))


def rank_limits(config: RunConfig, threads: int, restarts: int = 0) -> RankLimits:
    """Return limits of the ranks of a run; a rank that stops completes the run's mirror."""
    mirror_s = 0.0 if config.storage.mirror is None else config.storage.mirror_wait_s
    return RankLimits(
        threads=threads,
        stop_grace_s=config.launch.stop_grace_s + mirror_s,
        restarts=restarts,
        max_restarts=config.launch.max_restarts,
    )


def run_of_ranks(run: RunDir, start: Callable[[], list[Any]]) -> tuple[int, list[Any]]:
    """Start the ranks of a run, whose record gets their failure; returns the exit code and the results of the ranks.

    ``start``: a call of :func:`run_on_ranks`. Raises :class:`LockstepError`: a rank failed, or did not follow a stop.
    """
    try:
        return 0, start()
    except RanksStopped as end:
        failure = keep_failure(run, INTERRUPTED)
        if failure is not None:
            raise failure.as_error() from None
        return end.exit_code, []
    except LockstepError as error:
        keep_failure(run, str(error))
        raise


def _with_note(plan: Plan, reason: str) -> Plan:
    batch = plan.batch
    text = (
        f"Out of memory ({reason}): the micro-batch is now {batch.batch_size} samples, {batch.accumulate} a "
        f"step on each rank; the global batch stays {batch.global_batch}."
    )
    return plan.model_copy(update={"notes": (*plan.notes, Note("out_of_memory", text, "warning"))})


def _halved(start: Start) -> RunConfig | None:
    """Halve the micro-batch of the configuration; ``None``: the settings do not ask for it, or it is not possible."""
    beat = start.run.progress()
    at_start = beat is None or beat.step - start.step < FIRST_STEPS
    config = start.config
    plan = start.plan
    size = plan.batch.batch_size
    policy = config.training.on_oom
    if policy == "fail" or (policy == "start" and not at_start):
        return None
    if size < 2 or plan.reproducibility == "exact" or plan.task.sets_batch_size:
        return None
    return config.with_values(
        training={"batch_size": (size + 1) // 2, "global_batch_size": plan.batch.global_batch, "accumulate": 1},
        # The learning rate is scaled against the batch size that the run was started with.
        optimizer={"base_batch_size": config.optimizer.base_batch_size or config.training.batch_size},
    )
