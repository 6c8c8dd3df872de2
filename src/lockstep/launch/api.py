"""Starting and resuming runs: what the command line and the library call."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from lockstep.config import RunConfig, resolve
from lockstep.engine.state import RunResult
from lockstep.engine.task import Task
from lockstep.errors import RankOutOfMemory
from lockstep.events import Note
from lockstep.hardware import read_world
from lockstep.launch import run_claim
from lockstep.launch.engines import node
from lockstep.launch.nodes.preparation import TrainRequest, prepare_together
from lockstep.launch.prepare import RunInputs, overrides_of, plan_settled, settle
from lockstep.launch.rank import train_as_rank
from lockstep.launch.start import start
from lockstep.launch.stop import stop as stop
from lockstep.rundir.folder import RunDir
from lockstep.telemetry.sinks import check_sinks

#: Of a run that is out of memory: four halvings find a micro-batch that was 16 times too large.
RETRIES = 4
#: What happens in the first steps of an attempt happens at its start.
FIRST_STEPS = 3


def train(
    task: Task | type[Task] | str | None = None,
    config: RunConfig | Mapping[str, Any] | None = None,
    *,
    resume: bool = False,
    accept_data: bool = False,
) -> RunResult:
    """Train ``task`` with ``config``, nested settings that differ from the defaults; see :func:`lockstep.train`.

    Without ``task`` it is ``config.task``.
    """
    world = read_world(os.environ)
    built, whole = settle(task, config)
    request = TrainRequest(resume, overrides_of(config), isinstance(task, Task), accept_data)
    if world.from_outside:
        return train_as_rank(world, whole, lambda team, ending: prepare_together(team, built, whole, request, ending))
    if whole.launch.nodes not in (None, "1"):
        return node.train_on_node(built, whole, request)
    existing = run_claim.existing_run(whole, resume)
    if existing is not None:
        whole = run_claim.changed_config(existing, request.given)
        built = run_claim.task_of_run(built, whole, as_given=request.as_given)
        with run_claim.claimed(existing):
            return _go_on(existing, built, whole, hold=True, accept_data=accept_data)
    check_sinks(whole, whole.save_dir)
    prepared = plan_settled(built, whole, None)
    run_dir = run_claim.create_folder(prepared.config)
    return _start_with_retries(prepared, run_dir, resumed_from=0)


def resume(
    run: RunDir,
    *,
    task: Task | type[Task] | None = None,
    devices: str | None = None,
    rescale_batch: bool = False,
    accept_data: bool = False,
    overrides: Mapping[str, Any] | None = None,
) -> RunResult:
    """Resume a run on ``devices``, with ``overrides`` of its settings, nested; see :meth:`lockstep.Run.resume`."""
    run_claim.refuse_running(run)
    config = run_claim.changed_config(run, overrides or {}, devices, task_is_given=task is not None)
    built = run_claim.task_again(run, config, task, is_named=True)
    with run_claim.claimed(run):
        return _go_on(run, built, config, hold=not rescale_batch, accept_data=accept_data)


def _go_on(run: RunDir, task: Task, config: RunConfig, *, hold: bool, accept_data: bool) -> RunResult:
    check_sinks(config, run.path)
    point = run_claim.resume_point(run, hold=hold, accept_data=accept_data, report=run_claim.warn)
    prepared = plan_settled(task, config, point)
    run_claim.keep_config(run, config)
    return _start_with_retries(prepared, run, resumed_from=point.step if point else 0)


def _start_with_retries(prepared: RunInputs, run: RunDir, *, resumed_from: int) -> RunResult:
    """As :func:`.start`; a run that is out of memory is tried again with half the micro-batch, where that is asked for.

    All ranks end with the failed attempt, and its memory with them. The global batch stays the same, and the run
    resumes from its latest checkpoint or from the start, so losses are those of a run that began with the smaller one.
    """
    for _ in range(RETRIES):
        try:
            return start(prepared, run, resumed_from=resumed_from)
        except RankOutOfMemory as error:
            beat = run.progress()
            smaller = _halved(prepared, at_start=beat is None or beat.step - resumed_from < FIRST_STEPS)
            if smaller is None:
                raise
            what = error.what.splitlines()[0]
        gc.collect()
        if torch.cuda.is_initialized():  # to ask whether there is a GPU would keep forks of this process from using it
            torch.cuda.empty_cache()
        point = run_claim.resume_point(run, hold=True, report=run_claim.warn)
        prepared = plan_settled(prepared.task, smaller, point)
        batch = prepared.plan.batch
        text = (
            f"Out of memory ({what[:200]}): the micro-batch is now {batch.batch_size} samples, {batch.accumulate} a "
            f"step on each rank; the global batch stays {batch.global_batch}."
        )
        notes = (*prepared.plan.notes, Note("out_of_memory", text, "warning"))
        prepared = replace(prepared, plan=prepared.plan.model_copy(update={"notes": notes}))
        run_claim.keep_config(run, smaller)
        resumed_from = point.step if point else 0
    return start(prepared, run, resumed_from=resumed_from)


def _halved(prepared: RunInputs, *, at_start: bool) -> RunConfig | None:
    """The configuration with half the micro-batch and the same global batch; ``None``: not wanted, or not possible."""
    config, plan = prepared.config, prepared.plan
    size, wanted = plan.batch.batch_size, config.training.on_oom
    if wanted == "fail" or (wanted == "start" and not at_start):
        return None
    if size < 2 or plan.reproducibility == "exact" or plan.task.loader is not None:
        return None
    training = {"batch_size": -(-size // 2), "global_batch_size": plan.batch.global_batch, "accumulate": 1}
    # The learning rate is scaled against the batch size that the run was started with.
    optimizer = {"base_batch_size": config.optimizer.base_batch_size or config.training.batch_size}
    return resolve(config.model_dump(mode="json"), {"training": training, "optimizer": optimizer})
