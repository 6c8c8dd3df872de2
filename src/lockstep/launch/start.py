"""Training an attempt that was prepared here: in this process for one device, else on ranks of this machine."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lockstep.config import RunConfig
from lockstep.engine.state import RunResult
from lockstep.errors import LockstepError, RankOutOfMemory
from lockstep.events import Note, Restarted
from lockstep.launch import rank
from lockstep.launch.failure import records
from lockstep.launch.failure.report import INTERRUPTED, failure_line, keep_failure, own_failure
from lockstep.launch.local.on_ranks import RankLimits, RanksStopped, run_on_ranks
from lockstep.launch.meeting.membership import Team
from lockstep.launch.meeting.preparation import Start, TrainRequest, begin_attempt
from lockstep.launch.process.signals import StopRequest
from lockstep.launch.run_claim import begin_again
from lockstep.planning import Plan
from lockstep.rundir.folder import RunDir
from lockstep.tasks.registry import pack_task

#: Maximum number of halvings after running out of memory (16 times smaller).
RETRIES = 4
#: Number of steps that count as the start of an attempt.
FIRST_STEPS = 3


def train_with_retries(team: Team, start: Start) -> RunResult:
    """Train; after running out of memory, again with half the micro-batch, if the settings ask for that.

    ``team``: of this process alone. All ranks end with the failed attempt, and its memory with them. The global batch
    stays the same, and the run resumes from its latest checkpoint or from the start, so losses are those of a run that
    began with the smaller one.
    """
    for _ in range(RETRIES):
        try:
            return _train(team, start)
        except RankOutOfMemory as error:
            beat = start.run.progress()
            smaller = _halved(start, at_start=beat is None or beat.step - start.step < FIRST_STEPS)
            if smaller is None:
                raise
            reason = error.what.splitlines()[0][:200]
        gc.collect()
        if torch.cuda.is_initialized():  # to ask whether there is a GPU would keep forks of this process from using it
            torch.cuda.empty_cache()
        request = TrainRequest(True, {}, False)
        start = begin_attempt(team, start.run, start.task, smaller, request, change=partial(_with_note, reason=reason))
    return _train(team, start)


def _train(team: Team, start: Start) -> RunResult:
    """Train; returns when the attempt has ended, raises when it failed."""
    try:
        if start.plan.placement["world_size"] > 1:
            return _train_on_ranks(start)
        return _train_in_process(team, start)
    except KeyboardInterrupt:
        keep_failure(start.run, INTERRUPTED)
        raise


def _train_in_process(team: Team, start: Start) -> RunResult:
    try:
        with ExitStack() as ending:
            return rank.train(team, start, ending)
    except Exception as error:
        failure = own_failure(start.run, error)
        if failure is None:
            raise
        raise failure.as_error() from error


def _train_on_ranks(start: Start) -> RunResult:
    run = start.run
    with StopRequest() as stop:  # between two starts of the ranks, too
        code, _ = run_of_ranks(run, partial(_start_ranks, start, stop))
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


def _start_ranks(start: Start, stop: StopRequest) -> list[Any]:
    """Train on ranks; after a failure on new ones, as often as ``launch.max_restarts`` allows."""
    config = start.config
    make_task = pack_task(start.task, config)
    restarts = 0
    while True:
        try:
            return run_on_ranks(
                rank.train_as_launched,
                config,
                start.plan,
                start.attempt,
                start.restarted,
                make_task,
                folder=start.run,
                ranks=start.plan.placement["world_size"],
                limits=rank_limits(config, start.plan.threads, restarts),
                redirect=False,
            )
        except LockstepError:
            may_restart = records.read_launcher(start.run).may_restart and stop.requested is None
            if restarts == config.launch.max_restarts or not may_restart:
                raise
        restarts += 1
        start = _restarted(start, restarts, failure_line(start.run))


def _restarted(start: Start, number: int, reason: str) -> Start:
    """Begin the next attempt after a failure, at the latest checkpoint and with the same plan."""
    beat = start.run.progress()
    last_step = beat.step if beat else 0
    attempt, step = begin_again(start.run, start.config, start.plan)
    allowed = start.config.launch.max_restarts
    event = Restarted(number, allowed, attempt, step, max(0, last_step - step), reason)
    return replace(start, attempt=attempt, step=step, restarted=event)


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


def _halved(start: Start, *, at_start: bool) -> RunConfig | None:
    """Halve the micro-batch of the configuration; ``None``: the settings do not ask for it, or it is not possible."""
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
