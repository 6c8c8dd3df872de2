"""Which evaluation is the best, and when patience runs."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import Loss
from lockstep.events import EpochEnded
from tests.attempts import attempt
from tests.toys import Toy


class Scripted(Toy):
    """Its evaluations have the metrics and losses of ``values``, one pair an epoch."""

    values: tuple[tuple[float, float], ...] = ()
    monitor = ("val_wer", "min")

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        total, count = super().loss(model, batch)
        if model.training:
            return Loss(total, count)
        _, loss = self.values[min(self.context.epoch, len(self.values) - 1)]
        return Loss(torch.full((count,), loss), count)

    def metrics(self) -> Any:
        score, _ = self.values[min(self.context.epoch, len(self.values) - 1)]
        return SimpleNamespace(update=lambda *rows: None, compute=lambda: {"wer": score})


NAN, INF = math.nan, math.inf
STUCK = ((1.0, 3.0), (1.0, 2.0), (1.0, 2.5), (1.0, 2.6), (0.9, 2.7), (0.9, 2.8), (0.9, 2.6), (1.0, 1.0))


@pytest.mark.parametrize(
    ("values", "mode", "best", "ends"),
    [
        (STUCK, "min", [1, 2, 5, 7], {2: 4, 3: 8}),
        (((0.5, 1.0), (0.5, 0.9), (0.4, 0.1), (0.5, 0.9)), "max", [1, 2], {2: 4}),
        (((NAN, 1.0), (1.0, NAN), (1.0, 2.0), (INF, 0.0)), "min", [2], {2: 4}),
    ],
    ids=["the loss breaks ties", "max", "not finite"],
)
def test_the_best_evaluation_and_patience_also_after_resumes(
    tmp_path: Path, values: tuple[tuple[float, float], ...], mode: str, best: list[int], ends: dict[int, int]
) -> None:
    """``best``: epochs that are the best so far. ``ends``: the last epoch, by patience."""
    task = type("OfValues", (Scripted,), {"values": values, "monitor": ("val_wer", mode), "__module__": __name__})
    for patience, last in ends.items():
        training = {"epochs": len(values), "batch_size": 200, "early_stopping_patience": patience}
        constant = {"scheduler": {"name": "constant", "warmup_steps": 0}, "validation": {"sanity_steps": 0}}
        improved = []
        for stop in (3, None):
            settings: dict[str, Any] = {"training": {**training, "max_steps": stop}, **constant}
            _, events = attempt(task, tmp_path / str(patience), resume=stop is None, **settings)
            improved += [(event.epoch, event.improved) for event in events if isinstance(event, EpochEnded)]
        assert improved == [(epoch, epoch in best) for epoch in range(1, last + 1)]
