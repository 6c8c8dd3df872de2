"""Mixtures of data sets: how often each is seen is exact to within one sample, from the first step on.

Position p takes its part from a table of one period, scheduled by earliest deadline: the j-th sample of a part with
share w may come after position (j-1)/w and must come by ⌈j/w⌉. That always succeeds (Baruah, Cohen, Plaxton and Varvel,
"Proportionate progress", Algorithmica 15, 1996), so after every p samples each part has had pw ± 1 of them.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from math import lcm
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, bfloat16
from torch.utils.data import ConcatDataset

from lockstep.arithmetic import ceil_div
from lockstep.data.arrays import by_row
from lockstep.data.order import BlockOrder, derive_key
from lockstep.data.sampling import Cycled, SampleOrder, natural
from lockstep.errors import DataError
from lockstep.planning.batch import SamplingFacts

Indices = NDArray[np.int64]
Shares = Mapping[str, float]
#: The longest period of the table: shares are fractions with this common denominator, at most.
PERIOD = 65_536


class Stage(NamedTuple):
    """From position ``start`` of the run on, by place of a period: its part, and that part's samples before it.

    ``each``: samples of each part in a period. ``drawn``: samples of each part before the stage.
    """

    start: int
    parts: Indices
    before: Indices
    each: Indices
    drawn: Indices

    def counts(self, positions: int) -> Indices:
        """Return samples of each part among the first ``positions`` of the stage."""
        rounds, rest = divmod(positions, len(self.parts))
        counts: Indices = rounds * self.each + np.bincount(self.parts[:rest], minlength=len(self.each))
        return counts


class Mixture(ConcatDataset[Any]):
    """Several training sets, mixed by shares; the epochs of each part are shuffled separately.

    Example::

        Datasets(train=Mixture({"web": web, "books": books}, {"web": 0.7, "books": 0.3}))

    Args:
        parts: map-style data sets by name, each of one kind of samples.
        shares: how often each is seen; they are divided by their sum. A share of 0 leaves a part out.
        stages: other shares from a number of samples on, counted from the start of the run: ``{1_000_000: {…}}``. In
            samples, since the order of a run does not depend on its batch size.

    An epoch has as many samples as all parts together, unless ``data.epoch_samples`` says otherwise.

    Raises:
        DataError: an empty part, or shares that are not those of the parts, negative, all 0, or too small for a period.
    """

    def __init__(self, parts: Mapping[str, Any], shares: Shares, stages: Mapping[int, Shares] | None = None) -> None:
        if not parts:
            fix = 'Mixture({"a": first, "b": second}, {"a": 0.7, "b": 0.3})'
            raise DataError("a mixture names no data set", fix=fix)
        parts = {name: by_row(part) for name, part in parts.items()}
        for name, part in parts.items():
            if not hasattr(part, "__len__") or not hasattr(part, "__getitem__") or len(part) == 0:
                raise DataError(
                    f"the part {name!r} of a mixture is empty, or has no length or no items",
                    fix="give a map-style data set, or leave it out",
                )
        super().__init__(parts.values())
        self.names = tuple(parts)
        #: The exact shares of each stage, by its first position.
        self.stages = {0: _fractions(shares, self.names)}
        for start, later in sorted((stages or {}).items()):
            if start <= 0 or start % 1:
                raise DataError(
                    f"a stage of a mixture begins at {start!r}", fix="give the samples before it, a whole number from 1"
                )
            self.stages[int(start)] = _fractions(later, self.names)

    @property
    def joined(self) -> ConcatDataset[Any]:
        """The parts, one after the other."""
        return ConcatDataset([getattr(part, "joined", part) for part in self.datasets])

    def sampling(self) -> Mixture:
        for part in self.datasets:
            natural(part)  # refuses a mixture within, say, a Subset
        return self

    @cached_property
    def facts(self) -> SamplingFacts:
        shown = []
        for start, shares in self.stages.items():
            each = (f"{name} {float(share):.4g}" for name, share in zip(self.names, shares, strict=True))
            shown.append((f"from sample {start:,}: " if start else "") + ", ".join(each))
        text = repr((self.names, np.diff([0, *self.cumulative_sizes]).tolist(), self.stages))
        text += "".join(natural(part).facts.digest for part in self.datasets)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return SamplingFacts(kind=f"mixture of {'; '.join(shown)}", digest=digest, positions=len(self))

    def order(self, positions: int, seed: int) -> SampleOrder:
        return MixtureOrder(self, positions, seed)


class MixtureOrder(BlockOrder):
    """The order of a mixture: indices count through all parts."""

    repeats = True

    def __init__(self, mixture: Mixture, samples: int, seed: int) -> None:
        self.samples = samples
        self.seed = seed
        self._offsets = [0, *mixture.cumulative_sizes]
        self._parts = [
            Cycled(natural(part).order(size, derive_key("part", seed, part_number)), size)
            for part_number, (part, size) in enumerate(
                zip(mixture.datasets, np.diff(self._offsets).tolist(), strict=True)
            )
        ]
        self._stages: list[Stage] = []
        drawn = np.zeros(len(self._parts), np.int64)
        for start, shares in mixture.stages.items():
            if self._stages:
                drawn = drawn + self._stages[-1].counts(start - self._stages[-1].start)
            self._stages.append(Stage(start, *_period(shares), drawn))

    def _compute(self, epoch: int, start: int, stop: int) -> Indices:
        first = epoch * self.samples + start
        last = epoch * self.samples + stop
        indices = np.empty(stop - start, np.int64)
        ends = [stage.start for stage in self._stages[1:]] + [last]
        for stage, end in zip(self._stages, ends, strict=True):
            low = max(first, stage.start)
            high = min(last, end)
            if low < high:
                indices[low - first : high - first] = self._of(stage, low - stage.start, high - stage.start)
        return indices

    def _of(self, stage: Stage, start: int, stop: int) -> Indices:
        rounds, places = np.divmod(np.arange(start, stop), len(stage.parts))
        parts = stage.parts[places]
        number = stage.drawn[parts] + rounds * stage.each[parts] + stage.before[places]
        indices = np.empty(stop - start, np.int64)
        for part in np.unique(parts).tolist():
            rows_of_part = np.flatnonzero(parts == part)
            first = int(number[rows_of_part[0]])
            indices[rows_of_part] = self._offsets[part] + self._parts[part].run(first, first + len(rows_of_part))
        return indices


def _fractions(shares: Shares, names: tuple[str, ...]) -> tuple[Fraction, ...]:
    """Return the shares in the order of ``names``, exact, with a common denominator of at most :data:`PERIOD`."""
    if set(shares) != set(names):
        raise DataError(
            f"the shares of a mixture are those of {', '.join(shares) or 'nothing'}",
            why=f"its parts are {', '.join(names)}",
            fix="give each part one share, and no other",
        )
    numbers = {name: _number(name, share) for name, share in shares.items()}
    total = sum(numbers.values())
    if not total:
        raise DataError("all shares of a mixture are 0", why="nothing can be drawn", fix="give one of them more")
    exact = [numbers[name] / total for name in names]
    if lcm(*(share.denominator for share in exact)) <= PERIOD:
        return tuple(exact)
    for name, share in zip(names, exact, strict=True):
        if 0 < share * PERIOD < 1:
            raise DataError(
                f"the share of {name!r} in a mixture is {float(share):.3g}",
                why=f"the smallest that is not rounded to nothing is 1 of {PERIOD:,} samples",
                fix="give it at least that, or 0, which leaves it out",
            )
    # The largest remainders are rounded up, so that the sum stays 1.
    counts = [int(share * PERIOD) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda part: counts[part] - exact[part] * PERIOD)
    for part in by_remainder[: PERIOD - sum(counts)]:
        counts[part] += 1
    return tuple(Fraction(count, PERIOD) for count in counts)


def _number(name: str, share: Any) -> Fraction:
    """Convert a share by its decimal digits: 0.1 is a tenth, in any type of number."""
    if isinstance(share, Tensor) and share.dim() == 0:
        share = (share.float() if share.dtype == bfloat16 else share).detach().cpu().numpy()
    if isinstance(share, np.ndarray) and share.ndim == 0:
        share = share[()]
    if not isinstance(share, Real | Decimal) or not 0 <= float(share) < float("inf"):
        raise DataError(f"the share of {name!r} in a mixture is {share!r}", fix="give a finite number from 0")
    return Fraction(str(+share))


def _period(shares: tuple[Fraction, ...]) -> tuple[Indices, Indices, Indices]:
    length = lcm(*(share.denominator for share in shares))
    each = [int(share * length) for share in shares]
    parts = np.empty(length, np.int64)
    before = np.empty(length, np.int64)
    drawn = [0] * len(shares)
    waiting = [(0, part) for part, count in enumerate(each) if count]  # by release
    heapq.heapify(waiting)
    ready: list[tuple[int, int]] = []  # by deadline
    for position in range(length):
        while waiting and waiting[0][0] <= position:
            part = heapq.heappop(waiting)[1]
            heapq.heappush(ready, (ceil_div((drawn[part] + 1) * length, each[part]), part))
        part = heapq.heappop(ready)[1]
        parts[position] = part
        before[position] = drawn[part]
        drawn[part] += 1
        heapq.heappush(waiting, (drawn[part] * length // each[part], part))
    return parts, before, np.array(each)
