"""From the indices of a batch to the batch: one gather, or samples one by one, with draws of their own."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.data.draws import batch_words, generators, sample_words
from lockstep.data.randomness import sample_rng
from lockstep.data.rows import gather_of, is_hugging_face, leaf_of, leaves
from lockstep.errors import LockstepError, SampleError

Indices = NDArray[np.int64]
Collate = Callable[[Sequence[Any]], Any]
#: Generators by their place in :func:`lockstep.data.draws.generators`.
Places = frozenset[int]

_ALL: Places = frozenset({0, 1, 2})


class Reader:
    """Reads batches of ``dataset``.

    What a sample draws from the global generators of Python, NumPy and torch is keyed by (seed, epoch, index), what
    ``collate`` draws by (seed, epoch, first position); afterwards the generators are as they were. The first batch
    shows which of them are drawn from, and only those are seeded from then on. Should another one be drawn from later,
    which a comparison of states around each batch shows, that batch is read again, seeded.

    A data set's ``sample(index, rng)`` is found behind ``Subset`` and ``ConcatDataset``, too: ``index`` is that of the
    inner data set, ``rng`` is keyed by that of the outer one. A ``__getitems__`` that returns a finished batch, not a
    list of samples, draws as ``collate`` does.
    """

    def __init__(self, dataset: Any, collate: Collate, seed: int) -> None:
        self._dataset, self._collate, self._seed = dataset, collate, seed
        self._gather = gather_of(dataset, collate)
        self._has_sample = any(hasattr(leaf, "sample") for leaf in leaves(dataset))
        self._has_items = not self._has_sample and callable(getattr(dataset, "__getitems__", None))
        self._gives_list: bool | None = None  # what __getitems__ returns; not known yet
        self._drawn: tuple[Places, Places] | None = None  # from which samples draw, and batches

    @property
    def gathers(self) -> bool:
        """Whether batches are rows of tensors."""
        return self._gather is not None

    @property
    def gathers_tensors(self) -> bool:
        """Whether those tensors lie ready: a thread may read them beside the step, and beside validation."""
        return self._gather is not None and not is_hugging_face(self._dataset)

    @property
    def gives_whole_batches(self) -> bool:
        """Whether a batch is one gather from memory. May read a sample."""
        if self._gather is None and self._has_items and self._gives_list is None:
            self._item(0, 0)
        return self.gathers_tensors or self._gives_list is False

    def batch(self, epoch: int, indices: Indices, position: int) -> Any:
        """The samples ``indices`` as a batch, which begins at ``position`` of ``epoch``.

        Raises:
            SampleError: the data set failed, or ``collate``.
        """
        if self._gather is not None:
            try:
                return self._gather(indices)
            except Exception:  # one by one, they show which of them it is
                self._gather = None
        samples, batches = self._drawn or (_ALL, _ALL)
        if samples or batches:
            return self._seeded(epoch, indices, position, samples, batches, notes=self._drawn is None)
        every = generators()
        before = [generator.mark() for generator in every]
        batch = self._collated(self._samples(epoch, indices), indices)
        if [generator.mark() for generator in every] == before:
            return batch
        for generator, mark in zip(every, before, strict=True):
            generator.reset(mark)
        return self._seeded(epoch, indices, position, _ALL, _ALL, notes=True)

    def _seeded(
        self, epoch: int, indices: Indices, position: int, samples: Places, batches: Places, *, notes: bool
    ) -> Any:
        """The batch with ``samples`` seeded before each sample, and ``batches`` too before it is collated.

        ``notes``: remember from which of them was drawn.
        """
        every, both = generators(), samples | batches
        # Those that nothing is seeded for must not be drawn from: by samples, and by the batch.
        unsown = [every[place] for place in _ALL - samples], [every[place] for place in _ALL - both]
        by_samples: set[int] = set()
        kept = [(every[place], every[place].enter()) for place in both]
        try:
            marks = [generator.mark() for generator in unsown[0]]
            outside = [(generator, generator.mark()) for generator in unsown[1]]
            items = self._samples(epoch, indices, samples, by_samples if notes else None)
            missed = [generator.mark() for generator in unsown[0]] != marks
            words = batch_words(self._seed, epoch, position)
            for place in both:
                every[place].seed(words[place])
            sown = [(place, every[place].mark()) for place in both] if notes else []
            batch = self._collated(items, indices)
            missed = missed or any(generator.mark() != mark for generator, mark in outside)
            if notes:
                by_batch = {place for place, mark in sown if every[place].mark() != mark}
        finally:
            for generator, state in kept:
                generator.leave(state)
        if notes:
            known = self._drawn or (frozenset(), frozenset())
            self._drawn = known[0] | by_samples, known[1] | by_batch
        elif missed:
            for generator, mark in outside:
                generator.reset(mark)
            return self._seeded(epoch, indices, position, _ALL, _ALL, notes=True)
        return batch

    def _samples(
        self, epoch: int, indices: Indices, seeded: Places = frozenset(), drawn: set[int] | None = None
    ) -> list[Any] | None:
        """The samples, each after ``seeded`` have been seeded for it; ``None``: they are read as a whole.

        ``drawn``: gets those that were drawn from.
        """
        numbers: list[int] = indices.tolist()
        if self._gives_list is False:
            return None
        if self._gives_list and not seeded:
            try:
                return list(self._dataset.__getitems__(numbers))
            except Exception:
                pass
        items: list[Any] = []
        words = sample_words(self._seed, epoch, indices) if seeded else []
        pairs = [(place, generators()[place]) for place in seeded]
        for number, index in enumerate(numbers):
            for place, generator in pairs:
                generator.seed(words[number][place])
            sown = [generator.mark() for _, generator in pairs] if drawn is not None else []
            try:
                items.append(self._item(epoch, index))
            except LockstepError:
                raise
            except Exception as error:
                raise sample_error(self._dataset, index, error) from error
            if drawn is not None:
                after = zip(pairs, sown, strict=True)
                drawn.update(place for (place, generator), mark in after if generator.mark() != mark)
            if self._has_items and not self._gives_list:  # as has just been seen
                return None
        return items

    def _item(self, epoch: int, index: int) -> Any:
        if self._has_sample:
            leaf, at = leaf_of(self._dataset, index)
            if hasattr(leaf, "sample"):
                return leaf.sample(at, sample_rng(self._seed, epoch, index))
            return leaf[at]
        if not self._has_items:
            return self._dataset[index]
        found = self._dataset.__getitems__([index])
        if self._gives_list is None:
            self._gives_list = isinstance(found, list)
        return found[0] if self._gives_list else None

    def _collated(self, items: list[Any] | None, indices: Indices) -> Any:
        try:
            return self._dataset.__getitems__(indices) if items is None else self._collate(items)
        except LockstepError:
            raise
        except Exception as error:
            few = ", ".join(map(str, indices[:8].tolist())) + (", …" if len(indices) > 8 else "")
            what = f"samples {few} of {type(self._dataset).__name__} could not be made into a batch"
            fix = "make their shapes and types equal in the data set, or write Task.collate"
            raise SampleError(what, why=_told(error), fix=fix if items is not None else _FIX) from error


def sample_error(dataset: Any, index: int, error: Exception) -> SampleError:
    """What to raise from ``error``, which ``dataset`` raised for sample ``index``."""
    name = type(dataset).__name__
    try:
        leaf, at = leaf_of(dataset, index)
    except Exception:  # its own indices may be what is wrong
        leaf, at = dataset, index
    if leaf is not dataset:
        name += f" (sample {at} of {type(leaf).__name__})"
    return SampleError(f"sample {index} of {name} could not be read", why=_told(error), fix=_FIX)


_FIX = "fix the data set, or leave the sample out"


def _told(error: Exception) -> str:
    """The error, and the line of the user's that raised it."""
    where = traceback.extract_tb(error.__traceback__)
    place = f" ({where[-1].filename}:{where[-1].lineno}, in {where[-1].name})" if len(where) > 1 else ""
    text = str(error)
    return f"{type(error).__name__}{': ' if text else ''}{text}{place}"
