"""What one run did, step by step, and how far two of them are apart. Reading and arithmetic; starts nothing."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.diagnostics.step_trace import trace_file
from lockstep.rundir.folder import RunDir

Floats = NDArray[np.float64]

#: Rounding of a float32 sum, with room for its length: an allowed difference even if no noise was measured.
ROUNDING = 8 * 2.0**-23
#: A first difference of the loss above this is not rounding; see :func:`order_effect`. Nor is this share of a step.
NOT_ROUNDING = 1e-3
#: Allowed difference of two correct runs, in noise floors. One device and several do not round alike; real faults are
#: larger by orders of magnitude.
FACTOR = 30.0
#: Before the name of a buffer, among the quantities that are compared.
BUFFER = "buffer "


class Divergence(NamedTuple):
    """The first difference of two ranks' weights: after ``step`` (0: at the start), in ``parameter``.

    ``by``: the operation that made it; of ``merge``, ``parameter`` is a buffer.
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
        """Join this run until ``step`` with ``other``, which was resumed from its checkpoint."""
        rows_before = [index for index, merged in enumerate(self.merged) if merged <= step]
        shared = self.buffers.keys() & other.buffers.keys()
        rates = (self.lr[:step], other.lr)
        width = max(self.lr.shape[1], other.lr.shape[1])
        wide = [np.pad(lr, ((0, 0), (0, width - lr.shape[1])), constant_values=math.nan) for lr in rates]
        return replace(
            other,
            loss=np.concatenate([self.loss[:step], other.loss]),
            count=np.concatenate([self.count[:step], other.count]),
            grad_norm=np.concatenate([self.grad_norm[:step], other.grad_norm]),
            digest=np.concatenate([self.digest[:step], other.digest]),
            samples=np.concatenate([self.samples[:step], other.samples]),
            lr=np.concatenate(wide),
            weights=np.concatenate([self.weights[: step + 1], other.weights[1:]]),
            merged=(*self.merged[: len(rows_before)], *other.merged[1:]),
            buffers={
                name: np.concatenate([self.buffers[name][rows_before], other.buffers[name][1:]]) for name in shared
            },
        )

    def furthest_parameter(self, other: Trajectory, step: int) -> str | None:
        """Return the parameter that is furthest from that of ``other`` after ``step``, relative to its size."""
        weights, other_weights = (run.weights[step].astype(np.float64) for run in (self, other))
        if not self.sizes or len(weights) != len(other_weights):
            return None
        return list(self.sizes)[int(np.argmax(_ratio(self._norms(weights - other_weights), self._norms(weights))))]

    def moved_by_rounding(self, other: Trajectory) -> list[str]:
        """Return the parameters whose first step differs from that of ``other``, a run of equal meaning.

        Their gradient is rounding alone, of which an optimizer such as Adam makes a step of the usual size. The
        difference is compared with the step of all weights, since a small one hides nothing.
        """
        weights, other_weights = (run.weights[1].astype(np.float64) for run in (self, other))
        distance = self._norms(weights - other_weights)
        is_moved = distance > NOT_ROUNDING * np.linalg.norm(weights - self.weights[0])
        is_beyond_resolution = distance > ROUNDING * self._norms(weights)
        return [name for name, is_noise in zip(self.sizes, is_moved & is_beyond_resolution, strict=True) if is_noise]

    def without(self, parameters: Collection[str]) -> Trajectory:
        """Return this run without the weights of some parameters."""
        if not parameters:
            return self
        stays = np.repeat([name not in parameters for name in self.sizes], list(self.sizes.values()))
        sizes = {name: size for name, size in self.sizes.items() if name not in parameters}
        return replace(self, weights=self.weights[:, stays], sizes=sizes)

    def _norms(self, values: Floats) -> Floats:
        """Return the norm of each parameter's part of ``values``."""
        ends = np.cumsum(list(self.sizes.values()))[:-1]
        return np.array([np.linalg.norm(part) for part in np.split(values, ends)])

    def first_other_samples(self, other: Trajectory) -> int | None:
        """Return the first step (from 1) whose samples differ from those of ``other``, or ``None``."""
        steps = min(len(self), len(other))
        differs = (self.digest[:steps] != other.digest[:steps]) | (self.samples[:steps] != other.samples[:steps])
        if differs.any():
            return int(np.argmax(differs)) + 1
        return None if len(self) == len(other) else steps + 1


def read_trajectory(path: Path) -> Trajectory:
    """Read the trajectory of a finished run that was trained with ``debug.trace``."""
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
        count=main["count"],
        grad_norm=main["grad_norm"],
        lr=main["lr"],
        weights=main["weights"],
        digest=np.sum([rank["digest"] for rank in ranks], axis=0, dtype=np.uint64),  # wraps, as the hashes' sum does
        samples=np.sum([rank["samples"] for rank in ranks], axis=0),
        draws=tuple(main["draws"].tolist()),
        # JSON has no NaN, so null is NaN.
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
    """Find the first difference between weights of ranks with a replica of the model, from the columns of each."""
    main = ranks[0]
    weights = _first_apart(ranks, "sums")
    merged = _first_apart(ranks, "buffer_sums")
    if not weights and merged:
        row, rank, buffer = merged
        return Divergence(rank, int(main["merged"][row]), str(main["shared"][buffer]), "merge")
    if not weights:
        return None
    row, rank, parameter = weights
    step = (row + 1) // 2
    name = str(main["names"][parameter])
    if step == 0:
        return Divergence(rank, step, name, "start")
    if row % 2 == 0:
        return Divergence(rank, step, name, "hook")
    norms = [columns["grad_norm"][step - 1] for columns in (main, ranks[rank])]
    same_gradient = norms[0] == norms[1] or np.isnan(norms).all()
    return Divergence(rank, step, name, "optimizer" if same_gradient else "gradient")


def _first_apart(ranks: Sequence[Mapping[str, NDArray[Any]]], name: str) -> tuple[int, int, int] | None:
    """Return the first row of ``name`` in which a rank differs from rank 0, that rank, and the column."""
    main, *other_ranks = ranks
    rows = [np.argwhere(main[name] != other[name]).tolist() for other in other_ranks]  # in the order of rows
    return min(((apart[0][0], rank, apart[0][1]) for rank, apart in enumerate(rows, start=1) if apart), default=None)


#: Relative differences of two runs by quantity: ``loss``, ``gradient norm`` and ``weights`` after
#: each step, the buffers after each merge, the ``validation loss`` at each validation. Weights and buffers are
#: relative to how far they have moved since the start.
Gap = dict[str, Floats]


def gap_between(first: Trajectory, second: Trajectory) -> Gap:
    """Compute the gap between two runs, over the steps that both have."""
    steps = min(len(first), len(second))
    pairs = zip(first.validation, second.validation, strict=False)
    losses = [(x["val_loss"], y["val_loss"]) for x, y in pairs if "val_loss" in x and "val_loss" in y]
    first_losses, second_losses = np.array(losses, dtype=np.float64).reshape(-1, 2).T
    return {
        "loss": relative(first.loss[:steps], second.loss[:steps]),
        "gradient norm": relative(first.grad_norm[:steps], second.grad_norm[:steps]),
        "weights": _apart(first.weights[: 1 + steps], second.weights[: 1 + steps]),
        **{f"{BUFFER}{name}": _buffer_gap(first, second, name) for name in first.buffers if name in second.buffers},
        "validation loss": relative(first_losses, second_losses),
    }


def _buffer_gap(first: Trajectory, second: Trajectory, name: str) -> Floats:
    """Return :func:`_apart` for each merge of ``first``; 0 for merges that ``second`` does not have."""
    gap = np.zeros(len(first.merged) - 1)
    shared = [index for index, step in enumerate(first.merged) if step in second.merged]
    partners = [second.merged.index(first.merged[index]) for index in shared]
    gap[np.array(shared[1:], dtype=int) - 1] = _apart(first.buffers[name][shared], second.buffers[name][partners])
    return gap


def _apart(first: NDArray[np.float32], second: NDArray[np.float32]) -> Floats:
    """Return the distance of each row after the first from that of ``second``, relative to its movement since."""
    if first.shape != second.shape:
        return np.full(max(0, min(len(first), len(second)) - 1), np.inf)
    a = first[1:].astype(np.float64)
    b = second[1:].astype(np.float64)
    apart = np.linalg.norm(np.where(np.isnan(a) & np.isnan(b), 0.0, a - b), axis=1)
    return _ratio(apart, np.linalg.norm(a - first[0], axis=1))


def relative(a: Floats, b: Floats) -> Floats:
    """Return |a - b| / max(|a|, |b|): 0 for equal values or two NaN, infinite for a number and NaN."""
    is_equal = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(is_equal, 0.0, _ratio(np.abs(a - b), np.maximum(np.abs(a), np.abs(b))))


def _ratio(distance: Floats, scale: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(distance == 0, 0.0, distance / scale)
    return np.where(np.isnan(ratio), np.inf, ratio)


def order_effect(gap: Gap) -> tuple[int, float] | None:
    """Return step and size of the first difference between two losses, if it is too large for rounding.

    Rounding grows from step to step. A loss that differs by more than ``NOT_ROUNDING``, after steps that agree to
    rounding, depends on the change between the runs.
    """
    beyond = np.flatnonzero(~(gap["loss"] <= ROUNDING))
    if not beyond.size or gap["loss"][beyond[0]] <= NOT_ROUNDING:
        return None
    return int(beyond[0]) + 1, float(gap["loss"][beyond[0]])


class Floor(dict[str, Floats]):
    """The effect of rounding: for each quantity of a :class:`Gap` the largest difference measured so far.

    Rounding grows from step to step as any perturbation does, so later steps are allowed more.
    """

    def parting(self, gap: Gap, factor: float = FACTOR) -> tuple[str, int] | None:
        """Return the first quantity and index (from 0) at which ``gap`` is ``factor`` times the floor.

        The index is a step; of a buffer a merge, and of the validation loss a validation. These two follow from the
        weights: they count only if all steps agree.
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
    """Make a floor of ``gaps`` between runs of equal meaning; never below float32 rounding."""
    rounding = {
        "loss": np.full(len(reference), ROUNDING),
        "gradient norm": np.full(len(reference), ROUNDING),
        "weights": _resolution(reference.weights),
        **{f"{BUFFER}{name}": _resolution(values) for name, values in reference.buffers.items()},
        "validation loss": np.full(len(reference.validation), ROUNDING),
    }
    return floor_over(gaps, rounding)


def exact_floor(reference: Trajectory) -> Floor:
    """Make a floor of equal bits. Validation losses may differ by rounding: they are sums of other chunks."""
    rounding = floor_of([], reference)
    return Floor(
        {name: floor if name == "validation loss" else np.zeros_like(floor) for name, floor in rounding.items()}
    )


def floor_over(gaps: list[Gap], minimum: Gap) -> Floor:
    """Make a floor of ``gaps``, never below ``minimum``; it does not fall from step to step."""
    values = {}
    for name, floor in minimum.items():
        for gap in gaps:
            differences = gap.get(name, floor[:0])[: len(floor)]
            floor = floor.copy()
            floor[: len(differences)] = np.maximum(floor[: len(differences)], differences)
        values[name] = np.maximum.accumulate(floor) if len(floor) else floor
    return Floor(values)


def _resolution(values: NDArray[np.float32]) -> Floats:
    """Return rounding as a share of the distance that values have moved: [rows - 1]."""
    moved = np.linalg.norm((values[1:] - values[0]).astype(np.float64), axis=1)
    size = np.linalg.norm(values[1:].astype(np.float64), axis=1)
    return ROUNDING * np.minimum(1 + _ratio(size, moved), 1e3)
