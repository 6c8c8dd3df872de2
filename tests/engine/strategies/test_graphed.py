"""``training.cuda_graphs`` without a GPU: replays call Python, and everything around them is as on a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import Loss
from lockstep.config import OptimizerConfig, resolve
from lockstep.data.arrays import ArrayDataset
from lockstep.data.requests import InOrder, Source, windows
from lockstep.engine.optim.optimizers import build_optimizer
from lockstep.engine.optim.precision import Precision
from lockstep.engine.optim.step import Update
from lockstep.engine.strategies.base import Flags, Replica, Strategy
from lockstep.engine.strategies.graphed import WARM_UP, GraphedStrategy
from lockstep.errors import UnsupportedError
from lockstep.hardware import Device
from lockstep.hardware.resolve import resolve_placement
from lockstep.hardware.world import World
from lockstep.planning import BatchPlan, Plan, Schedule, TaskFacts, make_plan
from tests.hardware.machines import machine
from tests.toys import Toy, arrays

CPU = torch.device("cpu")
#: An epoch: 12 steps of 8 samples, and a tail of 4.
BATCH = BatchPlan(samples=100, global_batch=8, batch_size=8, accumulate=1, ranks=1)
EPOCHS, STEPS = 2, 26


class Counted(Toy):
    """``count``: how the loss gives the number of its items."""

    count: Callable[[Tensor], Any] = staticmethod(len)

    def given(self, batch: Any) -> Any:
        return batch

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        inputs, labels = batch
        return Loss(F.cross_entropy(model(inputs), labels, reduction="sum"), self.count(labels))


def train(task: Counted, *, graphs: bool, max_norm: float | None = 1.0) -> tuple[dict[str, Tensor], list[str], Update]:
    """Weights and buffers after two epochs, and notes."""
    torch.manual_seed(0)
    model, notes = task.model(), list[str]()
    precision = Precision("32", CPU, 0.125)
    replica = Replica(task, model, precision, CPU, 0)
    strategy = GraphedStrategy(replica, notes.append) if graphs else Strategy(replica)
    schedule = Schedule(name="cosine", lr=0.02, total_steps=STEPS, steps_per_epoch=13)
    update = Update(model, build_optimizer(OptimizerConfig(lr=0.02), model, 0.02), schedule, precision, max_norm)
    update._on_host, update.records = False, graphs
    source = Source(ArrayDataset(*arrays(100, 1)), task.collate, 0, InOrder())
    for step, window in enumerate(windows(BATCH, rank=0, epoch=0, position=0, epochs=EPOCHS, ghosts=False)):
        batches = (task.given(source.batch(request)) for request in window.requests)
        reduced = strategy.gradients(window, batches, step, Flags())
        update.apply(step, reduced.count, reduced.divisor, want_norm=step % 3 == 0)
    return model.state_dict(), notes, update


def task_of(kind: type[Counted] = Counted) -> Any:
    return kind(kind.Config(dropout=0.3, batchnorm=True))


@pytest.mark.parametrize("max_norm", [1.0, None])
@pytest.mark.parametrize("items", [len, lambda labels: (labels >= 0).sum()], ids=["number", "tensor"])
def test_replays_train_as_steps_do(items: Any, max_norm: float | None) -> None:
    """With dropout, statistics of BatchNorm, a falling learning rate, and a tail of another shape."""
    found: dict[bool, Any] = {}
    for graphs in (False, True):
        task = task_of()
        task.count = items
        found[graphs], notes, update = train(task, graphs=graphs, max_norm=max_norm)
        assert notes == []
        assert (update._recorded is not None) is graphs
        assert update.skipped == 0
    for name, value in found[True].items():
        torch.testing.assert_close(value, found[False][name], rtol=1e-5, atol=1e-7)


class Growing(Counted):
    """The loss reads a number of Python's, which a recording would not see again."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls_so_far = count()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        total, items = super().loss(model, batch)
        return Loss(total * (1 + next(self.calls_so_far)), items)


class Failing(Counted):
    """The loss cannot be recorded: it fails in the call after the warm-up, as ``.item()`` does in a recording."""

    seen = 0

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        self.seen += 1
        if self.seen == WARM_UP + 2:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return super().loss(model, batch)


class Wandering(Counted):
    """Each batch has something else in it than tensors."""

    made = 0

    def given(self, batch: Any) -> Any:
        self.made += 1
        return [*batch, self.made]

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return super().loss(model, batch[:2])


class Mixed(Counted):
    """The loss draws a number on the host; the first replay has the same seed, later ones would repeat it."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        total, items = super().loss(model, batch)
        return Loss(total * (1 + random.random()), items)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Mixed, "recording failed (the loss draws random numbers on the host, which replays would repeat)"),
        (Growing, "a replay computed something else than the step itself"),
        (Failing, "recording failed (operation not permitted when stream is capturing)"),
        (Wandering, "batches have more than 16 shapes"),
    ],
)
def test_what_cannot_be_replayed_is_noted_and_computed_as_before(kind: type[Counted], why: str) -> None:
    model, notes, update = train(task_of(kind), graphs=True)
    assert [note.partition(": ")[2] for note in notes] == [f"{why}."]
    assert update._recorded is None
    if kind not in (Growing, Mixed):  # which have another loss
        usual, _, _ = train(task_of(), graphs=False)
        assert all(torch.equal(value, usual[name]) for name, value in model.items())


SMALL = {"multiply_adds": 1000}


def planned(settings: dict[str, Any], devices: list[Device], **facts: Any) -> Plan:
    chosen = {"selected_devices": [device.id for device in devices], **settings.get("hardware", {})}
    config = resolve({}, {**settings, "hardware": chosen})
    placement = resolve_placement(config.hardware, config.distributed, World(), machine(2))
    return make_plan(config, placement, TaskFacts(name="toy", train_samples=64, **{**SMALL, **facts}), cores=2)


def on(**settings: Any) -> dict[str, Any]:
    return {**settings, "training": {"cuda_graphs": "on", **settings.get("training", {})}}


@pytest.mark.parametrize(
    ("setting", "multiply_adds", "expected"),
    [("off", 1000, False), ("auto", 1000, True), ("auto", 10**9, False), ("auto", 0, False), ("on", 10**9, True)],
)
def test_the_plan_decides(setting: str, multiply_adds: int, expected: bool) -> None:
    plan = planned({"training": {"cuda_graphs": setting}}, machine(1)[1:], multiply_adds=multiply_adds)
    assert plan.value("cuda_graphs") is expected
    assert not planned({"training": {"cuda_graphs": setting}}, machine(0), multiply_adds=1000).value("cuda_graphs")


@pytest.mark.parametrize(
    ("settings", "gpus", "facts", "what"),
    [
        ({}, 2, {}, "several devices"),
        ({"training": {"reproducibility": "exact"}}, 1, {}, "reproducibility: exact"),
        ({"hardware": {"precision": "16-mixed"}}, 1, {}, "precision 16-mixed"),
        ({"training": {"compile": True}}, 1, {}, "training.compile"),
        ({"training": {"accumulate": 2}}, 1, {}, "accumulation"),
        ({}, 1, {"lengths": "a hash"}, "samples of different lengths"),
        ({"debug": {"detect_anomaly": True}}, 1, {}, "debug settings"),
    ],
)
def test_what_cannot_be_recorded_is_refused(settings: Any, gpus: int, facts: Any, what: str) -> None:
    with pytest.raises(UnsupportedError, match=f"cuda_graphs=on is incompatible with {what}"):
        planned(on(**settings), machine(gpus)[1:], **facts)
    auto = {**settings, "training": {**settings.get("training", {}), "cuda_graphs": "auto"}}
    decision = planned(auto, machine(gpus)[1:], **facts).decisions["cuda_graphs"]
    assert (decision.value, decision.reason.partition(":")[0]) == (False, what.partition(":")[0])
