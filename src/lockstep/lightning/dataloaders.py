"""A user's DataLoaders, with Lockstep's order: which rank takes which samples of each batch. Nothing is padded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import count, islice
from math import ceil
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from lockstep._compat.torch import tree_map
from lockstep.config import DataConfig
from lockstep.data.handing import HandingCollate, received
from lockstep.data.loader import loader_processes
from lockstep.data.order import Order, WorkerInit, derive_key
from lockstep.data.requests import InOrder
from lockstep.data.sampling import SampleOrder, resolve_sampling
from lockstep.engine.generators import seeded
from lockstep.engine.state import TrainState
from lockstep.engine.task import Datasets
from lockstep.engine.training_data import check_dataset
from lockstep.errors import ConfigError, DataError, UnsupportedError, many
from lockstep.hardware.world import World
from lockstep.lightning.module_plan import LoaderFacts
from lockstep.planning.batch import BatchPlan, Span, parts


class Step(NamedTuple):
    """One optimizer step: positions ``start`` to ``stop`` of the epoch, and this rank's micro-batches of them."""

    start: int
    stop: int
    micro_batches: tuple[Span, ...]


def epoch_steps(batch: BatchPlan, rank: int, position: int) -> Iterator[Step]:
    """Yield the remaining steps of an epoch; every rank has ``accumulate`` micro-batches in each."""
    while (span := batch.window(position)) is not None:
        start, position = span
        shares = parts(position - start, batch.ranks, batch.least_part)
        if min(stop - first for first, stop in shares) < batch.accumulate * batch.least_part:
            raise DataError(
                f"the last {many(position - start, 'sample')} of this epoch cannot be shared by "
                f"{many(batch.ranks, 'rank')}, each with {many(batch.accumulate, 'micro-batch')}",
                why="a module has to see them all in every step, and the run stopped just before these samples",
                fix="resume on as many devices as before, or on one, until the epoch is over",
            )
        first, stop = shares[rank]
        spans = parts(stop - first, batch.accumulate, batch.least_part)
        yield Step(start, position, tuple((start + first + a, start + first + b) for a, b in spans))


def used_batches(state: TrainState, batch: BatchPlan) -> int:
    """Count micro-batches of this epoch that earlier attempts have used."""
    return round(state.position / batch.global_batch) * batch.accumulate


class OrderedBatches:
    """Batch sampler of one rank: index lists in the order of the run, from where ``state`` stands.

    Its length is that of the whole epoch, of which a resumed run has done some already.
    """

    def __init__(self, batch: BatchPlan, order: SampleOrder, rank: int, state: TrainState) -> None:
        self._batch = batch
        self._order = order
        self._rank = rank
        self._state = state

    def __len__(self) -> int:
        left = self._batch.steps_left(self._state.position) * self._batch.accumulate
        return used_batches(self._state, self._batch) + left

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self._state.epoch
        steps = epoch_steps(self._batch, self._rank, self._state.position)
        return (self._order.slice(epoch, *span).tolist() for step in steps for span in step.micro_batches)


class KeptOrder:
    """A training loader that keeps its order, on one device: the batches of an epoch from the position of ``state``.

    A loader that has fewer batches is read again. A resumed epoch skips the batches that were used.
    """

    def __init__(self, loader: Any, batch: BatchPlan, seed: int, state: TrainState) -> None:
        self._loader = loader
        self._batch = batch
        self._seed = seed
        self._state = state

    def __len__(self) -> int:
        return self._batch.samples // self._batch.batch_size

    def __iter__(self) -> Iterator[Any]:
        return islice(self._batches(), self._state.position // self._batch.batch_size, len(self))

    def _batches(self) -> Iterator[Any]:
        for number in count():
            with seeded(derive_key("loader", self._seed, self._state.epoch, number)):  # samplers draw at their start
                batches = (batch for batch, _, _ in _combined(self._loader))
                first = next(batches, _NOTHING)
            if first is _NOTHING:
                raise DataError("the training loader gives no batch", fix="check what train_dataloader() returns")
            yield first
            yield from batches


_NOTHING = object()
#: Batches whose sizes are read where a batch sampler does not say its size.
_TRIED_BATCHES = 8


def _batch_size(loader: Any) -> int:
    batches = getattr(loader, "batch_sampler", None)
    size = getattr(loader, "batch_size", None) or getattr(batches, "batch_size", None)
    if size is None and batches is not None:
        with seeded(0):  # it may draw
            size = max(map(len, islice(batches, _TRIED_BATCHES)), default=1)
    return int(size or 1)


def _combined(loaders: Any) -> Any:
    """Return one loader, or several as the Trainer combines them."""
    from lightning.pytorch.utilities import CombinedLoader

    return loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")


class SharedBatches:
    """Batch sampler of one rank for evaluation: the batches of the loader in index order, whole, for ranks in turn.

    The last ranks may have one batch less. If they log values, fewer batches than ranks are cut into smaller ones,
    one for each rank, since a rank without a batch would leave the evaluation before the others.

    Args:
        may_cut: whether they log values.

    Attributes:
        rounds: how many batches every rank has; ``is_even``: and no rank has one more.
        is_cut: whether these are not the loader's batches.
    """

    def __init__(
        self, samples: int, batch_size: int, world: World, *, drop_last: bool = False, may_cut: bool = True
    ) -> None:
        if drop_last:
            samples -= samples % batch_size
        batches = [range(start, min(start + batch_size, samples)) for start in range(0, samples, batch_size)]
        self.is_cut = may_cut and len(batches) < world.size and world.size > 1
        if self.is_cut:
            if samples < world.size:
                raise DataError(
                    f"{many(samples, 'sample')} cannot be evaluated on {world.size} ranks",
                    why="a rank without a sample logs nothing, and the others would wait for its metrics",
                    fix=f"use at most {many(max(samples, 1), 'device')}, or evaluate on more data",
                )
            batches = [range(*span) for span in parts(samples, world.size)]
        self.rounds, more = divmod(len(batches), world.size)
        self.is_even = not more
        self._batches = batches[world.rank :: world.size]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        return map(list, self._batches)

    @property
    def samples(self) -> int:
        """Samples of this rank."""
        return sum(map(len, self._batches))


class SeededLoader(DataLoader[Any]):
    """The user's DataLoader with another batch sampler; its generator and workers are seeded again in each epoch.

    A generator or ``worker_init_fn`` of the user is kept. To predict, Lightning makes the loader again, with a
    ``batch_sampler`` around this one that notes the indices, and with ``defaults`` of a ``DataLoader``.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        seed: int,
        rank: int,
        epoch: Callable[[], int],
        *,
        batch_sampler: Any,
        **defaults: Any,
    ) -> None:
        self._seeding = (seed, rank, epoch)
        self._seeds_generator = loader.generator is None
        self._seeds_workers = loader.worker_init_fn is None
        super().__init__(
            loader.dataset,
            batch_sampler=batch_sampler,
            generator=torch.Generator() if self._seeds_generator else loader.generator,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
            collate_fn=HandingCollate(loader.collate_fn),
            **defaults,
        )

    def __iter__(self) -> Any:
        # A generator: workers start with the first batch, after the hooks that may change the data set of the epoch.
        seed, rank, epoch = self._seeding
        if self._seeds_generator:
            self.generator.manual_seed(derive_key("loader", seed, epoch(), rank))
        if self._seeds_workers:
            self.worker_init_fn = WorkerInit(seed, rank, epoch())
        yield from map(received, super().__iter__())


class TrainingLoader:
    """A user's training loader, whose samples come in Lockstep's order or, on one device, in the loader's.

    Args:
        loader: what ``train_dataloader()`` returned.
        max_batches: of an epoch, where the loader does not say its length; ``None``: such a loader is refused.

    Attributes:
        keeps_order: whether the order is the loader's.

    Raises:
        UnsupportedError: the order is the loader's, and there are several ranks.
    """

    def __init__(self, loader: Any, ranks: int, max_batches: int | None = None) -> None:
        reason = _reason_to_keep(loader, RandomSampler, SequentialSampler, WeightedRandomSampler)
        if reason is None:
            check_dataset(loader.dataset, "train")
        elif ranks > 1:
            raise UnsupportedError(
                f"several devices cannot share the samples of this training loader: it {reason}",
                why="Lockstep's order shows every sample once an epoch, on any number of ranks, and resumes anywhere",
                fix="use one device; or one torch.utils.data.DataLoader of a map-style data set (ConcatDataset joins "
                "several) with batch_size and no sampler but torch's WeightedRandomSampler",
            )
        self.keeps_order = reason is not None
        self._loader = loader
        self._max_batches = max_batches

    @property
    def batch_size(self) -> int:
        """Samples of a batch; of a loader that keeps its order, summed over several loaders, and 1 if unknown."""
        if self.keeps_order:
            return sum(map(_batch_size, _combined(self._loader).flattened))
        return int(self._loader.batch_size)

    @cached_property
    def length(self) -> int:
        """Samples of an epoch; of a loader that keeps its order, batches."""
        if not self.keeps_order:
            return len(self._loader.sampler)
        _restart_workers(self._loader)
        combined = _combined(self._loader)
        with loader_processes():
            iter(combined)  # it has no length before
        try:
            return len(combined)
        except TypeError:
            if self._max_batches is not None:
                return self._max_batches
        raise UnsupportedError(
            "the training data do not say how many batches an epoch has",
            why="an iterable data set without __len__() has no known length",
            fix="set training.max_steps: the run is then one epoch of that length; or give the data set __len__()",
        )

    def check_length(self, planned: int, epoch: int) -> None:
        """Raise :class:`DataError` where the loader of ``epoch``, from 0, has not the length of the plan."""
        if self.length != planned:
            raise DataError(
                f"the training loader has a length of {self.length} in epoch {epoch + 1}, and of {planned} in the plan",
                why="the steps of a run, its schedule and its place after a resume are planned from one length",
                fix="let the data module make the same number of samples in every process and epoch (a sampler with "
                "num_samples draws it from a set of any size); or train each stage as a separate run, "
                "the next one with init_from",
            )

    def facts(self, *, whole_steps: bool) -> LoaderFacts:
        """Return the facts for the plan; ``whole_steps``: see :class:`.LoaderFacts`."""
        if self.keeps_order:
            return LoaderFacts(self.batch_size, shuffle=False, whole_steps=whole_steps, batches=self.length)
        shuffle = not isinstance(self._loader.sampler, SequentialSampler)
        return LoaderFacts(self.batch_size, shuffle, self._loader.drop_last, whole_steps)

    def datasets(self) -> Datasets:
        """Return the training set; of a loader that keeps its order, indices."""
        if self.keeps_order:
            return Datasets(range(self.length * self.batch_size))
        sampler = self._loader.sampler
        return Datasets(self._loader.dataset, weights=sampler if isinstance(sampler, WeightedRandomSampler) else None)

    def planned(self, batch: BatchPlan, seed: int, world: World, state: TrainState) -> SeededLoader | KeptOrder:
        """Return the loader of a rank, from the position of ``state``.

        Raises:
            DataError: its length is not that of the plan.
        """
        self.check_length(batch.samples // batch.batch_size if self.keeps_order else batch.samples, state.epoch)
        if self.keeps_order:
            return KeptOrder(self._loader, batch, seed, state)
        batches = OrderedBatches(batch, self._order(batch.samples, seed), world.rank, state)
        return SeededLoader(self._loader, seed, world.rank, lambda: state.epoch, batch_sampler=batches)

    def _order(self, samples: int, seed: int) -> SampleOrder:
        loader = self._loader
        if isinstance(loader.sampler, WeightedRandomSampler):
            sampling = resolve_sampling(loader.dataset, loader.sampler, DataConfig())
            assert sampling is not None, "a sampler has weights"
            return sampling.order(samples, seed)
        return Order(samples, seed) if isinstance(loader.sampler, RandomSampler) else InOrder()


def check_interval(arguments: Mapping[str, Any], batch: BatchPlan) -> None:
    """Raise :class:`ConfigError` where the Trainer would validate less than once an epoch, which it refuses."""
    interval: Any = arguments.get("val_check_interval")
    batches = batch.steps_per_epoch * batch.accumulate
    of_epoch = arguments.get("check_val_every_n_epoch", 1) is not None
    if of_epoch and isinstance(interval, int) and interval > batches:
        raise ConfigError(
            f"the Trainer's val_check_interval is {many(interval, 'batch')}, and an epoch has {batches}",
            why="it counts the batches of an epoch",
            fix=f"leave it out and set validation.every_steps={ceil(interval / batch.accumulate)}, which counts the "
            "steps of the run; or set check_val_every_n_epoch to None (null in YAML)",
        )


def _reason_to_keep(loader: Any, *kinds: type) -> str | None:
    """Return why a loader keeps its order; ``None``: its sampler is one of ``kinds``, whose order Lockstep makes."""
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return f"is a {type(loader).__name__}"
    if isinstance(loader.dataset, IterableDataset):
        return "has an iterable data set"
    sampler: Any = loader.sampler
    has_kind = isinstance(sampler, kinds)
    redrawn = isinstance(sampler, RandomSampler) and (
        sampler.replacement or sampler.num_samples != len(loader.dataset)  # type: ignore[arg-type]
    )
    if has_kind and not redrawn and loader.batch_size is not None and type(loader.batch_sampler) is BatchSampler:
        return None
    return f"has a {type(sampler if not has_kind or redrawn else loader.batch_sampler).__name__}"


_CUT = (
    "An evaluation loader has fewer batches than there are ranks, so they are cut into smaller ones. Values of a whole "
    "batch (a mean of batches, a contrastive loss) then differ from those of one device; a smaller batch_size keeps "
    "the batches whole."
)


def evaluation_loader(
    loader: Any,
    world: World,
    seed: int,
    *,
    predicts: bool = False,
    report: Callable[[str], object] | None = None,
) -> Any:
    """Return the user's evaluation loader in index order, its batches shared out among ranks.

    Args:
        predicts: show all samples, also those that the loader drops (``drop_last``), and keep the loader's batches.
        report: called with a text if the batches are not those of the user.
    """
    reason = _reason_to_keep(loader, RandomSampler, SequentialSampler)
    if reason is not None:
        if world.size == 1:
            return loader
        raise UnsupportedError(
            f"several devices cannot share the samples of an evaluation loader: it {reason}",
            why="each sample must count once",
            fix="use a DataLoader of a map-style data set with batch_size and no sampler, or one device",
        )
    drop_last = loader.drop_last and not predicts
    batches = SharedBatches(len(loader.dataset), loader.batch_size, world, drop_last=drop_last, may_cut=not predicts)
    if batches.is_cut and report is not None:
        report(_CUT)
    return SeededLoader(loader, seed, world.rank, lambda: 0, batch_sampler=batches)


Change = Callable[[Any], Any]
#: The stages of ``setup()``, by the split that a Trainer reads.
_STAGES = {"train": "fit", "val": "validate", "test": "test", "predict": "predict"}


@contextmanager
def replaced_loaders(
    owners: list[Any], evaluation: Change, *, seed: int, train: Change | None = None, predicted: str = "predict"
) -> Iterator[None]:
    """Make the loader hooks of ``owners`` return their loaders as changed by these functions, in the body.

    The owners are a data module, or ``None``, and a module. Every hook runs with torch seeded to ``seed``, so that a
    random split is the same on all ranks and in every attempt. Instance attributes shadow the hooks and are removed at
    exit, so the user's classes and ``trainer.datamodule`` stay theirs.

    Args:
        evaluation: changes each loader of a split.
        train: changes what ``train_dataloader()`` returns; ``None``: as another split.
        predicted: the split that a Trainer gets to predict.
    """

    def each(loaders: Any) -> Any:
        return None if loaders is None else tree_map(evaluation, loaders)

    changes = {f"{split}_dataloader": each for split in _STAGES} | {"train_dataloader": train or each}
    with loader_processes(), warnings.catch_warnings(), ExitStack() as restored:
        # Lightning cannot know that these show all samples.
        warnings.filterwarnings("ignore", f"You are using a custom batch sampler .{SharedBatches.__qualname__}.")

        def hide(owner: Any, name: str, hook: Callable[..., Any]) -> None:
            object.__setattr__(owner, name, hook)
            restored.callback(vars(owner).pop, name, None)

        def setup_of(owner: Any) -> Callable[[str], Any]:
            setup = owner.setup
            return lambda stage: setup(_STAGES[predicted] if stage == "predict" else stage)

        for owner in filter(None, owners):
            hide(owner, "setup", _seeded(setup_of(owner), seed, None))
            for name in ("prepare_data", *changes):
                if defines(owner, name):
                    hide(owner, name, _seeded(getattr(owner, name), seed, changes.get(name)))
        data, module = owners
        queried = module if data is None else data  # a Trainer that has a data module asks it alone
        for split, name in (("train", "train_dataloader"), (predicted, "predict_dataloader")):
            owner = next((owner for owner in (queried, module) if defines(owner, f"{split}_dataloader")), None)
            if owner is not None:
                hide(queried, name, getattr(owner, f"{split}_dataloader"))
        yield


def _seeded(hook: Callable[..., Any], seed: int, change: Change | None) -> Callable[..., Any]:
    def from_seed(*args: Any, **kwargs: Any) -> Any:
        with seeded(seed):
            result = hook(*args, **kwargs)
        _restart_workers(result)
        return result if change is None else change(result)

    return from_seed


def _restart_workers(loaders: Any) -> None:
    """Let the workers of each ``DataLoader`` start in each epoch: those that persist keep the data set of the first."""

    def restart(loader: Any) -> None:
        if isinstance(loader, DataLoader):
            vars(loader)["persistent_workers"] = False  # which cannot be assigned to

    tree_map(restart, getattr(loaders, "iterables", loaders))


def defines(owner: Any, hook: str) -> bool:
    """Return whether a (data) module defines a hook."""
    from lightning.pytorch.utilities.model_helpers import is_overridden

    return is_overridden(hook, owner)
