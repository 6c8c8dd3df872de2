"""Weights to begin with: rank 0 reads them, whatever the others see."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from lockstep.engine.collectives import Collectives
from lockstep.engine.resume import load_initial_weights
from lockstep.errors import CheckpointError
from lockstep.hardware.world import World
from tests.gloo import run_ranks


def begin(rank: int, ranks: int, sources: list[tuple[Path | None, Path | None]]) -> list[float | str]:
    """What a rank's weight is, or what it is told, for what each rank names."""
    collectives = Collectives(World(rank, ranks, rank, ranks))
    found: list[float | str] = []
    for named in sources:
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, -1.0)
        try:
            load_initial_weights(model, named[rank], collectives)
            found.append(model.weight.item())
        except CheckpointError as error:
            found.append(str(error))
    return found


def test_what_rank_0_reads_is_every_ranks_weights_or_error(tmp_path: Path) -> None:
    here, absent, broken = tmp_path / "here.safetensors", tmp_path / "absent", tmp_path / "broken.safetensors"
    save_file({"weight": torch.full((1, 1), 3.0)}, here)
    broken.write_bytes(b"no weights")
    sources: list[tuple[Path | None, Path | None]] = [
        *((here, here), (here, absent), (here, None), (None, None)),
        *((absent, here), (broken, here)),
    ]
    first, second = run_ranks(begin, 2, sources)
    assert first == second
    assert first[:4] == [3.0, 3.0, 3.0, -1.0]
    assert f"{absent} holds no weights" in first[4]
    assert f"cannot read {broken}" in first[5]
