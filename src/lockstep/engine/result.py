"""What a run returns: how an attempt ended, and its metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path


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
    """How an attempt ended. ``metrics`` are the final ones: ``val_…`` of the last evaluation and ``test_…``."""

    status: str
    exit_code: int
    run_dir: Path
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    best_epoch: int | None = None
    best_metric: dict[str, float] = field(default_factory=dict)
