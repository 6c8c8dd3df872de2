"""The order of a plan, made from the task's lengths on every rank."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch

import lockstep
from lockstep.data.order import ORDER_VERSION
from lockstep.data.requests import BatchRequest
from lockstep.engine.diagnostics.step_trace import _digest_rows
from lockstep.engine.inspection import inspect_task
from lockstep.engine.resume import check_fits
from lockstep.engine.training_data import open_datasets, training_source
from lockstep.errors import CheckpointError, DataError
from lockstep.planning import OrderPlan, Plan
from tests.sequences import Sequences
from tests.toys import Toy, arrays


def planned(**settings: Any) -> tuple[Sequences, Plan]:
    task = Sequences(Sequences.Config(samples=2100))
    hardware = {"selected_devices": settings.pop("devices", ["cpu"])}
    return task, lockstep.make_plan(task, {"hardware": hardware, **settings})


def epoch_of(task: Sequences, plan: Plan, epoch: int = 0) -> np.ndarray:
    source = training_source(task, lockstep.Datasets(task.train_data), plan)
    return source.indices(BatchRequest(epoch, 0, 0, plan.batch.samples, window=(0, plan.batch.samples)))


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
    with pytest.raises(DataError, match="lengths are not those of the plan"):
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


class Columns(UserDict[Any, Any]):
    """A mapping of columns that is one data set, like tensordict's TensorDict: torch reads its rows by __getitems__."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) if isinstance(index, str) else self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(self.data["x"][i], self.data["y"][i]) for i in indices]


@pytest.mark.parametrize("kind", ["mapping", "array", "tensor"])
def test_validation_data_may_be_a_tensor_an_array_or_a_mapping_of_columns(kind: str) -> None:
    """The truth value of the first two is an error; the third is not several validation sets by name."""
    inputs, labels = arrays(32, 1)
    rows = torch.cat([inputs, labels[:, None]], 1)
    data = {"mapping": Columns(x=inputs, y=labels), "array": rows.numpy(), "tensor": rows}[kind]

    class Own(Toy):
        def datasets(self) -> lockstep.Datasets:
            return lockstep.Datasets(data, data, data)

        def loss(self, model: Any, batch: Any) -> lockstep.Loss:
            return super().loss(model, batch if kind == "mapping" else (batch[:, :-1], batch[:, -1].long()))

        def evaluate(self, model: Any, batch: Any) -> Any:
            return super().evaluate(model, batch if kind == "mapping" else (batch[:, :-1], batch[:, -1].long()))

    opened = open_datasets(Own(), lockstep.RunConfig())
    facts = inspect_task(Own(), opened, "it")
    assert facts.val_samples == facts.test_samples == 32 and not opened.named


def test_a_batch_that_iterates_over_its_rows_is_compared_by_its_columns() -> None:
    """`lockstep verify` of a TensorDict: iterating it gives rows, not keys."""

    class Rows(dict[str, torch.Tensor]):
        def __iter__(self) -> Any:
            return iter([self["x"][0]])

    first, other = (_digest_rows(Rows(x=torch.full((2, 3), value)), [0, 1]) for value in (1.0, 2.0))
    assert first == _digest_rows({"x": torch.ones(2, 3)}, [0, 1]) != other
