"""What one run did, step by step, and how far two of them are apart. Reading and arithmetic; starts nothing."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.checkpoint.manifest import MODEL
from lockstep.engine.trace import trace_file
from lockstep.telemetry.rundir import RunDir

Floats = NDArray[np.float64]

#: Rounding of a float32 sum, with room for its length: what two runs may differ by even where no noise was seen.
ROUNDING = 8 * 2.0**-23


@dataclass(frozen=True)
class Trajectory:
    """The steps of one run, over all its ranks.

    ``loss``, ``count`` and ``grad_norm``: [steps]; ``lr``: [steps, groups]; ``weights``: [1 + steps, picked], the
    first row before training. ``digest`` sums the hashes of each step's samples modulo 2⁶⁴.
    """

    loss: Floats
    count: Floats
    grad_norm: Floats
    lr: Floats
    weights: NDArray[np.float32]
    digest: NDArray[np.uint64]
    samples: NDArray[np.int64]
    draws: tuple[str, ...]
    validation: tuple[dict[str, float], ...]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.loss)

    def first_other_samples(self, other: Trajectory) -> int | None:
        """The first step, from 1, whose samples are not those of ``other``; ``None``: there is none."""
        steps = min(len(self), len(other))
        differs = (self.digest[:steps] != other.digest[:steps]) | (self.samples[:steps] != other.samples[:steps])
        if differs.any():
            return int(np.argmax(differs)) + 1
        return None if len(self) == len(other) else steps + 1


def read_trajectory(path: Path) -> Trajectory:
    """The trajectory of a finished run that was trained with ``debug.trace``."""
    run = RunDir.open(path)
    main, *others = [_columns(trace_file(path, rank)) for rank in range(run.plan()["batch"]["ranks"])]
    digest, samples = main["digest"].copy(), main["samples"].copy()
    for other in others:
        digest += other["digest"]  # wraps, as the hashes' sum does
        samples += other["samples"]
    model = run.checkpoints / "last" / MODEL
    with np.errstate(divide="ignore", invalid="ignore"):
        loss = main["loss"] / main["count"]
    return Trajectory(
        loss=loss,
        count=main["count"],
        grad_norm=main["grad_norm"],
        lr=main["lr"],
        weights=main["weights"],
        digest=digest,
        samples=samples,
        draws=tuple(main["draws"].tolist()),
        # JSON has no NaN: what was not a number comes back as nothing.
        validation=tuple(
            {k: math.nan if v is None else v for k, v in row.items() if k.startswith("val_")} for row in run.epochs()
        ),
        fingerprint=hashlib.sha256(model.read_bytes()).hexdigest(),
    )


def _columns(file: Path) -> dict[str, NDArray[Any]]:
    with np.load(file, allow_pickle=False) as columns:
        return dict(columns)


@dataclass(frozen=True)
class Gap:
    """How far two runs are apart after each step: relative differences, [steps] each.

    ``weights`` is relative to the way that they have come since the start. ``validation`` is that of the validation
    loss: [validations].
    """

    loss: Floats
    grad_norm: Floats
    weights: Floats
    validation: Floats

    def items(self) -> dict[str, Floats]:
        return {
            "loss": self.loss,
            "gradient norm": self.grad_norm,
            "weights": self.weights,
            "validation loss": self.validation,
        }


def gap_between(one: Trajectory, other: Trajectory) -> Gap:
    """The gap between two runs; where one is shorter, over the steps that both have."""
    steps = min(len(one), len(other))
    a, b = (run.weights[1 : 1 + steps].astype(np.float64) for run in (one, other))
    moved = np.linalg.norm(a - one.weights[0].astype(np.float64), axis=1)
    pairs = zip(one.validation, other.validation, strict=False)
    losses = [(x["val_loss"], y["val_loss"]) for x, y in pairs if "val_loss" in x and "val_loss" in y]
    ours, theirs = np.array(losses, dtype=np.float64).reshape(-1, 2).T
    return Gap(
        loss=_relative(one.loss[:steps], other.loss[:steps]),
        grad_norm=_relative(one.grad_norm[:steps], other.grad_norm[:steps]),
        weights=_ratio(np.linalg.norm(a - b, axis=1), moved),
        validation=_relative(ours, theirs),
    )


def _relative(a: Floats, b: Floats) -> Floats:
    """|a - b| / max(|a|, |b|); equal values, NaN among them, are 0 apart, a finite and a NaN infinitely far."""
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(same, 0.0, _ratio(np.abs(a - b), np.maximum(np.abs(a), np.abs(b))))


def _ratio(distance: Floats, scale: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(distance == 0, 0.0, distance / scale)
    return np.where(np.isnan(ratio), np.inf, ratio)


@dataclass(frozen=True)
class Floor:
    """What rounding alone makes of a run: for each quantity of a :class:`Gap` the largest difference seen so far.

    Rounding grows from step to step as any perturbation does, so later steps are allowed more.
    """

    values: dict[str, Floats]

    def parting(self, gap: Gap, factor: float) -> tuple[str, int] | None:
        """The first quantity and place (step or validation, from 0) at which ``gap`` is ``factor`` times the floor."""
        first: tuple[str, int] | None = None
        for name, differences in gap.items().items():
            allowed = factor * self.values[name][: len(differences)]
            beyond = np.flatnonzero(differences > allowed)
            if name == "validation loss":
                # It follows from the weights: of interest by itself only where they agree.
                return first or ((name, int(beyond[0])) if beyond.size else None)
            if beyond.size and (first is None or beyond[0] < first[1]):
                first = name, int(beyond[0])
        return first


def floor_of(gaps: list[Gap], reference: Trajectory) -> Floor:
    """The floor that ``gaps`` between runs of equal meaning show; never below float32 rounding."""
    moved = np.linalg.norm((reference.weights[1:] - reference.weights[0]).astype(np.float64), axis=1)
    size = np.linalg.norm(reference.weights[1:].astype(np.float64), axis=1)
    least = {
        "loss": np.full(len(reference), ROUNDING),
        "gradient norm": np.full(len(reference), ROUNDING),
        "weights": ROUNDING * np.minimum(1 + _ratio(size, moved), 1e3),
        "validation loss": np.full(len(reference.validation), ROUNDING),
    }
    values = {}
    for name, floor in least.items():
        for gap in gaps:
            seen = gap.items()[name][: len(floor)]
            floor = floor.copy()
            floor[: len(seen)] = np.maximum(floor[: len(seen)], seen)
        values[name] = np.maximum.accumulate(floor) if len(floor) else floor
    return Floor(values)
