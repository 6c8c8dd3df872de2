"""Tasks whose steps cost what they are told to cost."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from lockstep import Loss
from tests.toys import Toy


class Greedy(Toy):
    """Holds ``mb`` million bytes for each sample of a micro-batch; on rank 1 alone with ``only_rank_1``."""

    class Config(Toy.Config):
        mb: int = 4
        only_rank_1: bool = False

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        total, count = super().loss(model, batch)
        if self.config.only_rank_1 and os.environ.get("RANK") != "1":
            return Loss(total, count)
        held = torch.zeros(len(batch[1]) * self.config.mb * 250_000)
        return Loss(total + held[0], count)
