"""Which samples an epoch has, where that is not each of them once: weights, balanced classes, epochs of any length.

All are functions of (seed, epoch, position), as :mod:`lockstep.data.order` is, so any number of ranks sees the same
samples, and a resume costs nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, WeightedRandomSampler

from lockstep.config.sections import DataConfig
from lockstep.data.arrays import LABELS, is_hugging_face, leaves
from lockstep.data.order import BlockOrder, Order, check_slice, derive_key, mixed, words_of
from lockstep.errors import ConfigError, DataError
from lockstep.planning.order import SamplingFacts

Indices = NDArray[np.int64]
Floats = NDArray[np.float64]
#: Weights that follow from the epoch, from 0: a curriculum.
Curriculum = Callable[[int], Any]
#: One number for each training sample, or what gives them.
Weights = Curriculum | WeightedRandomSampler | Any


class SampleOrder(Protocol):
    """Which sample is at each position of an epoch of ``samples`` positions.

    ``repeats``: one sample may be at several positions, and then draws other random numbers at each.
    """

    @property
    def samples(self) -> int: ...

    @property
    def seed(self) -> int: ...

    @property
    def repeats(self) -> bool: ...

    def slice(self, epoch: int, start: int, stop: int) -> Indices: ...


class Sampling(Protocol):
    """How samples are chosen; the plan has ``facts``."""

    @property
    def facts(self) -> SamplingFacts: ...

    def order(self, positions: int, seed: int) -> SampleOrder: ...


class WindowOrder(BlockOrder):
    """Each sample once an epoch, shuffled so that only a bounded part of a large data set is read at a time.

    The data set consists of ``chunks`` of neighbouring samples. Their order is shuffled; ``window`` chunks after one
    another make a window, whose samples are shuffled together. Nothing depends on ranks.
    """

    repeats = False

    def __init__(self, chunks: Indices, window: int, seed: int) -> None:
        self.samples, self.seed = int(chunks.sum()), seed
        self._sizes, self._first = chunks, np.cumsum(chunks) - chunks
        self._window, self._epoch, self._order = window, -1, np.empty(0, np.int64)
        self._ends = np.empty(0, np.int64)

    def _compute(self, epoch: int, start: int, stop: int) -> Indices:
        if epoch != self._epoch:
            self._order = Order(len(self._sizes), derive_key("chunks", self.seed)).slice(epoch, 0, len(self._sizes))
            self._ends, self._epoch = np.cumsum(self._sizes[self._order]), epoch
        pieces = []
        while start < stop:
            first = int(np.searchsorted(self._ends, start, side="right")) // self._window * self._window
            last = min(first + self._window, len(self._order))
            low, high = int(self._ends[first - 1]) if first else 0, int(self._ends[last - 1])
            inner = Order(high - low, derive_key("window", self.seed, first))
            places = inner.slice(epoch, start - low, min(stop, high) - low) + low
            turn = np.searchsorted(self._ends, places, side="right")
            chunk = self._order[turn]
            pieces.append(self._first[chunk] + places - (self._ends[turn] - self._sizes[chunk]))
            start = high
        return np.concatenate(pieces)


class Cycled:
    """Epochs of any length: each sample of the data set once, in a new order, before any is seen again.

    Args:
        order: of the whole data set.
    """

    repeats = True

    def __init__(self, order: SampleOrder, samples: int) -> None:
        self.samples, self.seed, self._order = samples, order.seed, order

    def slice(self, epoch: int, start: int, stop: int) -> Indices:
        check_slice(self.samples, epoch, start, stop)
        return self.run(epoch * self.samples + start, epoch * self.samples + stop)

    def run(self, start: int, stop: int) -> Indices:
        """Samples at positions counted from the start of the run."""
        pieces, whole = [], self._order.samples
        while start < stop:
            epoch, first = divmod(start, whole)
            last = min(whole, first + stop - start)
            pieces.append(self._order.slice(epoch, first, last))
            start += last - first
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


class WeightedOrder(BlockOrder):
    """Samples drawn with probabilities in proportion to their weights.

    With replacement, position p takes the sample at which the sum of the weights first exceeds a hash of p: O(log n).
    Without, an epoch is sorted by log(u)/w, with u a hash of the sample (Efraimidis and Spirakis, "Weighted random
    sampling with a reservoir", Information Processing Letters 97, 2006). 8 to 16 bytes a sample are kept.

    Args:
        weights: those of an epoch: shape [samples of the data set].
    """

    def __init__(self, weights: Callable[[int], Floats], samples: int, seed: int, *, replacement: bool) -> None:
        self.samples, self.seed, self.repeats = samples, seed, replacement
        self._weights = weights
        self._epoch = -1
        self._known: NDArray[Any] = np.empty(0)

    def _compute(self, epoch: int, start: int, stop: int) -> Indices:
        known = self._of(epoch)
        if not self.repeats:
            return cast(Indices, known[start:stop].astype(np.int64))
        places = np.arange(start, stop, dtype=np.uint64)
        drawn = uniform(places, derive_key("weighted", self.seed, epoch)) * known[-1]
        # Rounding could reach the sum itself, after which there is no sample.
        last = np.searchsorted(known, known[-1], side="left")
        found: Indices = np.minimum(np.searchsorted(known, drawn, side="right"), last)
        return found

    def _of(self, epoch: int) -> NDArray[Any]:
        if self._epoch != epoch:
            weights = self._weights(epoch)
            if self.repeats:
                self._known = np.cumsum(weights)
            else:
                key = derive_key("without", self.seed, epoch)
                times = np.full(len(weights), np.inf)
                places = np.flatnonzero(weights)
                if len(places) < self.samples:
                    raise _too_few(len(places), self.samples, epoch)
                times[places] = -logarithm(uniform(places.astype(np.uint64), key)) / weights[places]
                self._known = np.argsort(times, kind="stable")
            self._epoch = epoch
        return self._known


def uniform(places: NDArray[np.uint64], key: int) -> Floats:
    """A hash of each place, as a number in (0, 1) with 53 bits."""
    return ((mixed(words_of(places, key)) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def logarithm(values: Floats) -> Floats:
    """The natural logarithm by operations that round alike on every machine, which ``np.log`` does not."""
    mantissa, exponent = np.frexp(values)
    z = (mantissa - 1) / (mantissa + 1)
    square, total = z * z, np.zeros_like(z)
    for power in range(33, 0, -2):  # 2 artanh(z), |z| ≤ 1/3
        total = total * square + 1 / power
    return cast(Floats, exponent * 0.6931471805599453 + 2 * z * total)


class Uniform:
    """Every sample as often as any other."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        kind, digest, window = "shuffled", "", getattr(dataset, "shuffle_window", None)
        if window is not None:
            kind = f"shuffled within windows of {window} of {len(dataset.chunks)} row groups"
            digest = hashlib.sha256(np.append(dataset.chunks, window).tobytes()).hexdigest()[:16]
        self.facts = SamplingFacts(kind=kind, digest=digest, positions=len(dataset))

    def order(self, positions: int, seed: int) -> SampleOrder:
        data, samples = self._dataset, len(self._dataset)
        window = getattr(data, "shuffle_window", None)
        whole = Order(samples, seed) if window is None else WindowOrder(data.chunks, window, seed)
        return whole if positions == samples else Cycled(whole, positions)


def natural(dataset: Any) -> Sampling:
    """A data set's own sampling (a mixture's, a stream's), or else each sample once an epoch.

    Raises:
        ConfigError: a mixture within it would lose its shares.
    """
    check_shares(dataset)
    own = getattr(dataset, "sampling", None)
    return cast(Sampling, own()) if callable(own) else Uniform(dataset)


def check_shares(dataset: Any, within: str | None = None) -> None:
    """Refuse a mixture among the parts of ``dataset``, or ``dataset`` itself ``within`` what takes it by number.

    Raises:
        ConfigError: there is one, which would lose its shares.
    """
    for leaf in leaves(dataset):
        if (within is not None or leaf is not dataset) and callable(getattr(leaf, "sampling", None)):
            outer, inner = within or type(dataset).__name__, type(leaf).__name__
            raise ConfigError(
                f"a {inner} within a {outer} would lose its shares",
                why=f"a {outer} takes samples by number, and a {inner} decides which come, and when",
                fix=f"make a {outer} of each part, and the {inner} of those",
            )


@dataclass(frozen=True)
class Weighted:
    """By weights: see :class:`WeightedOrder`."""

    weights: Callable[[int], Floats]
    replacement: bool
    facts: SamplingFacts

    def order(self, positions: int, seed: int) -> SampleOrder:
        return WeightedOrder(self.weights, positions, seed, replacement=self.replacement)


def resolve_sampling(dataset: Any, weights: Weights, config: DataConfig) -> Sampling | None:
    """How the samples of ``dataset`` are chosen; ``None``: each of them once an epoch.

    Raises:
        ConfigError: settings that lack what they need. DataError: weights or labels that cannot be used.
    """
    given, name = weights, config.sampling
    whole = natural(dataset)
    if not isinstance(whole, Uniform):  # a mixture, or a stream
        if weights is not None or name not in ("auto", "uniform"):
            raise ConfigError(
                f"a {type(dataset).__name__} cannot be weighted by sample",
                why="it decides itself which samples come, and when",
                fix="leave out data.sampling and Datasets(weights=…); a Mixture takes shares",
            )
        return whole
    if name == "uniform":
        return whole
    if name == "weighted" and weights is None:
        raise ConfigError(
            "data.sampling is weighted, but the task gives no weights",
            why="a weighted order needs one number for each training sample",
            fix="return Datasets(train=…, weights=…), or set data.sampling=balanced for weights from labels",
        )
    if name == "balanced":
        given = balanced_weights(labels_of(dataset))
    if given is None:
        return whole
    positions, replacement = None, config.replacement
    if isinstance(given, WeightedRandomSampler):
        positions = given.num_samples
        replacement = bool(given.replacement) if replacement is None else replacement
        given = given.weights
    replacement = replacement is not False
    return _weighted(given, len(dataset), positions, replacement, "balanced by class" if name == "balanced" else "")


def _weighted(given: Weights, samples: int, positions: int | None, replacement: bool, kind: str) -> Weighted:
    digest = hashlib.sha256(str(replacement).encode())
    weights: Callable[[int], Floats]
    if callable(given):
        weights = partial(_of_curriculum, given, samples)
        kind, most = kind or "weighted by epoch", None
    else:
        fixed = check_weights(given, samples)
        weights = partial(_of_every_epoch, fixed)
        kind, most = kind or "weighted", None if replacement else int(np.count_nonzero(fixed))
    digest.update(weights(0).tobytes())
    if positions is None:
        positions = samples if replacement else int(np.count_nonzero(weights(0)))
    kind += ", with replacement" if replacement else ", without replacement"
    return Weighted(
        weights, replacement, SamplingFacts(kind=kind, digest=digest.hexdigest()[:16], positions=positions, most=most)
    )


# Not closures: loader workers that are not forks get the order by pickle.
def _of_curriculum(curriculum: Callable[[int], Any], samples: int, epoch: int) -> Floats:
    return check_weights(curriculum(epoch), samples, f" of epoch {epoch}")


def _of_every_epoch(weights: Floats, epoch: int) -> Floats:
    return weights


def check_weights(given: Any, samples: int, where: str = "") -> Floats:
    """One weight for each sample, as an array.

    Raises:
        DataError: another number of them; one that is negative or not finite; or all are 0.
    """
    try:
        weights = np.asarray(given.detach().cpu() if isinstance(given, Tensor) else given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"the weights{where} are not numbers", why=str(error), fix=_FIX) from None
    if weights.shape != (samples,):
        what = f"weights{where} of shape {weights.shape} do not fit {samples} samples"
        raise DataError(what, why="each training sample needs one weight", fix=_FIX)
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if wrong.size:
        what = f"the weight of sample {wrong[0]}{where} is {weights[wrong[0]]:g}"
        raise DataError(what, why="a weight is a finite number from 0", fix=_FIX)
    if not weights.any() or not np.isfinite(weights.sum()):
        raise DataError(f"the sum of all weights{where} is {weights.sum():g}", why="no sample can be drawn", fix=_FIX)
    return weights


_FIX = "give one finite number from 0 for each training sample, and not only zeros"


def _too_few(found: int, asked: int, epoch: int) -> DataError:
    return DataError(
        f"an epoch of {asked} samples cannot be drawn without replacement in epoch {epoch}",
        why=f"{found} samples have a weight above 0",
        fix="set data.replacement=true, or data.epoch_samples to at most that number",
    )


def balanced_weights(labels: NDArray[Any]) -> Floats:
    """Weights with which every class is drawn equally often."""
    _, place, counts = np.unique(labels, return_inverse=True, return_counts=True)
    return 1.0 / counts[place]


def labels_of(dataset: Any) -> NDArray[Any]:
    """The label of each sample, from the data set's ``targets`` or ``labels``, its last tensor, or a column ``label``.

    Raises:
        ConfigError: there is none of these.
    """
    if type(dataset) is Subset:
        labels: NDArray[Any] = labels_of(dataset.dataset)[np.asarray(dataset.indices)]
        return labels
    if type(dataset) is ConcatDataset:
        return np.concatenate([labels_of(part) for part in dataset.datasets])
    found: Any = next((getattr(dataset, name) for name in LABELS if hasattr(dataset, name)), None)
    if found is None and is_hugging_face(dataset):
        found = next((dataset.with_format("numpy")[name] for name in LABELS if name in dataset.features), None)
        found = None if found is None else found[:]
    if found is None and hasattr(dataset, "tensors"):
        found = dataset.tensors[-1]
    labels = np.asarray(found) if found is not None else np.empty(())
    if labels.shape != (len(dataset),) or labels.dtype.kind == "f":
        raise ConfigError(
            f"the labels of {type(dataset).__name__} are not known",
            why="data.sampling is balanced, which needs one label for each training sample",
            fix="give the data set an attribute `targets` with them, or return Datasets(weights=…)",
        )
    return labels


def select(dataset: Any, keep: Callable[[Any], bool]) -> Any:
    """The samples of ``dataset`` for which ``keep(sample)`` is true, as a ``Subset``: each is read once for that."""
    return Subset(dataset, [index for index in range(len(dataset)) if keep(dataset[index])])
