"""Frozen weights of runs: on disk once, and there for resume, export and another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import lockstep
from tests.attempts import attempt
from tests.gloo import run_ranks
from tests.toys import CLASSES, FEATURES, Toy

WIDTH = 1024  # a frozen layer of four megabytes


class Frozen(Toy):
    def model(self) -> nn.Module:
        backbone = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        return nn.Sequential(nn.Linear(FEATURES, WIDTH), backbone, nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def settings(epochs: int) -> dict[str, Any]:
    training = {"epochs": epochs, "global_batch_size": 50, "early_stopping_patience": 0}
    scheduler = {"name": "constant", "warmup_epochs": 0}
    return {"training": training, "scheduler": scheduler, "checkpoint": {"keep_last": 9, "every_steps": 2}}


def files(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").glob("step-*/frozen*"))


def on_ranks(rank: int, size: int, folder: Path) -> Any:
    sharded = {"strategy": "fsdp"}
    for epochs, resume in ((1, False), (2, True)):
        given = settings(epochs)
        given["checkpoint"]["sharded"] = "on"
        weights, _ = attempt(Frozen, folder / "sharded", rank, size, resume=resume, hardware=sharded, **given)
    return weights


@pytest.mark.slow
def test_a_frozen_backbone_is_saved_once_in_a_run_and_its_continuation(tmp_path: Path) -> None:
    whole, _ = attempt(Frozen, tmp_path / "whole", **settings(2))
    attempt(Frozen, tmp_path / "parts", **settings(1))
    resumed, _ = attempt(Frozen, tmp_path / "parts", resume=True, **settings(2))
    assert whole.keys() == resumed.keys() and all(torch.equal(resumed[name], value) for name, value in whole.items())
    for folder in (tmp_path / "whole", tmp_path / "parts"):
        assert len(files(folder)) == 4 and len({file.stat().st_ino for file in files(folder)}) == 1
    lockstep.Run(tmp_path / "whole").export(tmp_path / "out", checkpoint="last", program=False, task=Frozen)
    exported = load_file(tmp_path / "out" / "weights.safetensors")
    assert exported.keys() == whole.keys() and all(torch.equal(exported[name], value) for name, value in whole.items())

    sharded, _ = run_ranks(on_ranks, 2, tmp_path)
    torch.testing.assert_close(sharded, whole, rtol=1e-5, atol=1e-6)
    assert len(files(tmp_path / "sharded")) == 8 and len({f.stat().st_ino for f in files(tmp_path / "sharded")}) == 2
    attempt(Frozen, tmp_path / "sharded", resume=True, **settings(3))  # as one rank, which divides nothing
