"""What a run returns: how an attempt ended, and its metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


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
