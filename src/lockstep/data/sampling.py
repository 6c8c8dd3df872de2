"""Orders besides the plain shuffle: by weights or classes, by length, for longer epochs.

All are functions of (seed, epoch, position), as :mod:`lockstep.data.order` is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, WeightedRandomSampler

from lockstep.arithmetic import ceil_div
from lockstep.config.sections import DataConfig
from lockstep.data.arrays import LABELS, NO_LABEL, FrameRows, is_hugging_face, leaves
from lockstep.data.order import BlockOrder, Order, check_slice, derive_key, mixed, shuffled, words_of
from lockstep.errors import ConfigError, DataError, many
from lockstep.planning.batch import SamplingFacts, check_sizes

Indices = NDArray[np.int64]
Floats = NDArray[np.float64]
#: Weights that follow from the epoch, from 0: a curriculum.
Curriculum = Callable[[int], Any]
#: One number for each training sample, or a function or sampler that returns them.
Weights = Curriculum | WeightedRandomSampler | Any


class SampleOrder(Protocol):
    """The sample at each position of an epoch of ``samples`` positions.

    ``repeats``: one sample may be at several positions, and then draws other random numbers at each.
    """

    samples: int
    seed: int
    repeats: bool

    def slice(self, epoch: int, start: int, stop: int) -> Indices: ...


class Sampling(Protocol):
    """The choice of samples; the plan has ``facts``."""

    @property
    def facts(self) -> SamplingFacts: ...

    def order(self, positions: int, seed: int) -> SampleOrder: ...


class BucketedOrder(BlockOrder):
    """``order``, rearranged by length, so that padding is short: like goes with like.

    It is cut into windows of ``window`` samples; a window is sorted by length and cut into blocks of ``block`` samples,
    which are shuffled. A wide window makes for less padding, a narrow one for more mixing.

    Args:
        lengths: one number per sample, in any unit: shape [samples of the data set]. A memory map stays one.

    Raises:
        ConfigError: ``window`` is not a positive multiple of ``block``.
        DataError: ``lengths`` is not one number per sample.
    """

    def __init__(self, order: SampleOrder, lengths: Sequence[float] | NDArray[Any], window: int, block: int) -> None:
        check_sizes(window, block)
        self._lengths = check_lengths(lengths, order.samples if type(order) is Order else len(lengths))
        self.order = order
        self.samples = order.samples
        self.repeats = order.repeats
        self.seed = order.seed
        self.block = window
        self._blocks = block

    def _compute(self, epoch: int, start: int, stop: int) -> Indices:
        samples = self.order.slice(epoch, start, stop)
        # A stable sort: equal lengths keep their random order.
        samples = samples[np.argsort(self._lengths[samples], kind="stable")]
        key = derive_key("blocks", self.order.seed, epoch, start // self.block)
        blocks = shuffled(ceil_div(len(samples), self._blocks), key)
        places = (blocks[:, None] * self._blocks + np.arange(self._blocks)).reshape(-1)
        window: Indices = samples[places[places < len(samples)]]
        return window


def check_lengths(lengths: Sequence[float] | NDArray[Any], samples: int) -> NDArray[Any]:
    """Convert ``lengths`` to an array of shape [samples]. Raises :class:`DataError`: not one number per sample."""
    array: NDArray[Any] = np.asanyarray(lengths)
    if array.shape != (samples,) or array.dtype.kind not in "uif":
        raise DataError(
            f"lengths of shape {array.shape} and type {array.dtype} do not fit {samples} samples",
            why="a length-bucketed order needs one number per sample",
            fix=f"give a one-dimensional array of {samples} lengths",
        )
    return array


def hash_lengths(lengths: NDArray[Any]) -> str:
    """Return a hash of all lengths: with another one of them, the order is another."""
    digest = hashlib.sha256(str(lengths.dtype).encode())
    digest.update(np.ascontiguousarray(lengths).data)
    return digest.hexdigest()[:16]


@lru_cache(maxsize=64)
def deal(items: int, lanes: int) -> Indices:
    """Return the item at each place when ``items`` are dealt to ``lanes`` in turn: shape [items], read-only.

    Lane l has the places j with ⌊j·lanes/items⌋ = l, as in :class:`lockstep.planning.BatchPlan`, and gets the items
    l, l + lanes, l + 2·lanes, …: neighbours in a block grow in length, so lanes have equal work. The rest of the last
    round goes to the lanes that have one more.
    """
    places = np.arange(items, dtype=np.int64)
    lane = places * lanes // items
    turn = places + (-lane * items // lanes)  # the place within its lane
    dealt = np.empty_like(places)
    dealt[np.lexsort((lane, turn))] = places
    dealt.flags.writeable = False
    return dealt


class Cycled:
    """Epochs of any length: each sample of ``order`` once, in a new order, before any is seen again."""

    repeats = True

    def __init__(self, order: SampleOrder, samples: int) -> None:
        self.samples = samples
        self.seed = order.seed
        self._order = order

    def slice(self, epoch: int, start: int, stop: int) -> Indices:
        check_slice(self.samples, epoch, start, stop)
        return self.run(epoch * self.samples + start, epoch * self.samples + stop)

    def run(self, start: int, stop: int) -> Indices:
        """Return samples at positions counted from the start of the run."""
        pieces = []
        whole = self._order.samples
        while start < stop:
            epoch, first = divmod(start, whole)
            last = min(whole, first + stop - start)
            pieces.append(self._order.slice(epoch, first, last))
            start += last - first
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


class WeightedOrder(BlockOrder):
    """Samples drawn with probabilities in proportion to their weights.

    With replacement, position p takes the sample at which the sum of the weights first exceeds a hash of p: O(log n).
    Without, an epoch is sorted by -log(u)/w, with u a hash of the sample (Efraimidis and Spirakis, "Weighted random
    sampling with a reservoir", Information Processing Letters 97, 2006). ``weights(epoch)`` has the shape [samples of
    the data set].
    """

    def __init__(self, weights: Callable[[int], Floats], samples: int, seed: int, *, replacement: bool) -> None:
        self.samples = samples
        self.seed = seed
        self.repeats = replacement
        self._weights = weights
        self._known: tuple[int, NDArray[Any]] | None = None  # an epoch; the sums of its weights, or its order

    def _compute(self, epoch: int, start: int, stop: int) -> Indices:
        if self._known is None or self._known[0] != epoch:
            weights = self._weights(epoch)
            if self.repeats:
                # By a power of two, which rounds nothing: sums of the smallest numbers have too few bits to draw by.
                weights = np.cumsum(np.ldexp(weights, -np.frexp(weights.max())[1]))
            self._known = epoch, weights if self.repeats else self._sorted(weights, epoch)
        latest = self._known[1]
        if not self.repeats:
            return cast(Indices, latest[start:stop].astype(np.int64))
        places = np.arange(start, stop, dtype=np.uint64)
        drawn = uniform(places, derive_key("weighted", self.seed, epoch)) * latest[-1]
        # Rounding could reach the sum itself, after which there is no sample.
        last = np.searchsorted(latest, latest[-1], side="left")
        indices: Indices = np.minimum(np.searchsorted(latest, drawn, side="right"), last)
        return indices

    def _sorted(self, weights: Floats, epoch: int) -> Indices:
        times = np.full(len(weights), np.inf)
        places = np.flatnonzero(weights)
        if len(places) < self.samples:
            raise DataError(
                f"an epoch of {self.samples} samples cannot be drawn without replacement in epoch {epoch}",
                why=f"{len(places)} samples have a weight above 0",
                fix="set data.replacement=true, or data.epoch_samples to at most that number",
            )
        drawn = uniform(places.astype(np.uint64), derive_key("without", self.seed, epoch))
        # As logarithms, since a quotient by the smallest weights is infinite, as those of weight 0 are.
        waits = np.maximum(-logarithm(drawn), np.finfo(np.float64).tiny)
        times[places] = logarithm(waits) - logarithm(weights[places])
        return np.argsort(times, kind="stable")


def uniform(places: NDArray[np.uint64], key: int) -> Floats:
    """Return a hash of each place, as a number in (0, 1) with 53 bits."""
    return ((mixed(words_of(places, key)) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def logarithm(values: Floats) -> Floats:
    """Compute the natural logarithm by operations that round alike on every machine, which ``np.log`` does not."""
    mantissa, exponent = np.frexp(values)
    z = (mantissa - 1) / (mantissa + 1)
    square = z * z
    total = np.zeros_like(z)
    for power in range(33, 0, -2):  # 2 artanh(z), |z| ≤ 1/3
        total = total * square + 1 / power
    return cast(Floats, exponent * 0.6931471805599453 + 2 * z * total)


class _Sampling(NamedTuple):
    facts: SamplingFacts
    order: Callable[[int, int], SampleOrder]


def natural(dataset: Any) -> Sampling:
    """Return the sampling of a mixture or a stream; for other data sets, each sample once an epoch."""
    check_shares(dataset)
    make_sampling = getattr(dataset, "sampling", None)
    if callable(make_sampling):
        return cast(Sampling, make_sampling())
    samples = len(dataset)

    def order(positions: int, seed: int) -> SampleOrder:
        whole = Order(samples, seed)
        return whole if positions == samples else Cycled(whole, positions)

    return _Sampling(SamplingFacts(kind="shuffled", digest="", positions=samples), order)


def check_shares(dataset: Any, within: str | None = None) -> None:
    """Refuse a mixture among the parts of ``dataset``, or as a part ``within`` another: it would lose its shares."""
    for leaf in leaves(dataset):
        if (within is not None or leaf is not dataset) and callable(getattr(leaf, "sampling", None)):
            outer = within or type(dataset).__name__
            inner = type(leaf).__name__
            raise ConfigError(
                f"a {inner} within a {outer} would lose its shares",
                why=f"a {outer} takes samples by number, and a {inner} decides which come, and when",
                fix=f"make a {outer} of each part, and the {inner} of those",
            )


def resolve_sampling(dataset: Any, weights: Weights, config: DataConfig) -> Sampling | None:
    """Resolve the choice of samples; ``None``: each of them once an epoch.

    Raises:
        ConfigError: settings without the weights that they need. DataError: unusable weights or labels.
    """
    name = config.sampling
    unlabelled = 0
    whole = natural(dataset)
    if callable(getattr(dataset, "sampling", None)) and (weights is not None or name not in ("auto", "uniform")):
        raise ConfigError(
            f"a {type(dataset).__name__} cannot be weighted by sample",
            why="it decides itself which samples come, and when",
            fix="leave out data.sampling and Datasets(weights=…); a Mixture takes shares",
        )
    if name == "weighted" and weights is None:
        raise ConfigError(
            "data.sampling is weighted, but the task gives no weights",
            why="a weighted order needs one number for each training sample",
            fix="return Datasets(train=…, weights=…), or set data.sampling=balanced for weights from labels",
        )
    if name == "balanced":
        labels = labels_of(dataset, config.label_column)
        weights = balanced_weights(labels)
        unlabelled = int(np.count_nonzero(labels == NO_LABEL))
    if weights is None or name == "uniform":
        return whole
    samples = len(dataset)
    positions = None
    replacement = config.replacement
    if isinstance(weights, WeightedRandomSampler):
        positions = weights.num_samples
        replacement = bool(weights.replacement) if replacement is None else replacement
        weights = weights.weights
    replacement = replacement is not False
    kind = ("balanced by class" if name == "balanced" else "weighted") + (" by epoch" if callable(weights) else "")
    kind += f", without {many(unlabelled, 'sample')} of label {NO_LABEL}" if unlabelled else ""
    kind += ", with replacement" if replacement else ", without replacement"
    if not callable(weights):
        weights = check_weights(weights, samples)
    # Not a closure: loader workers that are not forks get the order by pickle.
    by_epoch = partial(_weights_of, weights, samples)
    first = by_epoch(0)
    drawable = int(np.count_nonzero(first))
    positions = (samples if replacement else drawable) if positions is None else positions
    digest = hashlib.sha256(str(replacement).encode() + first.tobytes()).hexdigest()[:16]
    facts = SamplingFacts(
        kind=kind, digest=digest, positions=positions, most=None if callable(weights) or replacement else drawable
    )
    return _Sampling(facts, partial(WeightedOrder, by_epoch, replacement=replacement))


def _weights_of(weights: Floats | Curriculum, samples: int, epoch: int) -> Floats:
    return check_weights(weights(epoch), samples, f" of epoch {epoch}") if callable(weights) else weights


def check_weights(values: Any, samples: int, epoch_text: str = "") -> Floats:
    """Convert weights to an array, one for each sample. Raises :class:`DataError`: they cannot be weights."""
    fix = "give one finite number from 0 for each training sample, and not only zeros"
    try:
        if isinstance(values, Tensor):  # NumPy has no bfloat16
            values = values.detach().cpu()
            values = values.double() if values.is_floating_point() else values
        weights = np.asarray(values)
        if weights.dtype.kind == "c":
            raise DataError(f"the weights{epoch_text} are complex numbers", fix=fix)
        weights = weights.astype(np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"the weights{epoch_text} are not numbers", why=str(error), fix=fix) from None
    if weights.shape != (samples,):
        raise DataError(f"weights{epoch_text} of shape {weights.shape} do not fit {samples} samples", fix=fix)
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if wrong.size:
        raise DataError(f"the weight of sample {wrong[0]}{epoch_text} is {weights[wrong[0]]:g}", fix=fix)
    if not weights.any() or not np.isfinite(weights.sum()):
        raise DataError(
            f"the sum of all weights{epoch_text} is {weights.sum():g}", why="no sample can be drawn", fix=fix
        )
    return weights


def balanced_weights(labels: NDArray[Any]) -> Floats:
    """Return weights with which every class is drawn equally often; samples without a label (-100) are left out."""
    _, class_number, counts = np.unique(labels, return_inverse=True, return_counts=True)
    weights: Floats = np.where(labels == NO_LABEL, 0.0, 1.0 / counts[class_number])
    return weights


def labels_of(dataset: Any, column: str | None = None) -> NDArray[Any]:
    """Return the label of each sample: its ``column``, a text or a whole number.

    Without ``column``: the data set's ``targets`` or ``labels``, its last tensor, or a column ``label``.
    """
    if type(dataset) is Subset:
        whole = labels_of(dataset.dataset, column)
        labels: NDArray[Any] = whole[np.asarray(dataset.indices)]
        return labels
    if type(dataset) is ConcatDataset:
        return np.concatenate([labels_of(part, column) for part in dataset.datasets])
    values = _attribute_labels(dataset) if column is None else _column_of(dataset, column)
    labels = np.asarray(values) if values is not None else np.empty(())
    if labels.shape != (len(dataset),) or labels.dtype.kind == "f":
        raise ConfigError(
            f"the labels of {type(dataset).__name__} are not known",
            why="data.sampling is balanced, which needs one label for each training sample",
            fix="name their column (data.label_column), give the data set an attribute `targets` with them, or return "
            "Datasets(weights=…)",
        )
    return labels


def _attribute_labels(dataset: Any) -> Any:
    labels = next((getattr(dataset, name) for name in LABELS if hasattr(dataset, name)), None)
    if labels is None and is_hugging_face(dataset):
        labels = next((_column_of(dataset, name) for name in LABELS if name in dataset.features), None)
    if labels is None and hasattr(dataset, "tensors"):
        labels = dataset.tensors[-1]
    return labels


def _column_of(dataset: Any, name: str) -> Any:
    """Return the values of a column, or of a key of each sample; ``None``: there is none of this name."""
    if isinstance(dataset, FrameRows):
        return dataset.columns.get(name)
    if is_hugging_face(dataset):
        return dataset.with_format("numpy")[name][:] if name in dataset.features else None
    try:
        return [dataset[index][name] for index in range(len(dataset))]
    except (KeyError, IndexError, TypeError, ValueError):
        return None


def select(dataset: Any, keep: Callable[[Any], bool]) -> Any:
    """Return the samples of ``dataset`` for which ``keep(sample)`` is true, a ``Subset``, reading each once."""
    return Subset(dataset, [index for index in range(len(dataset)) if keep(dataset[index])])
