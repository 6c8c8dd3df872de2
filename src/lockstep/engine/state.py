"""The progress of a run: counters, the running epoch's sums, and what 'best' has been so far; how it ended."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter


@dataclass
class TrainState:
    """``step`` counts optimizer steps, ``micro_step`` micro-batches of rank 0; sizes are in samples.

    ``epoch`` counts from 0 and ``position`` is how many samples of it are used. ``epoch_loss`` and
    ``epoch_count`` sum the loss over the epoch so far, over all ranks. ``frozen``: parameters not
    trained at the checkpoint.
    """

    step: int = 0
    micro_step: int = 0
    epoch: int = 0
    position: int = 0
    samples_seen: int = 0
    skipped_steps: int = 0
    epoch_loss: float = 0.0
    epoch_count: float = 0.0
    elapsed_s: float = 0.0
    best_value: float | None = None
    best_epoch: int | None = None
    best_step: int | None = None
    best_metric: dict[str, float] = field(default_factory=dict)
    evaluations_without_gain: int = 0
    frozen: list[str] | None = None

    def advance(self, micro_batches: int, samples: int, epoch: int, position: int) -> None:
        """Count a step, which ended at ``position`` of ``epoch``."""
        self.step += 1
        self.micro_step += micro_batches
        self.samples_seen += samples
        self.epoch = epoch
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> TrainState:
        """Raise :class:`ValueError` when a value is of the wrong type."""
        values = {name: state[name] for name in cls.__dataclass_fields__ if name in state}
        return TypeAdapter(cls).validate_python(values)


def judge(state: TrainState, metrics: Mapping[str, float], value: float, mode: str, epoch: int) -> bool:
    """Note in ``state`` whether ``value`` is the best so far; ``metrics`` are those of its evaluation.

    Of equal values the one with the smaller ``val_loss`` is the best: a word error rate stays at 1 while the first
    letters are learnt.
    """
    best = state.best_value
    loss = metrics.get("val_loss", math.nan)
    lowest = state.best_metric.get("val_loss", math.nan)
    better = best is None or (value < best if mode == "min" else value > best) or (value == best and loss < lowest)
    if not better or not math.isfinite(value):
        state.evaluations_without_gain += 1
        return False
    state.best_value = value
    state.best_epoch = epoch
    state.best_step = state.step
    state.best_metric = {name: v for name, v in metrics.items() if name.startswith("val_")}
    state.evaluations_without_gain = 0
    return True


class EndedBy(StrEnum):
    """Why a run ended: all steps done or early stopping, a signal, or ``training.max_time_s``."""

    COMPLETED = "completed"
    SIGNAL = "signal"
    TIME = "time"

    @property
    def status(self) -> str:
        """The status of a run in ``run.json``."""
        return "completed" if self is EndedBy.COMPLETED else "stopped"


@dataclass(frozen=True)
class RunResult:
    """How an attempt ended.

    ``metrics``: ``val_…`` of the best evaluation (without one, of the last), and ``test_…`` of the same weights.
    """

    status: str
    exit_code: int
    run_dir: Path
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    best_epoch: int | None = None
    best_metric: dict[str, float] = field(default_factory=dict)
