"""Which samples a run trained on: the files of ``telemetry.record_samples``, read back and checked.

A run that was killed and resumed leaves rows of steps that were done again. :func:`audit_samples` tells
from the others, those that led to the newest weights, whether each epoch used every sample once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lockstep.errors import RunFolderError
from lockstep.rundir.files import read_jsonl
from lockstep.rundir.folder import RunDir, surviving


@dataclass(frozen=True)
class EpochSamples:
    """What one epoch used. ``repeated`` and ``unused`` are sample indices, ascending."""

    epoch: int
    used: int
    repeated: tuple[int, ...]
    unused: tuple[int, ...]


def used_samples(run: RunDir) -> dict[int, Counter[int]]:
    """How often each sample index went into the newest weights, by epoch.

    Rows beyond the step from which a later attempt went on are left out. Those of steps that the newest
    attempt has begun, but not yet saved, count.

    Raises:
        RunFolderError: the run has recorded nothing, or a file is damaged.
    """
    epochs: dict[int, Counter[int]] = {}
    for row in _rows(run):
        epochs.setdefault(row["epoch"], Counter()).update(row["indices"])
    return dict(sorted(epochs.items()))


def samples_by_step(run: RunDir) -> dict[int, tuple[int, Counter[int]]]:
    """As :func:`used_samples`, by step: its epoch, and how often it took each sample."""
    steps: dict[int, tuple[int, Counter[int]]] = {}
    for row in _rows(run):
        epoch, counts = steps.setdefault(row["step"], (row["epoch"], Counter()))
        assert epoch == row["epoch"], "the ranks take a step in one epoch"
        counts.update(row["indices"])
    return dict(sorted(steps.items()))


def _rows(run: RunDir) -> Iterator[dict[str, Any]]:
    files = sorted(run.path.glob("samples-rank*.jsonl"))
    if not files:
        raise RunFolderError(
            f"{run.path} holds no record of samples",
            why="telemetry.record_samples was off",
            fix="train with --set telemetry.record_samples=true",
        )
    resumed_from = run.resumed_from()
    for file in files:
        yield from surviving(read_jsonl(file), resumed_from)


def audit_samples(run: RunDir) -> list[EpochSamples]:
    """Whether every epoch used each training sample once; the last one of an unfinished run has ``unused`` ones.

    Raises:
        RunFolderError: as :func:`used_samples`.
    """
    epochs = used_samples(run)
    samples = range(run.plan()["task"]["train_samples"])
    return [
        EpochSamples(
            epoch=epoch,
            used=counts.total(),
            repeated=tuple(sorted(index for index, count in counts.items() if count > 1)),
            unused=tuple(index for index in samples if index not in counts),
        )
        for epoch, counts in epochs.items()
    ]
