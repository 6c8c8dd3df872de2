"""Ranks that should have the same weights are compared, and the first difference is named."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from lockstep.engine.distributed.buffers import check_agreement, check_start
from lockstep.engine.distributed.collectives import Collectives
from lockstep.errors import LockstepError
from lockstep.hardware.world import World
from tests.e2e.test_train import finish, start
from tests.gloo import run_ranks
from tests.toys import Toy


class Cached(nn.Module):
    buffer_reduction: ClassVar[dict[str, str]] = {"cache": "local"}

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_buffer("phase", torch.zeros(3, dtype=torch.complex64))
        self.layer = nn.Linear(2, 2)


def disagree(rank: int, ranks: int) -> list[str | None]:
    """What is said of ranks that differ in something."""
    collectives = Collectives(World(rank, ranks, rank, ranks))
    torch.manual_seed(0)
    model = Cached()
    optimizer = torch.optim.Adam(model.parameters())
    model.layer(torch.ones(2)).sum().backward()
    optimizer.step()

    def said(check: Any) -> str | None:
        try:
            return check()
        except LockstepError as error:
            return str(error)

    found = []
    for tensor in (model.cache, model.scratch, model.phase, model.layer.bias, None):
        kept = None if tensor is None else tensor.detach().clone()
        with torch.no_grad():
            if tensor is not None and rank == 1:
                tensor.view(-1)[1] += 1e-7
            if tensor is None:
                optimizer.state[model.layer.weight]["exp_avg"] *= 1 + rank
        found.append(said(lambda: check_agreement(model, optimizer, collectives)))
        if tensor is model.layer.bias:
            found.append(said(lambda: check_start(model, collectives, exact=True)))
            found.append(said(lambda: check_start(model, collectives, exact=False)))
        if tensor is not None:
            with torch.no_grad():
                tensor.copy_(kept)
    return found


def test_the_first_tensor_that_differs_is_named() -> None:
    first, second, third = run_ranks(disagree, 3)
    assert first == second == third
    cache, scratch, phase, bias, exact, fast, moment = first
    assert cache is None and scratch is None, "these may differ"
    assert "no longer train the same weights: phase of rank 1 is not that of rank 0" in str(phase)
    assert "layer.bias of rank 1 is not that of rank 0" in str(bias)
    assert "the ranks begin with different weights: layer.bias" in str(exact)
    assert str(fast).startswith("The ranks began with different weights (layer.bias of rank 1")
    assert "the optimizer's exp_avg of parameter 0 of ranks 1, 2" in str(moment)


class Apart(Toy):
    """Ranks begin with different weights, and a hook changes them on one rank only."""

    def model(self) -> nn.Module:
        model = super().model()
        nn.init.constant_(model[0].bias, float(os.environ.get("RANK", "0")))
        return model

    def hooks(self) -> Any:
        def noise(result: Any, model: nn.Module) -> None:
            if os.environ.get("RANK", "0") == "1":
                model[4].weight.data += 1e-3

        return [(noise, 5)]


def test_ranks_that_part_end_the_run_at_the_next_checkpoint(tmp_path: Path) -> None:
    task = f"{__file__}:Apart"
    output = finish(start("train", task, "--save-dir", "run", "--devices", "cpu,cpu", cwd=tmp_path), code=1)
    assert "The ranks began with different weights (0.bias of rank 1" in output
    assert "the ranks no longer train the same weights: 4.weight of rank 1 is not that of rank 0" in output
