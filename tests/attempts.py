"""Whole attempts on the ranks that :func:`tests.gloo.run_ranks` has started: several trainings for one start-up."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from lockstep import Task
from lockstep.checkpoint.store import CheckpointStore
from lockstep.config.load import merge
from lockstep.engine.attempt import run_attempt
from lockstep.engine.rank_context import Attempt
from lockstep.engine.resume import resume_point
from lockstep.engine.training_data import open_data
from lockstep.errors import LockstepError
from lockstep.events import Event, Fanout
from lockstep.hardware.world import World
from lockstep.launch.prepare import placement_of, plan_for, settle
from lockstep.launch.run_claim import changed_config, create_folder
from lockstep.rundir.folder import RunDir
from lockstep.telemetry.sinks import RunFolderSink
from tests.fakes import RecordingSink

QUIET = {"tensorboard": "off", "progress": "off", "system_metrics": False, "log_interval": 1}


@contextmanager
def without_fsync() -> Iterator[None]:
    """fsync(2), of which a run does thirty, does nothing: no power fails here between a run and its resume."""
    with patch.object(os, "fsync", lambda descriptor: None):
        yield


@without_fsync()
def attempt(
    task: type[Task], /, folder: Path, rank: int = 0, ranks: int = 1, *, resume: bool = False, **sections: Any
) -> tuple[dict[str, Tensor], list[Event]]:
    """Train ``task`` on CPU ranks, or resume the run in ``folder``: the saved weights, and the events of rank 0.

    Called on each rank alike; a refusal to start comes on all of them, and only an error on all ranks may be caught.
    """
    if ranks > 1:
        os.environ["RANK"] = str(rank)  # for tasks that look
    world = World(rank, ranks, rank, ranks)
    given: list[Any] = [None]
    if rank == 0:
        try:
            given = [_prepared(task, folder, world, sections, resume=resume)]
        except LockstepError as refusal:
            given = [refusal]
    if ranks > 1:
        dist.broadcast_object_list(given)
    if isinstance(given[0], LockstepError):
        raise given[0]
    config, plan, number = given[0]
    run, heard = RunDir(folder), RecordingSink()
    sink = Fanout([RunFolderSink(run, config), heard]) if rank == 0 else Fanout()
    attempt = Attempt(
        run_dir=run, world=world, config=config, plan=plan, number=number, sink=sink, stop_signal=lambda: None
    )
    run_attempt(attempt, settle(task, config.model_dump(mode="json"))[0])
    store = CheckpointStore(run.checkpoints)
    return dict(store.load(store.step_of("last") or 0).model), heard.events


def _prepared(task: type[Task], folder: Path, world: World, sections: Mapping[str, Any], *, resume: bool) -> Any:
    devices = ",".join(["cpu"] * world.size)
    mine: Any = {"save_dir": str(folder), "hardware": {"selected_devices": devices}, "training": {"threads": 1}}
    mine = merge(merge(mine, {"telemetry": QUIET}), dict(sections))
    run, point = RunDir(folder), None
    built, config = settle(task, mine)
    if resume:
        config, point = changed_config(run, mine), resume_point(run, hold=True, report=print)
    prepared = plan_for(built, config, placement_of(config, World()), open_data(built, config), point)
    if resume:
        run.keep_config(config)
    else:
        create_folder(config)
    number = run.begin_attempt(prepared.plan.as_dict(), prepared.placement.as_dict(), point.step if point else 0)
    return config, prepared.plan, number
