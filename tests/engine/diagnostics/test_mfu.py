"""The share of a GPU's peak: from operations that torch counts and a data sheet, or a reason why it is not known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep import ArrayDataset, Datasets, Loss, Task
from lockstep.engine.diagnostics.mfu import flops_of_sample, peak_share
from lockstep.engine.training_data import training_source
from lockstep.launch.prepare import prepare
from lockstep.planning import Plan

CPU = {"hardware": {"selected_devices": ["cpu"]}, "training": {"batch_size": 16}}


class Linear(Task):
    def datasets(self) -> Datasets:
        return Datasets(ArrayDataset(torch.randn(64, 10), torch.randint(0, 4, (64,))))

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(10, 20), nn.Dropout(), nn.Linear(20, 4))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))


class NeedsValues(Linear):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return super().loss(model, batch) if batch[0].sum().item() else Loss(torch.zeros(()), 1)


def planned(task: Task, placement: dict[str, Any]) -> tuple[Any, Plan]:
    made = prepare(task, CPU)
    plan = made.plan.model_copy(update={"placement": {**made.plan.placement, **placement}})
    return training_source(made.task, made.datasets, plan), plan


def test_the_share_is_of_the_data_sheet() -> None:
    task = Linear()
    source, plan = planned(
        task, {"gpu": "NVIDIA A100-SXM4-40GB", "devices": ["gpu:0", "gpu:1"], "precision": "bf16-mixed"}
    )
    state = torch.random.get_rng_state()
    flops, _ = flops_of_sample(task, source, plan)
    # Two operations a weight forward, and four backward, but for the gradient of the first layer's input.
    assert flops == 2 * (10 * 20 * 2 + 20 * 4 * 3)
    share, note = peak_share(task, source, plan)
    assert share == pytest.approx(flops / (2 * 312e12))
    assert "A100" in note and "40 GB" in note
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("task", "gpu", "reason"),
    [
        (Linear(), "A GPU of mine", "A GPU of mine"),
        (NeedsValues(), "NVIDIA H200", "without values"),
        (Linear(), "", "''"),
    ],
)
def test_what_is_not_known_is_left_out(task: Task, gpu: str, reason: str) -> None:
    share, note = peak_share(task, *planned(task, {"gpu": gpu}))
    assert share is None
    assert note.startswith("MFU ")
    assert reason in note
