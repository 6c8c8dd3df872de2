"""Choices that are measured on the devices: here on CPU ranks, where ``auto`` does not measure by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import ArrayDataset, Datasets, Loss, Task
from lockstep.config import resolve
from lockstep.data import loader
from lockstep.data.requests import InOrder, Source
from lockstep.engine import measured
from lockstep.events import Note
from lockstep.hardware.resolve import resolve_placement
from lockstep.hardware.world import World
from lockstep.planning import Plan, TaskFacts, make_plan
from lockstep.planning import resolve as planned
from lockstep.planning.plan import LoaderPlan, Measured, ResumePoint
from tests.attempts import attempt
from tests.gloo import run_ranks
from tests.hardware.machines import machine

STEPS = {"training": {"epochs": 1, "batch_size": 4, "global_batch_size": 8}, "validation": {"sanity_steps": 0}}


class Images(Task):
    """A small CNN with everything that a measurement may leave a trace in."""

    class Net(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(
                nn.Conv2d(3, 8, 3, bias=False),
                nn.BatchNorm2d(8),
                nn.Dropout(0.2),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(288, 2),
            )

    def model(self) -> nn.Module:
        return self.Net()

    def datasets(self) -> Datasets:
        generator = torch.Generator().manual_seed(0)
        inputs, labels = torch.randn(40, 3, 8, 8, generator=generator), torch.arange(40) % 2
        return Datasets(ArrayDataset(inputs, labels), ArrayDataset(inputs[:8], labels[:8]))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        inputs, labels = batch
        return Loss(F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels))


class Views(Images):
    """A model that does not take rows in another layout."""

    class Net(Images.Net):
        def forward(self, inputs: Tensor) -> Tensor:
            images = self[3](self[2](self[1](self[0](inputs))))
            return torch.as_tensor(self[5](images.view(len(images), -1)))


@pytest.fixture
def measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "MEASURED_ON", ("gpu", "cpu"))


def choose(monkeypatch: pytest.MonkeyPatch, *, second: bool) -> list[int]:
    """Let one of two ways be the faster; the steps that were timed."""
    timed = list[int]()

    def seconds(trial: Any, steps: Any, number: int) -> float:
        steps(number)
        timed.append(number)
        return float(number if len(timed) % 2 != second else 2 * number)

    monkeypatch.setattr(measured._Trial, "_timed", seconds)
    return timed


def plan_of(folder: Path) -> dict[str, Any]:
    plans = [folder / "plan.json", *sorted((folder / "attempts").glob("*/plan.json"))[-1:]]
    first, last = (json.loads(file.read_text())["decisions"] for file in plans)
    assert first == last
    return {key: first[key] for key in ("channels_last", "data_device") if key in first}


@pytest.mark.parametrize("second", [False, True])
def test_a_measurement_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measures: None, second: bool
) -> None:
    settings = {"hardware": {"channels_last": "on" if second else "off"}, "data": {"device": "host"}}
    wanted, _ = attempt(Images, tmp_path / "set", **STEPS, **settings)
    assert {row["reason"] for row in plan_of(tmp_path / "set").values()} == {"as set"}
    timed = choose(monkeypatch, second=second)
    found, events = attempt(Images, tmp_path / "run", **STEPS)
    assert timed
    assert {name: (value == wanted[name]).all() for name, value in found.items()} == dict.fromkeys(wanted, True)
    decided = plan_of(tmp_path / "run")
    assert {key: row["value"] for key, row in decided.items()} == {
        "channels_last": second, "data_device": "gpu" if second else "host"
    }  # fmt: skip
    assert "measured: a step takes" in decided["channels_last"]["reason"]
    assert "with 0 MB on the device, " in decided["data_device"]["reason"]
    assert any("The layout of convolutions: " in event.text for event in events if isinstance(event, Note))


def test_a_resume_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measures: None) -> None:
    choose(monkeypatch, second=True)
    attempt(Images, tmp_path / "run", **{**STEPS, "training": {**STEPS["training"], "max_steps": 2}})
    before, timed = plan_of(tmp_path / "run"), choose(monkeypatch, second=False)
    attempt(Images, tmp_path / "run", resume=True, training={"max_steps": None})
    assert not timed
    assert plan_of(tmp_path / "run") == before


def test_a_model_that_takes_no_other_layout_keeps_its_own(tmp_path: Path, measures: None) -> None:
    attempt(Views, tmp_path / "run", **STEPS)
    decided = plan_of(tmp_path / "run")["channels_last"]
    assert decided["value"] is False
    assert decided["reason"].startswith("not measured: view size is not compatible")


def _apart(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Each rank finds another way faster; rank 0's second way is the slowest of all."""
    planned.MEASURED_ON = ("cpu",)
    calls = list[int]()

    def seconds(trial: Any, steps: Any, number: int) -> float:
        steps(number)
        calls.append(number)
        return number * (float(len(calls) % 2) + 1 if rank else float(len(calls) % 2 == 0) * 2 + 1)

    measured._Trial._timed = seconds  # type: ignore[method-assign]
    attempt(Images, folder / "run", rank, ranks, **STEPS, hardware={"selected_devices": ["cpu", "cpu"]})
    return plan_of(folder / "run") if rank == 0 else {}


class Still(Images):
    """Without dropout, which draws in the order of memory."""

    def model(self) -> nn.Module:
        model = self.Net()
        model[2].p = 0.0
        return model


def _same_weights(rank: int, ranks: int, folder: Path) -> list[dict[str, Tensor]]:
    settings: dict[str, Any] = {**STEPS}
    return [
        attempt(Still, folder / layout, rank, ranks, **settings, hardware={"channels_last": layout})[0]
        for layout in ("off", "on")
    ]


@pytest.mark.processes
def test_a_fused_optimizer_meets_gradients_in_the_layout_of_its_weights(tmp_path: Path) -> None:
    """Gradients of a small model on CPU ranks travel in one message, row by row."""
    off, on = run_ranks(_same_weights, 2, tmp_path)[0]
    for name, value in off.items():
        torch.testing.assert_close(on[name], value, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.processes
def test_ranks_agree_on_the_slowest_ones_times(tmp_path: Path) -> None:
    decided = run_ranks(_apart, 2, tmp_path)[0]
    assert decided["channels_last"]["value"] is False
    assert decided["data_device"]["value"] == "host"


def gpu_plan(devices: tuple[str, ...] = ("gpu:0",), resume: ResumePoint | None = None, **sections: Any) -> Plan:
    sections["hardware"] = {**sections.get("hardware", {}), "selected_devices": list(devices)}
    config = resolve(sections)
    place = resolve_placement(config.hardware, config.distributed, World(), machine(2))
    facts = TaskFacts(name="x", train_samples=100, convolutions=True, array_bytes=800)
    return make_plan(config, place, facts, cores=8, resume=resume)


@pytest.mark.parametrize(
    ("sections", "layout", "data"),
    [
        ({}, None, None),
        ({"training": {"reproducibility": "exact"}}, False, "auto"),
        ({"training": {"compile": True}}, False, "auto"),
        ({"hardware": {"channels_last": True}, "data": {"device": "gpu"}}, True, "gpu"),
    ],
)
def test_what_is_measured(sections: dict[str, Any], layout: bool | None, data: str | None) -> None:
    plan = gpu_plan(**sections)
    assert (plan.value("channels_last", ""), plan.value("data_device", "")) == (layout, data)


def test_other_devices_are_measured_again() -> None:
    first = gpu_plan()
    known = first.settled(*(row.__class__(key, row.title, True, "measured") for key, row in first.decisions.items()))
    point = ResumePoint(
        step=4, epoch=0, position=128, samples_seen=128, global_batch=32, measured=Measured(
            devices=("gpu:0",), gpu=first.placement["gpu"], decisions=known.decisions
        )
    )  # fmt: skip
    assert gpu_plan(resume=point).to_measure == ()
    assert len(gpu_plan(("gpu:0", "gpu:1"), point).to_measure) == 2


def test_arrays_on_a_gpu_are_not_given_to_worker_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    data = ArrayDataset(torch.arange(10))
    monkeypatch.setattr(ArrayDataset, "is_on_gpu", property(lambda _: True))
    plan = LoaderPlan(num_workers=2, prefetch_factor=2, persistent_workers=True, pin_memory=True)
    made = loader.make_loader(Source(data, None, 0, InOrder()), [], plan, 0, largest=4)  # type: ignore[arg-type]
    assert made.gi_code is loader._in_place.__code__  # type: ignore[attr-defined]
