"""The order of a plan, made from the task's lengths on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lockstep
from lockstep.data.order import ORDER_VERSION
from lockstep.data.requests import Request
from lockstep.engine.inspection import inspect_task
from lockstep.engine.resume import check_fits
from lockstep.engine.training_data import training_source
from lockstep.errors import CheckpointError, DataError
from lockstep.planning import OrderPlan, Plan
from tests.sequences import Sequences


def planned(**settings: Any) -> tuple[Sequences, Plan]:
    task = Sequences(Sequences.Config(samples=2100))
    hardware = {"selected_devices": settings.pop("devices", ["cpu"])}
    return task, lockstep.make_plan(task, {"hardware": hardware, **settings})


def epoch_of(task: Sequences, plan: Plan, epoch: int = 0) -> np.ndarray:
    source = training_source(task, lockstep.Datasets(task.train_data), plan)
    return source.indices(Request(epoch, 0, 0, plan.batch.samples, window=(0, plan.batch.samples)))


def test_the_order_depends_neither_on_batch_nor_on_ranks() -> None:
    task, plan = planned()
    assert plan.order == OrderPlan(window=512, block=64, lanes=8)
    order = epoch_of(task, plan)
    for change in ({"devices": ["cpu"] * 3}, {"training": {"global_batch_size": 512}}):
        task, other = planned(**change)
        assert other.order == plan.order
        assert np.array_equal(epoch_of(task, other), order)
    assert not np.array_equal(epoch_of(task, plan, epoch=1), order)


def test_overfitting_takes_a_fixed_part_of_the_data_in_order_of_length() -> None:
    task, plan = planned(debug={"overfit_batches": 5}, data={"bucket_window": 120, "bucket_block": 60})
    source = training_source(task, lockstep.Datasets(task.train_data), plan)
    assert plan.batch.samples == 120
    epochs = [source.order.slice(epoch, 0, 120) for epoch in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert not np.array_equal(*epochs)
    blocks = task.train_data.lengths[epochs[0]].reshape(2, 60)
    assert (np.diff(blocks) >= 0).all()


def test_lengths_that_change_are_noticed() -> None:
    task, plan = planned()
    before = inspect_task(task, task.datasets(), "it")
    task.train_data.lengths = task.train_data.lengths + 1
    with pytest.raises(DataError, match="other lengths than before"):
        training_source(task, lockstep.Datasets(task.train_data), plan)
    after = inspect_task(task, lockstep.Datasets(task.train_data), "it")
    assert after.fingerprint != before.fingerprint
    task.train_data.lengths = task.train_data.lengths[1:]
    with pytest.raises(DataError, match="do not fit 2100 samples"):
        inspect_task(task, lockstep.Datasets(task.train_data), "it")


def test_a_checkpoint_of_another_order_does_not_fit() -> None:
    _, plan = planned()
    manifest = {
        "fingerprint": plan.task.fingerprint,
        "order_version": ORDER_VERSION,
        "order": plan.order.model_dump(),
        "seed": plan.seed,
    }
    check_fits(manifest, plan)
    with pytest.raises(CheckpointError, match="the run's order is shuffled; that of the plan is bucketed"):
        check_fits({**manifest, "order": {}}, plan)
