"""Training when somebody else started the ranks: ``torchrun``, ``torch.distributed.launch`` or ``srun``."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lockstep.config import RunConfig
from lockstep.engine.attempt import RunResult, run_attempt
from lockstep.engine.collectives import Collectives
from lockstep.engine.runtime import rank_device
from lockstep.engine.task import Task
from lockstep.errors import LockstepError
from lockstep.hardware import lifetime
from lockstep.hardware.resolve import Placement
from lockstep.hardware.world import World, rendezvous
from lockstep.launch.folder import (
    changed_config,
    create_folder,
    existing_run,
    keep_config,
    overrides_of,
    task_of_run,
    warn,
)
from lockstep.launch.output import rank_output
from lockstep.launch.prepare import place, plan_for, resume_point
from lockstep.launch.signals import StopRequest
from lockstep.plan import Plan
from lockstep.telemetry.rundir import RunDir
from lockstep.telemetry.sinks import standard_sinks


def train_as_rank(
    task: Task,
    config: RunConfig,
    world: World,
    *,
    resume: bool,
    given: RunConfig | Mapping[str, Any] | None,
    as_given: bool,
) -> RunResult:
    """This process is one of ``world.size`` ranks; rank 0 makes the run folder and the plan for all.

    Raises:
        LockstepError: the same one on every rank when the preparation fails.
    """
    existing = existing_run(config, resume)
    if existing is not None:
        config = changed_config(existing, overrides_of(given))
        task = task_of_run(task, config, as_given=as_given)
    placement = place(config, world)
    os.environ.update(rendezvous(os.environ))
    lifetime.die_with_parent(os.getppid())
    device = rank_device(placement.devices, world)
    dist.init_process_group(
        backend=placement.backend or "gloo",
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=config.distributed.timeout_s),
        device_id=device if placement.backend == "nccl" else None,
    )
    try:
        collectives = Collectives(world, timeout_s=config.distributed.timeout_s)
        with collectives.main_first(per_node=True):
            if world.local_rank == 0:
                task.prepare()
        datasets = task.datasets()
        run, config, plan, attempt = _agree(collectives, task, config, placement, datasets, existing)
        with StopRequest() as stop_request, rank_output(run.logs, world.rank):
            return run_attempt(
                run,
                world,
                task,
                config,
                plan,
                attempt=attempt,
                sink=standard_sinks(run, config, sys.stdout),
                stop_signal=lambda: stop_request.requested,
                datasets=datasets,
            )
    finally:
        dist.destroy_process_group()


def _agree(
    collectives: Collectives,
    task: Task,
    config: RunConfig,
    placement: Placement,
    datasets: Any,
    existing: RunDir | None,
) -> tuple[RunDir, RunConfig, Plan, int]:
    answer: tuple[RunDir, RunConfig, Plan, int] | LockstepError | None = None
    if collectives.is_main:
        try:
            answer = _lay_down(task, config, placement, datasets, existing)
        except LockstepError as error:
            answer = error
    answer = collectives.broadcast(answer)
    if isinstance(answer, LockstepError):
        if not collectives.is_main:
            raise SystemExit(answer.exit_code)  # rank 0 says it for all
        raise answer
    assert answer is not None
    return answer


def _lay_down(
    task: Task,
    config: RunConfig,
    placement: Placement,
    datasets: Any,
    existing: RunDir | None,
) -> tuple[RunDir, RunConfig, Plan, int]:
    point = resume_point(existing, hold=True, report=warn) if existing else None
    prepared = plan_for(task, config, placement, datasets, point)
    if existing is not None:
        keep_config(existing, config)
    run = existing or create_folder(config)
    attempt = run.begin_attempt(prepared.plan.as_dict(), placement.as_dict(), point.step if point else 0)
    return run, config, prepared.plan, attempt
