"""The memory layout of convolutions, and arrays that are on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import ArrayDataset, Datasets, Loss, Task
from lockstep.config import resolve
from lockstep.hardware.resolve import resolve_placement
from lockstep.hardware.world import World
from lockstep.planning import Plan, TaskFacts, make_plan
from tests.attempts import attempt
from tests.gloo import run_ranks
from tests.hardware.machines import machine

STEPS = {"training": {"epochs": 1, "batch_size": 4, "global_batch_size": 8}, "validation": {"sanity_steps": 0}}


class Images(Task):
    """A small CNN."""

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


@pytest.mark.slow
@pytest.mark.processes
def test_a_fused_optimizer_meets_gradients_in_the_layout_of_its_weights(tmp_path: Path) -> None:
    """Gradients of a small model on CPU ranks travel in one message, row by row."""
    off, on = run_ranks(_same_weights, 2, tmp_path)[0]
    for name, value in off.items():
        torch.testing.assert_close(on[name], value, rtol=1e-3, atol=1e-4, msg=name)


def gpu_plan(**sections: Any) -> Plan:
    hardware = {"selected_devices": ["gpu:0"], **sections.pop("hardware", {})}
    config = resolve({"hardware": hardware, **sections})
    placement = resolve_placement(config.hardware, config.distributed, World(), machine(2))
    facts = TaskFacts(name="x", train_samples=100, convolutions=True, array_bytes=800)
    return make_plan(config, placement, facts, cores=8)


@pytest.mark.parametrize(
    ("sections", "channels_last", "data_device"),
    [
        ({}, False, "auto"),
        ({"hardware": {"precision": "bf16-mixed"}}, True, "auto"),
        ({"hardware": {"precision": "16-mixed", "channels_last": False}}, False, "auto"),
        ({"hardware": {"precision": "bf16-mixed"}, "training": {"compile": True}}, False, "auto"),
        ({"training": {"reproducibility": "exact"}}, False, "auto"),
        ({"hardware": {"channels_last": True}, "data": {"device": "gpu"}}, True, "gpu"),
    ],
)
def test_layout_and_data_device_by_rule(sections: dict[str, Any], channels_last: bool, data_device: str) -> None:
    plan = gpu_plan(**sections)
    assert plan.value("channels_last") is channels_last
    assert plan.value("data_device") == data_device
