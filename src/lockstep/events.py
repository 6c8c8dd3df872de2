"""What a run tells the world: typed events, and the protocol of those who listen.

The loop emits events; sinks turn them into files, a progress bar, TensorBoard. Only rank 0 has
sinks, so a sink needs no rank gate of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class RunStarted:
    """An attempt begins. ``step`` is where it goes on from (0 for a fresh run)."""

    run_dir: Path
    attempt: int
    step: int
    total_steps: int
    plan: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StepLogged:
    """The newest values after a log interval. ``loss`` is the mean over the interval's items.

    ``samples_per_s`` counts all ranks; ``data_wait_share`` is the share of wall time that rank 0
    waited for input. ``scalars`` holds what the task's own hooks logged.
    """

    attempt: int
    step: int
    epoch: int
    samples_seen: int
    loss: float
    lr: float
    grad_norm: float | None
    samples_per_s: float
    data_wait_share: float
    skipped_steps: int
    scalars: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EpochEnded:
    """A complete row of ``metrics.json``: losses, metrics, learning rate, speed."""

    attempt: int
    epoch: int
    step: int
    row: Mapping[str, float]
    improved: bool


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An evaluation between epochs (``validation.every_steps``)."""

    attempt: int
    epoch: int
    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    step: int
    path: Path
    best: bool


@dataclass(frozen=True, slots=True)
class Note:
    """Something people should know: ``level`` is ``info`` or ``warning``."""

    level: str
    message: str


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The attempt is over. ``status`` is completed, stopped or failed."""

    status: str
    step: int
    final_metrics: Mapping[str, float]
    best_epoch: int | None
    best_metric: Mapping[str, float]
    duration_s: float
    error: str | None = None


Event = RunStarted | StepLogged | EpochEnded | Evaluated | CheckpointSaved | Note | RunEnded


class Sink(Protocol):
    """Receives every event of a run, in order, on rank 0."""

    def emit(self, event: Event) -> None: ...

    def close(self) -> None: ...


class RecordingSink:
    """Keeps what it receives: the fake that ships with the seam."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass


class Fanout:
    """Sends every event to several sinks; a sink that fails is reported once and left out.

    A logger must never stop a run, except the one that keeps the run's own record: sinks listed
    in ``essential`` raise.
    """

    def __init__(self, essential: Iterable[Sink] = (), optional: Iterable[Sink] = ()) -> None:
        self._essential = list(essential)
        self._optional = list(optional)

    def emit(self, event: Event) -> None:
        for sink in self._essential:
            sink.emit(event)
        for sink in list(self._optional):
            try:
                sink.emit(event)
            except Exception as error:  # any library's failure, by design
                self._optional.remove(sink)
                self.emit(Note("warning", f"{type(sink).__name__} failed and is switched off: {error}"))

    def close(self) -> None:
        for sink in [*self._optional, *self._essential]:
            sink.close()
