"""A checkpoint of a finished run on one rank, among the others: its data, and the weights in a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lockstep.checkpoint.store import CheckpointStore, Snapshot
from lockstep.config import RunConfig
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.fingerprint import check_same_data
from lockstep.engine.resume import load_shared
from lockstep.engine.runtime import rank_device
from lockstep.engine.task import Datasets, Task
from lockstep.engine.training_data import open_data, open_datasets
from lockstep.hardware import World
from lockstep.planning import Plan
from lockstep.rundir.folder import RunDir


@dataclass(frozen=True)
class Evaluation:
    """The checkpoint of ``step`` on a ``split`` of the run's data, with its configuration and plan on other devices.

    ``data``: a data set, or a file for the task's ``evaluation_data``, instead of ``split``; ``out``: where predictions
    are written; ``with_loss``: with the loss of each sample.
    """

    run: RunDir
    config: RunConfig
    plan: Plan
    split: str
    step: int
    data: Any = None
    out: Path | None = None
    with_loss: bool = False


class Reopened(NamedTuple):
    """A checkpoint and data on one rank. ``datasets``: the run's; ``None``: the file ``evaluation.data``."""

    evaluation: Evaluation
    task: Task
    datasets: Datasets | None
    snapshot: Snapshot
    world: World
    collectives: Collectives
    device: torch.device


def reopen(evaluation: Evaluation, task: Task, world: World, collectives: Collectives) -> Reopened:
    """Open the checkpoint and the data of an evaluation, on every rank. Collective."""
    store = CheckpointStore(evaluation.run.checkpoints)
    snapshot = load_shared(store, evaluation.step, collectives, in_pieces=evaluation.plan.sharded and world.size > 1)
    datasets = None if evaluation.data is not None else open_data(task, evaluation.config, collectives)
    if datasets is not None and world.size > 1:
        check_same_data(datasets, collectives)
    device = rank_device(tuple(evaluation.plan.placement["devices"]), world)
    return Reopened(evaluation, task, datasets, snapshot, world, collectives, device)


def as_restored(task: Task, config: RunConfig, datasets: Datasets) -> Datasets:
    """Return ``datasets`` as a restored task opens them: its state may say how they are standardised."""
    return datasets if type(task).load_state_dict is Task.load_state_dict else open_datasets(task, config)
