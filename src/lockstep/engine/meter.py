"""Sums of loss and count over an epoch, without a host sync on a GPU and without tensor work on a CPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class LossMeter:
    """Adds up finished steps; a step whose loss is not finite counts neither in the sum nor in the count."""

    def __init__(self, device: torch.device) -> None:
        self._on_host = device.type == "cpu"
        self._total, self._count = 0.0, 0.0
        self._device_sums = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, total: Tensor, count: Tensor | float) -> None:
        if self._on_host:
            value = total.item()
            if math.isfinite(value):
                self._total += value
                self._count += float(count)
            return
        finite = torch.isfinite(total)
        pair = torch.stack((total.double(), torch.as_tensor(count, dtype=torch.float64, device=total.device)))
        self._device_sums += torch.where(finite, pair, 0.0)

    def read(self) -> tuple[float, float]:
        """Sum and count so far; synchronises with a GPU."""
        if not self._on_host:
            total, count = self._device_sums.tolist()
            return self._total + total, self._count + count
        return self._total, self._count

    def reset(self, total: float = 0.0, count: float = 0.0) -> None:
        self._total, self._count = total, count
        self._device_sums.zero_()
