"""An estimate of how long a run takes, from a few of its steps."""

from __future__ import annotations

import time

import torch

from lockstep.errors import many
from lockstep.telemetry.console import duration


class StepTimes:
    """The times of the steps of a run with ``debug.fast_dev_run``, for an estimate of the whole run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ends: list[float] = []
        self._waited_s: list[float] = []

    def add(self, waited_s: float) -> None:
        """A step has ended, which waited ``waited_s`` seconds for its batches."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._ends.append(time.perf_counter())
        self._waited_s.append(waited_s)

    def estimate(self, steps: int, epochs: int) -> str:
        """Describe how long an epoch of ``steps`` and the run take."""
        timed = len(self._ends) - 1
        if timed < 1:
            return "No estimate: an epoch has a single step, and the first one is slower than the others."
        step_s = (self._ends[-1] - self._ends[0]) / timed
        waited_s = sum(self._waited_s[1:]) / timed
        epoch_s = steps * step_s
        whole = f"An epoch takes about {duration(epoch_s)} and {many(epochs, 'epoch')} {duration(epochs * epoch_s)}"
        parts = f"{steps} steps of {1e3 * step_s:.3g} ms, of which {1e3 * waited_s:.2g} ms wait for input"
        return f"{whole}, without evaluations: {parts} (mean of {many(timed, 'step')} after the first)."
