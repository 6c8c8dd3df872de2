"""Typed events of a run, and the protocol of sinks that receive them.

The loop emits events; sinks turn them into files, a progress bar, TensorBoard. Only rank 0 has
sinks, so a sink does not check the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from lockstep.errors import many

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Event:
    """What happens in a run."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class RunStarted(Event):
    """An attempt begins after ``step`` steps (0 for a new run).

    ``position`` returns the current step between events; any thread may call it. ``length`` returns the number of all
    steps, if that changes: a session learns of all loops of an epoch in the first one.
    """

    run_dir: Path
    attempt: int
    step: int
    total_steps: int
    plan: Mapping[str, Any]
    position: Callable[[], int] | None = field(default=None, compare=False)
    length: Callable[[], int] | None = field(default=None, compare=False)

    @property
    def total(self) -> int:
        """The number of all steps, as far as it is known now."""
        return self.total_steps if self.length is None else self.length()


@dataclass(frozen=True, slots=True)
class StepLogged(Event):
    """The latest values after a log interval.

    ``loss`` is the mean over the items of all steps since the last row, also of an earlier epoch; ``None`` if a
    ``LightningModule`` neither returns nor logs a loss. ``samples_per_s`` counts all ranks. ``data_wait_share`` is the
    share of wall time in which rank 0 waited for input. ``scalars`` has the values logged by hooks of the task.
    ``items_per_s`` counts the items of the loss, such as tokens, if they are not samples. ``mfu`` is the share of the
    GPUs' peak arithmetic, if that is known.
    """

    attempt: int
    step: int
    epoch: int
    samples_seen: int
    loss: float | None
    lr: float
    grad_norm: float | None
    samples_per_s: float
    data_wait_share: float
    skipped_steps: int
    scalars: Mapping[str, float] = field(default_factory=dict)
    items_per_s: float | None = None
    mfu: float | None = None


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank since the last row. ``None``: unknown.

    Attributes:
        step_s: mean seconds of a step, evaluation left out; the same on all ranks but for noise.
        wait_s: of these, seconds that the rank waited for input.
        own_s: seconds of one step until the rank's gradients are computed, before it waits for others; on a CPU,
            without the time in which other processes had its core.
        memory_gb: in use now, 1e9 bytes: allocated tensors on a GPU, the process's resident memory on a CPU.
        reserved_gb: held by torch's allocator on a GPU.
        peak_gb: highest ``memory_gb``: of this epoch on a GPU, of the process on a CPU.
    """

    rank: int
    step_s: float
    wait_s: float
    own_s: float | None
    memory_gb: float
    reserved_gb: float | None
    peak_gb: float


@dataclass(frozen=True, slots=True)
class RanksLogged(Event):
    """State of every rank at a log interval or the end of an epoch. The other ranks wait for ``slow_rank``, if any."""

    attempt: int
    step: int
    epoch: int
    ranks: tuple[RankState, ...]
    slow_rank: int | None = None


@dataclass(frozen=True, slots=True)
class OfEpoch(Event):
    """An event after ``step`` steps, in epoch ``epoch`` (from 1)."""

    attempt: int
    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class EpochEnded(OfEpoch):
    """A row of ``metrics.json``: losses, metrics, learning rate, speed.

    ``is_complete``: the run did not end within the epoch.
    """

    row: Mapping[str, float]
    improved: bool
    samples_seen: int | None = None
    is_complete: bool = True


@dataclass(frozen=True, slots=True)
class Evaluated(OfEpoch):
    """An evaluation between epochs (``validation.every_steps``); ``improved``: it is the best so far."""

    metrics: Mapping[str, float]
    improved: bool
    samples_seen: int | None = None


@dataclass(frozen=True, slots=True)
class PictureDrawn(OfEpoch):
    """A task's picture of an evaluation. ``pixels``: grey (height, width) or RGB (height, width, 3), from 0 to 255."""

    name: str
    pixels: npt.NDArray[np.uint8] = field(compare=False)


@dataclass(frozen=True, slots=True)
class Sound:
    """A remark that can be heard. ``samples``: float, from -1 to 1, shape [samples]; ``rate_hz``: samples a second."""

    text: str
    samples: npt.NDArray[np.float32] = field(compare=False)
    rate_hz: int

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Remarked(OfEpoch):
    """A task's remarks about an evaluation, such as samples of text or recordings with their transcripts."""

    remarks: Sequence[str | Sound]


@dataclass(frozen=True, slots=True)
class CheckpointSaved(Event):
    step: int
    path: Path
    best: bool


@dataclass(frozen=True, slots=True)
class Restarted(Event):
    """All ranks were started again after a failure: restart ``number`` of ``allowed``.

    The run resumes from the checkpoint of ``from_step`` (0: from the beginning); ``lost_steps`` after it are repeated.
    ``reason``: the failure in one line.
    """

    number: int
    allowed: int
    attempt: int
    from_step: int
    lost_steps: int
    reason: str

    def __str__(self) -> str:
        source = f"the checkpoint of step {self.from_step}" if self.from_step else "the beginning"
        are = "is" if self.lost_steps == 1 else "are"
        lost = f"{many(self.lost_steps, 'step')} since then {are} lost" if self.lost_steps else "no step is lost"
        return f"{self.reason}; started again ({self.number} of {self.allowed}) from {source}: {lost}"


@dataclass(frozen=True, slots=True)
class Note(Event):
    """A remark for the user. ``key``: its stable name for code; ``level``: ``info`` or ``warning``."""

    key: str
    text: str
    level: Literal["info", "warning"] = "info"

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class RunEnded(Event):
    """The attempt is over. ``status`` is completed, stopped or failed.

    ``duration_s``: seconds of training, with the parts of earlier attempts that this one continues.
    """

    status: str
    step: int
    final_metrics: Mapping[str, float]
    best_epoch: int | None
    best_metric: Mapping[str, float]
    duration_s: float
    error: str | None = None


class Sink(Protocol):
    """Receives every event of a run, in order, on rank 0."""

    def emit(self, event: Event) -> None: ...

    def close(self) -> None: ...


class Fanout:
    """Sends every event to several sinks; a sink that fails is reported once and left out.

    A logger must not stop a run, except the one that writes the run folder: sinks in ``essential`` raise.
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
                self._switch_off(sink, error)

    def close(self) -> None:
        """Close every sink; the console, the first optional one, is closed last to show failures of the others."""
        for sink in reversed(self._optional[:]):
            try:
                sink.close()
            except Exception as error:
                self._switch_off(sink, error)
        for sink in self._essential:
            sink.close()

    def _switch_off(self, sink: Sink, error: Exception) -> None:
        if sink in self._optional:  # it may fail on the note about its failure
            self._optional.remove(sink)
            name = getattr(sink, "name", type(sink).__name__)
            self.emit(Note("logger_failed", f"{name} failed and is switched off: {error}", "warning"))
