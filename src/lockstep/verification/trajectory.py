"""What one run did, step by step, and how far two of them are apart. Reading and arithmetic; starts nothing."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.diagnostics.step_trace import trace_file
from lockstep.rundir.folder import RunDir

Floats = NDArray[np.float64]

#: Rounding of a float32 sum, with room for its length: what two runs may differ by even where no noise was seen.
ROUNDING = 8 * 2.0**-23
#: A first difference of the loss above this is not rounding; see :func:`order_effect`.
NOT_ROUNDING = 1e-3
#: By how many times the noise floor two correct runs may differ. One device and several do not round alike;
#: real faults are larger by orders of magnitude.
FACTOR = 30.0
#: Before the name of a buffer, among the quantities that are compared.
BUFFER = "buffer "


class Divergence(NamedTuple):
    """Where the weights of two ranks first differ: after ``step`` (0: at the start), in ``parameter``.

    ``by``: what has changed them so; of ``merge``, ``parameter`` is a buffer.
    """

    rank: int
    step: int
    parameter: str
    by: Literal["start", "gradient", "optimizer", "hook", "merge"]


@dataclass(frozen=True)
class Trajectory:
    """The steps of one run, over all its ranks.

    ``loss``, ``count`` and ``grad_norm``: [steps]; ``lr``: [steps, groups]; ``weights``: [1 + steps, picked], the
    first row before training, ``sizes`` values of each parameter; ``buffers``: [1 + merges, picked] each, read after
    the steps in ``merged``; ``settings``: [1 + steps], other numbers of the optimizer's groups. ``digest`` sums the
    hashes of each step's samples modulo 2⁶⁴.
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
    sizes: dict[str, int] = field(default_factory=dict)
    merged: tuple[int, ...] = (0,)
    buffers: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    settings: dict[str, Floats] = field(default_factory=dict)
    divergence: Divergence | None = None

    def __len__(self) -> int:
        return len(self.loss)

    def then(self, step: int, other: Trajectory) -> Trajectory:
        """This run until ``step``, and from there on ``other``, which was resumed from its checkpoint."""
        kept = [place for place, merged in enumerate(self.merged) if merged <= step]
        shared = self.buffers.keys() & other.buffers.keys()
        rows: dict[str, Any] = {
            name: np.concatenate([getattr(self, name)[:step], getattr(other, name)])
            for name in ("loss", "count", "grad_norm", "digest", "samples")
        }
        rates, width = (self.lr[:step], other.lr), max(self.lr.shape[1], other.lr.shape[1])
        wide = [np.pad(lr, ((0, 0), (0, width - lr.shape[1])), constant_values=math.nan) for lr in rates]
        return replace(
            other,
            **rows,
            lr=np.concatenate(wide),
            weights=np.concatenate([self.weights[: step + 1], other.weights[1:]]),
            merged=(*self.merged[: len(kept)], *other.merged[1:]),
            buffers={name: np.concatenate([self.buffers[name][kept], other.buffers[name][1:]]) for name in shared},
        )

    def furthest_parameter(self, other: Trajectory, step: int) -> str | None:
        """The parameter that is furthest from that of ``other`` after ``step``, for its size."""
        ours, theirs = (run.weights[step].astype(np.float64) for run in (self, other))
        if not self.sizes or len(ours) != len(theirs):
            return None
        ends = np.cumsum(list(self.sizes.values()))[:-1]
        pairs = zip(np.split(ours - theirs, ends), np.split(ours, ends), strict=True)
        distance, size = np.array([[np.linalg.norm(gap), np.linalg.norm(of)] for gap, of in pairs]).T
        return list(self.sizes)[int(np.argmax(_ratio(distance, size)))]

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
    ranks: list[dict[str, NDArray[Any]]] = []
    for rank in range(run.plan()["batch"]["ranks"]):
        with np.load(trace_file(path, rank), allow_pickle=False) as columns:
            ranks.append(dict(columns))
    main = ranks[0]
    weights = sorted((run.checkpoints / "last").glob("*.safetensors"))
    with np.errstate(divide="ignore", invalid="ignore"):
        loss = main["loss"] / main["count"]
    return Trajectory(
        loss=loss,
        **{name: main[name] for name in ("count", "grad_norm", "lr", "weights")},
        digest=np.sum([rank["digest"] for rank in ranks], axis=0, dtype=np.uint64),  # wraps, as the hashes' sum does
        samples=np.sum([rank["samples"] for rank in ranks], axis=0),
        draws=tuple(main["draws"].tolist()),
        # JSON has no NaN: what was not a number comes back as nothing.
        validation=tuple(
            {k: math.nan if v is None else v for k, v in row.items() if k.startswith("val_")} for row in run.epochs()
        ),
        fingerprint=hashlib.sha256(b"".join(file.read_bytes() for file in weights)).hexdigest(),
        sizes=dict(zip(main["names"].tolist(), main["sizes"].tolist(), strict=True)),
        merged=tuple(main["merged"].tolist()),
        buffers={name.removeprefix("buffer:"): v for name, v in main.items() if name.startswith("buffer:")},
        settings={name.removeprefix("group:"): v for name, v in main.items() if name.startswith("group:")},
        divergence=divergence(ranks),
    )


def divergence(ranks: Sequence[Mapping[str, NDArray[Any]]]) -> Divergence | None:
    """Where ranks with a replica of the model each first have other weights than rank 0, from the columns of each."""
    main, weights, merged = ranks[0], _first_apart(ranks, "sums"), _first_apart(ranks, "buffer_sums")
    if not weights and merged:
        row, rank, buffer = merged
        return Divergence(rank, int(main["merged"][row]), str(main["shared"][buffer]), "merge")
    if not weights:
        return None
    row, rank, parameter = weights
    step, name = (row + 1) // 2, str(main["names"][parameter])
    if step == 0:
        return Divergence(rank, step, name, "start")
    if row % 2 == 0:
        return Divergence(rank, step, name, "hook")
    norms = [columns["grad_norm"][step - 1] for columns in (main, ranks[rank])]
    same = norms[0] == norms[1] or np.isnan(norms).all()
    return Divergence(rank, step, name, "optimizer" if same else "gradient")


def _first_apart(ranks: Sequence[Mapping[str, NDArray[Any]]], name: str) -> tuple[int, int, int] | None:
    """The first row of ``name`` in which a rank differs from rank 0, that rank, and the column."""
    main, *others = ranks
    rows = [np.argwhere(main[name] != other[name]).tolist() for other in others]  # in the order of rows
    return min(((apart[0][0], rank, apart[0][1]) for rank, apart in enumerate(rows, start=1) if apart), default=None)


#: How far two runs are apart, as relative differences by quantity: ``loss``, ``gradient norm`` and ``weights`` after
#: each step, the buffers after each merge, the ``validation loss`` at each validation. Weights and buffers are
#: relative to how far they have moved since the start.
Gap = dict[str, Floats]


def gap_between(one: Trajectory, other: Trajectory) -> Gap:
    """The gap between two runs; where one is shorter, over the steps that both have."""
    steps = min(len(one), len(other))
    pairs = zip(one.validation, other.validation, strict=False)
    losses = [(x["val_loss"], y["val_loss"]) for x, y in pairs if "val_loss" in x and "val_loss" in y]
    ours, theirs = np.array(losses, dtype=np.float64).reshape(-1, 2).T
    return {
        "loss": relative(one.loss[:steps], other.loss[:steps]),
        "gradient norm": relative(one.grad_norm[:steps], other.grad_norm[:steps]),
        "weights": _apart(one.weights[: 1 + steps], other.weights[: 1 + steps]),
        **{f"{BUFFER}{name}": _buffer_gap(one, other, name) for name in one.buffers if name in other.buffers},
        "validation loss": relative(ours, theirs),
    }


def _buffer_gap(one: Trajectory, other: Trajectory, name: str) -> Floats:
    """:func:`_apart` for each merge of ``one``; 0 where ``other`` has merged after other steps."""
    gap = np.zeros(len(one.merged) - 1)
    shared = [place for place, step in enumerate(one.merged) if step in other.merged]
    theirs = [other.merged.index(one.merged[place]) for place in shared]
    gap[np.array(shared[1:], dtype=int) - 1] = _apart(one.buffers[name][shared], other.buffers[name][theirs])
    return gap


def _apart(one: NDArray[np.float32], other: NDArray[np.float32]) -> Floats:
    """The distance of each row but the first from that of ``other``, relative to how far it has moved since then."""
    if one.shape != other.shape:
        return np.full(max(0, min(len(one), len(other)) - 1), np.inf)
    a, b = one[1:].astype(np.float64), other[1:].astype(np.float64)
    apart = np.linalg.norm(np.where(np.isnan(a) & np.isnan(b), 0.0, a - b), axis=1)
    return _ratio(apart, np.linalg.norm(a - one[0], axis=1))


def relative(a: Floats, b: Floats) -> Floats:
    """|a - b| / max(|a|, |b|); equal values, NaN among them, are 0 apart, a finite and a NaN infinitely far."""
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(same, 0.0, _ratio(np.abs(a - b), np.maximum(np.abs(a), np.abs(b))))


def _ratio(distance: Floats, scale: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(distance == 0, 0.0, distance / scale)
    return np.where(np.isnan(ratio), np.inf, ratio)


def order_effect(gap: Gap) -> tuple[int, float] | None:
    """Step and size of the first difference between two losses, if it is too large for rounding.

    Rounding grows from step to step. A loss that differs by more than ``NOT_ROUNDING``, after steps that agree to
    rounding, depends on what was changed between the runs.
    """
    beyond = np.flatnonzero(~(gap["loss"] <= ROUNDING))
    if not beyond.size or gap["loss"][beyond[0]] <= NOT_ROUNDING:
        return None
    return int(beyond[0]) + 1, float(gap["loss"][beyond[0]])


class Floor(dict[str, Floats]):
    """What rounding alone makes of a run: for each quantity of a :class:`Gap` the largest difference seen so far.

    Rounding grows from step to step as any perturbation does, so later steps are allowed more.
    """

    def parting(self, gap: Gap, factor: float = FACTOR) -> tuple[str, int] | None:
        """The first quantity and place (from 0) at which ``gap`` is ``factor`` times the floor.

        A place is a step; of a buffer a merge, and of the validation loss a validation. These two follow from the
        weights: they count only where all steps agree.
        """
        first: tuple[str, int] | None = None
        for name, differences in gap.items():
            allowed = factor * self[name][: len(differences)]
            beyond = np.flatnonzero(~(differences <= allowed))
            follows = name == "validation loss" or name.startswith(BUFFER)
            if beyond.size and (first is None or (beyond[0] < first[1] and not follows)):
                first = name, int(beyond[0])
        return first


def floor_of(gaps: list[Gap], reference: Trajectory) -> Floor:
    """The floor that ``gaps`` between runs of equal meaning show; never below float32 rounding."""
    least = {
        "loss": np.full(len(reference), ROUNDING),
        "gradient norm": np.full(len(reference), ROUNDING),
        "weights": _resolution(reference.weights),
        **{f"{BUFFER}{name}": _resolution(values) for name, values in reference.buffers.items()},
        "validation loss": np.full(len(reference.validation), ROUNDING),
    }
    return floor_over(gaps, least)


def floor_over(gaps: list[Gap], least: Gap) -> Floor:
    """The floor that ``gaps`` show, never below ``least``; it does not fall from step to step."""
    values = {}
    for name, floor in least.items():
        for gap in gaps:
            seen = gap.get(name, floor[:0])[: len(floor)]
            floor = floor.copy()
            floor[: len(seen)] = np.maximum(floor[: len(seen)], seen)
        values[name] = np.maximum.accumulate(floor) if len(floor) else floor
    return Floor(values)


def _resolution(values: NDArray[np.float32]) -> Floats:
    """What rounding is of the distance that values have moved: [rows - 1]."""
    moved = np.linalg.norm((values[1:] - values[0]).astype(np.float64), axis=1)
    size = np.linalg.norm(values[1:].astype(np.float64), axis=1)
    return ROUNDING * np.minimum(1 + _ratio(size, moved), 1e3)
