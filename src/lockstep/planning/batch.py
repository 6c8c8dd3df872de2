"""Batch sizes and the order of samples: the split of an epoch into steps, ranks and micro-batches.

Pure arithmetic on positions. An epoch has ``samples`` positions. A step takes a *window*, a slice of the epoch. A
window is split into contiguous *parts* (ranks, or lanes in exact mode), and each part into *micro-batches*. With
synchronised BatchNorm a window is split into micro-batches first, and each of them into ranks. Item j of n goes to
part ⌊jP/n⌋, so the split over P·Q parts refines the split over P parts. The order of samples over the positions
(shuffled or bucketed by length) is the same on any devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from lockstep.arithmetic import ceil_div
from lockstep.config.sections import DataConfig
from lockstep.errors import ConfigError, DataError, many
from lockstep.events import Note
from lockstep.planning.decision import Decision, Decisions, Frozen, by_key, decide

Span = tuple[int, int]
Tail = Literal["spread", "merge", "drop"]


class BatchPlan(Frozen):
    """Sizes in samples.

    ``batch_size`` is the largest micro-batch of one device, before a short tail is merged. ``ranks`` processes share
    every window; each has ``devices_per_rank`` devices (more than one under ``dp`` only). ``least_window`` and
    ``least_part`` are the minimum sizes of a window and of a part: 2 if BatchNorm needs two samples.
    """

    samples: int
    global_batch: int
    batch_size: int
    accumulate: int
    ranks: int
    devices_per_rank: int = 1
    lanes: int | None = None
    tail: Tail = "spread"
    least_window: int = 1
    least_part: int = 1

    @property
    def largest(self) -> int:
        """Samples of the largest micro-batch of an epoch."""
        spans = filter(None, (self.window(step * self.global_batch) for step in (0, self.steps_per_epoch - 1)))
        shares = (share for start, stop in spans for share in self.split(stop - start))
        return max((stop - start for share in shares for start, stop in share), default=0)

    @property
    def steps_per_epoch(self) -> int:
        full_steps, remainder = divmod(self.samples, self.global_batch)
        if remainder == 0 or self.tail == "drop":
            return full_steps
        is_merged = self.tail == "merge" or remainder < self.least_window
        return max(1, full_steps) if is_merged else full_steps + 1

    def steps_left(self, position: int) -> int:
        """Count the steps that follow after ``position`` samples of an epoch."""
        if position >= self.samples:
            return 0
        return self.model_copy(update={"samples": self.samples - position}).steps_per_epoch

    def window(self, position: int) -> Span | None:
        """Return the slice of the epoch for the step at ``position``; ``None`` at the end of the epoch."""
        remaining = self.samples - position
        if remaining <= 0 or (self.tail == "drop" and remaining < self.global_batch):
            return None
        next_size = remaining - self.global_batch
        min_next_size = self.global_batch if self.tail == "merge" else self.least_window
        if self.tail != "drop" and next_size < min_next_size:
            return position, self.samples
        return position, position + self.global_batch

    def split(self, size: int) -> tuple[tuple[Span, ...], ...]:
        """Return the micro-batches of each rank, as spans within a window of ``size`` items.

        An empty span is an empty lane, or a rank without samples in a micro-batch of all ranks; () is an empty rank.
        """
        if self.lanes is not None:
            return _split_lanes(size, self.ranks, self.lanes, self.least_part)
        # A merged tail makes the micro-batches larger and does not add one.
        is_merged = 0 < size - self.global_batch < self.least_window
        if self.least_part < self.least_window:
            max_size = ceil_div(self.global_batch, self.accumulate)
            micro_batches = ceil_div(self.global_batch if is_merged else size, max_size)
            return _split_micro_batches(size, self.ranks, micro_batches, self.least_window, self.least_part)
        return _split_ranks(
            size,
            self.ranks,
            max_size=self.batch_size * self.devices_per_rank,
            min_size=self.least_part,
            max_micro_batches=self.accumulate if is_merged else size,
        )


@lru_cache(maxsize=256)
def _split_micro_batches(
    size: int, ranks: int, micro_batches: int, min_micro_batch: int, min_part: int
) -> tuple[tuple[Span, ...], ...]:
    """Split into micro-batches, then each into ranks: synchronised BatchNorm sees the same ones on any ranks."""
    spans = [(start, stop) for start, stop in parts(size, micro_batches, min_micro_batch) if stop > start]
    shares = [[(start + a, start + b) for a, b in parts(stop - start, ranks, min_part)] for start, stop in spans]
    return tuple(zip(*shares, strict=True))


@lru_cache(maxsize=256)
def _split_ranks(
    size: int, ranks: int, *, max_size: int, min_size: int, max_micro_batches: int
) -> tuple[tuple[Span, ...], ...]:
    """Split into ranks, then each into micro-batches of ``min_size`` to ``max_size`` items.

    ``max_micro_batches`` per rank take precedence over ``max_size``.
    """
    shares = parts(size, ranks, min_size)
    largest_share = max(stop - start for start, stop in shares)
    micro_batches = min(max_micro_batches, ceil_div(largest_share, max_size))
    return tuple(
        tuple((start + a, start + b) for a, b in parts(stop - start, micro_batches, min_size) if b > a)
        for start, stop in shares
    )


@lru_cache(maxsize=256)
def _split_lanes(size: int, ranks: int, lanes: int, min_size: int) -> tuple[tuple[Span, ...], ...]:
    # Empty lanes keep their position: the summation tree has a leaf for each.
    spans = parts(size, lanes, min_size)
    lanes_per_rank = lanes // ranks
    return tuple(spans[rank * lanes_per_rank : (rank + 1) * lanes_per_rank] for rank in range(ranks))


def parts(size: int, count: int, min_size: int = 1) -> tuple[Span, ...]:
    """Split ``size`` items into ``count`` contiguous spans; the last ones are empty if ``min_size`` does not fit."""
    filled = max(1, min(count, size // min_size))
    bounds = [ceil_div(index * size, filled) for index in range(filled + 1)]
    return tuple(pairwise(bounds)) + ((size, size),) * (count - filled)


def resolve_batch(
    *,
    samples: int,
    ranks: int,
    devices_per_rank: int,
    batch_size: int,
    accumulate: int,
    global_batch_size: int | None,
    tail: Tail,
    lanes: int | None,
    has_batchnorm: bool,
    sync_batchnorm: bool,
    even: bool = False,
) -> tuple[BatchPlan, Decisions]:
    """Decide the batch sizes of a run.

    Args:
        samples: positions of an epoch.
        batch_size: samples of a micro-batch of one device; an upper limit if ``global_batch_size`` is set.
        has_batchnorm: the model has BatchNorm, so a single sample cannot be a batch.
        even: every rank must have ``accumulate`` micro-batches in every step (Lightning's Trainer). A shorter tail
            is merged with the step before.

    Raises:
        ConfigError: a global batch that cannot be shared by the ranks.
        DataError: fewer samples than one step needs.
    """
    devices = ranks * devices_per_rank
    if global_batch_size is None:
        global_batch = batch_size * devices * accumulate
        factors = f"{batch_size} per device × {many(devices, 'device')} × {many(accumulate, 'micro-batch')}"
        reasons = {"global_batch": factors, "batch_size": "as configured", "accumulate": "as configured"}
    elif global_batch_size < devices:
        raise ConfigError(
            f"global batch {global_batch_size} cannot be shared by {devices} devices",
            why="each device needs at least one sample of every full step",
            fix=f"use at most {many(global_batch_size, 'device')}, or --global-batch-size {devices} or more",
        )
    else:  # as few and as even micro-batches as possible
        global_batch = global_batch_size
        share = ceil_div(global_batch, devices)
        accumulate = ceil_div(share, batch_size)
        limit = f"at most {batch_size} samples"
        batch_size = ceil_div(share, accumulate)
        uneven = f", unevenly ({global_batch // devices} or {share} each)" if global_batch % devices else ""
        reasons = {
            "global_batch": f"held at {global_batch} and shared by {many(devices, 'device')}{uneven}",
            "batch_size": f"{share} samples per device, divided into {many(accumulate, 'micro-batch')} of {limit}",
            "accumulate": f"the fewest micro-batches of {limit} for {share} samples per device",
        }
    plan = BatchPlan(
        samples=samples,
        global_batch=global_batch,
        batch_size=batch_size,
        accumulate=accumulate,
        ranks=ranks,
        devices_per_rank=devices_per_rank,
        lanes=lanes,
        tail=tail,
        least_window=2 if has_batchnorm else 1,
        least_part=2 if has_batchnorm and not sync_batchnorm else 1,
    )
    reasons["tail"] = _check_tail(plan)
    if even:
        plan = _even(plan, reasons)
    keys = ("global_batch", "batch_size", "accumulate", "tail")
    return plan, by_key(decide(key, (True, getattr(plan, key), reasons[key])) for key in keys)


def _even(plan: BatchPlan, reasons: dict[str, str]) -> BatchPlan:
    """Give every rank the same number of micro-batches in each step, including the last one of an epoch.

    Replaces the ``reasons`` of sizes that it changes.
    """
    max_accumulate = plan.global_batch // (plan.ranks * plan.least_part)
    if max_accumulate == 0:
        raise ConfigError(
            f"a global batch of {plan.global_batch} cannot be shared by {plan.ranks} ranks",
            why=f"a module sees a batch on every rank in every step, and BatchNorm needs {plan.least_part} samples",
            fix=f"use at most {many(plan.global_batch // plan.least_part, 'device')}, "
            f"or a global batch (batch size × devices × accumulation) of at least {plan.ranks * plan.least_part}",
        )
    if max_accumulate < plan.accumulate:
        share = ceil_div(plan.global_batch, plan.ranks)
        smallest_share = plan.global_batch // plan.ranks
        reasons["accumulate"] = (
            f"{max_accumulate} instead of {plan.accumulate}: every micro-batch of every rank must have at least "
            f"{many(plan.least_part, 'sample')}, and a rank may have only {smallest_share} in a step"
        )
        reasons["batch_size"] = f"{share} samples per rank, divided into {many(max_accumulate, 'micro-batch')}"
        batch_size = ceil_div(share, max_accumulate * plan.devices_per_rank)
        plan = plan.model_copy(update={"accumulate": max_accumulate, "batch_size": batch_size})
    min_window = max(plan.least_window, plan.ranks * plan.accumulate * plan.least_part)
    tail = plan.samples % plan.global_batch
    if plan.samples < min_window:
        raise DataError(
            f"the training set has {many(plan.samples, 'sample')}",
            why=f"one step of {many(plan.ranks, 'rank')} × {many(plan.accumulate, 'micro-batch')} needs {min_window}",
            fix="use fewer devices or less accumulation",
        )
    if plan.tail == "spread" and 0 < tail < min_window:
        reasons["tail"] = f"the last {tail} samples join the step before: they are too few for all ranks"
    return plan.model_copy(update={"least_window": min_window})


def _check_tail(plan: BatchPlan) -> str:
    """Check the sizes for a last, short batch, and return the reason for its treatment."""
    if plan.global_batch < plan.least_window:
        raise ConfigError(
            f"a global batch of {plan.global_batch} is too small for a model with BatchNorm",
            why="batch statistics of one sample are the sample itself",
            fix="set training.batch_size to at least 2",
        )
    if plan.samples < plan.least_window:
        raise DataError(
            f"the training set has {many(plan.samples, 'sample')}",
            why="BatchNorm needs at least 2 samples in a batch" if plan.samples else "there is nothing to train on",
            fix="check data.data_dir and the split",
        )
    tail = plan.samples % plan.global_batch
    if plan.tail == "drop" and plan.samples < plan.global_batch:
        raise ConfigError(
            f"tail: drop leaves no step: {plan.samples} samples are fewer than the global batch {plan.global_batch}",
            why="drop leaves out the last, short batch of an epoch",
            fix="use tail: spread, or a smaller batch",
        )
    if tail == 0:
        return f"{plan.samples} samples fill every step of {plan.global_batch}; there is no short batch"
    if plan.tail == "spread" and tail < plan.least_window:
        return f"the last {tail} sample joins the step before: BatchNorm cannot take one sample alone"
    return {
        "drop": f"the last {tail} samples of each epoch are left out, as configured",
        "merge": f"the last {tail} samples join the step before, as configured",
        "spread": f"the last {tail} samples form a smaller batch, split across ranks; nothing is dropped",
    }[plan.tail]


#: Samples of a default window: wide enough for little padding, narrow enough to mix a large data set.
WINDOW = 4096
#: Minimum number of windows in an epoch: with fewer, each epoch would have nearly the same batches.
MIN_WINDOWS = 4
MIN_WINDOW_SAMPLES = 512
BLOCKS = 8
#: Reason and fix for a stream whose items draw from generators that training also draws from.
DRAWS = "items draw from the global generators: they differ with the number of ranks"
OWN = "let the data set draw from a random.Random, numpy or torch generator that it seeds itself"


class SamplingFacts(Frozen):
    """A sampling other than one pass over all samples in each epoch.

    Attributes:
        kind: its name, for users.
        digest: hash of the weights.
        positions: samples drawn in an epoch.
        most: highest possible ``positions`` when drawing without replacement.
        stream: samples are read in order, by one process.
        draws: items of the stream draw from the global random generators.
    """

    kind: str
    digest: str
    positions: int
    most: int | None = None
    stream: bool = False
    draws: bool = False


class OrderPlan(Frozen):
    """Order of samples; sizes in samples, all ``None`` for a plain shuffle. A resume keeps all of it.

    ``window`` samples are sorted by length together, in blocks of ``block``. The items of a step are split into
    ``lanes`` strided parts (virtual ranks), so that parts that run at the same time have equal work.
    ``sampling``, ``digest`` and ``positions`` are those of :class:`SamplingFacts`.
    """

    window: int | None = None
    block: int | None = None
    lanes: int | None = None
    sampling: str | None = None
    digest: str | None = None
    positions: int | None = None

    @property
    def bucketed(self) -> bool:
        return self.window is not None

    def __str__(self) -> str:
        text = self.sampling or "shuffled"
        text += f", {self.positions} samples an epoch" if self.positions else ""
        text += f" ({self.digest})" if self.digest else ""
        if not self.bucketed:
            return text
        by_length = f"bucketed by length in windows of {self.window} samples and blocks of {self.block}"
        return by_length if text == "shuffled" else f"{text}, {by_length}"


def resolve_order(
    config: DataConfig,
    *,
    samples: int,
    lengths: bool,
    lanes: int,
    saved_order: OrderPlan | None,
    sampling: SamplingFacts | None = None,
) -> tuple[OrderPlan, Decision]:
    """Decide the order of the training samples.

    Args:
        samples: size of the training set.
        lengths: the task returns the length of each sample.
        lanes: strided parts of a step that is bucketed by length.
        saved_order: order of the run, on resume.

    Raises:
        ConfigError: sizes that do not fit, lengths that are missing, or a change of the order on resume.
    """
    sampled_order, sampling_reason = _sampled(config, samples, sampling)
    bucketing = config.bucketing
    positions = sampled_order.positions or samples
    if bucketing == "on" and not lengths and saved_order is None:
        raise ConfigError(
            "data.bucketing is on, but the task gives no lengths",
            why="an order by length needs one number per training sample",
            fix="return them from Task.lengths(), or set data.bucketing=auto",
        )
    if saved_order is not None:
        _check_order_unchanged(config, positions, sampled_order, saved_order)
        order = saved_order
        reason = "as the run began: another order would repeat some samples and leave others out"
    elif bucketing == "off" or not lengths:
        order = sampled_order
        reason = "data.bucketing is off" if bucketing == "off" else "auto: the task gives no lengths of its samples"
    else:
        window, block = _sizes(config, positions)
        order = sampled_order.model_copy(update={"window": window, "block": block, "lanes": lanes})
        source = "data.bucketing is on" if bucketing == "on" else "auto: the task gives the lengths of its samples"
        has_sizes = config.bucket_window or config.bucket_block
        sizes = "sizes as configured" if has_sizes else f"the default sizes for {positions} samples"
        reason = f"{source}; {sizes}, on any devices"
    if sampling_reason:
        reason = f"{sampling_reason}; {reason}"
    kind = "bucketed" if order.bucketed else order.sampling or "shuffled"
    return order, decide("order", (True, kind, reason), shown={kind: str(order)})


def _sampled(config: DataConfig, samples: int, sampling: SamplingFacts | None) -> tuple[OrderPlan, str]:
    """Return the order before bucketing and its reason, which is empty for one pass over all samples."""
    positions = config.epoch_samples or (sampling.positions if sampling else samples)
    if sampling is not None and sampling.most is not None and positions > sampling.most:
        raise ConfigError(
            f"an epoch of {positions} samples cannot be drawn without replacement",
            why=f"{sampling.most} samples have a weight above 0",
            fix=f"set data.replacement=true, or data.epoch_samples to at most {sampling.most}",
        )
    epoch_length = None if positions == samples else positions
    length_reason = "data.epoch_samples" if config.epoch_samples and epoch_length else ""
    if sampling is None or not sampling.digest:
        return OrderPlan(positions=epoch_length), length_reason
    sampling_reason = "data.sampling" if config.sampling != "auto" else "as the training data say"
    order = OrderPlan(sampling=sampling.kind, digest=sampling.digest, positions=epoch_length)
    return order, " and ".join(filter(None, (sampling_reason, length_reason)))


def order_notes(config: DataConfig, order: OrderPlan, global_batch: int) -> Iterator[Note]:
    """Yield notes on bucketing settings that have no effect or reduce padding little."""
    if order.block is None and (config.bucket_window or config.bucket_block):
        text = "data.bucket_window and data.bucket_block have no effect: the order is not by length."
        yield Note("settings_unused", text)
    elif order.block is not None and global_batch > order.block:
        yield Note(
            "small_blocks",
            f"A step of {global_batch} samples spans several blocks of {order.block}, whose lengths differ: "
            f"a data.bucket_block of at least {global_batch} (set before the run starts) reduces padding.",
        )


def check_sizes(window: int, block: int) -> None:
    """Raise :class:`ConfigError` unless ``window`` is a positive multiple of ``block``."""
    if block < 1 or window < 1 or window % block:
        raise ConfigError(
            f"windows of {window} samples cannot be cut into blocks of {block}",
            why="the window must be a positive multiple of the block",
            fix=f"take a window of {max(1, round(window / max(1, block))) * max(1, block)} samples",
        )


def _sizes(config: DataConfig, samples: int) -> tuple[int, int]:
    """Return window and block as configured; a missing one is derived from the other or from ``samples``."""
    window = config.bucket_window
    block = config.bucket_block
    if window is None and block is None:
        window = WINDOW
        while window > MIN_WINDOW_SAMPLES and samples < MIN_WINDOWS * window:
            window //= 2
    window = window or BLOCKS * (block or 1)
    block = block or max(1, window // BLOCKS)
    check_sizes(window, block)
    return window, block


def _check_order_unchanged(config: DataConfig, samples: int, sampled_order: OrderPlan, saved_order: OrderPlan) -> None:
    """Raise :class:`ConfigError` if settings or data of a resume ask for another order than ``saved_order``."""
    changes: dict[str, object] = sampled_order.model_dump(include={"sampling", "digest", "positions"})
    if saved_order.bucketed and config.bucketing == "off":
        changes |= {"window": None, "block": None, "lanes": None}
    elif saved_order.bucketed:
        changes["window"] = config.bucket_window or saved_order.window
        changes["block"] = config.bucket_block or saved_order.block
    elif config.bucketing == "on":
        changes["window"], changes["block"] = _sizes(config, samples)
    configured_order = saved_order.model_copy(update=changes)
    if configured_order != saved_order:
        raise ConfigError(
            f"the run's order is {saved_order}; the configured order is {configured_order}",
            why="in another order samples would repeat and others would be left out",
            fix="leave the weights and the settings of data (sampling, bucketing, epoch_samples) as they were, or "
            "start a new run with --init-from",
        )
