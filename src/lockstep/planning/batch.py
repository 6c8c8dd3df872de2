"""Which samples of an epoch make a step, in which order, and who puts which of them through the model.

Pure arithmetic on positions. An epoch is a line of ``samples`` positions; a step takes a *window* of it;
a window falls into contiguous *parts* (ranks, or lanes in exact mode), a part into *micro-batches*; with
synchronised BatchNorm a window falls into micro-batches, and each of them into ranks. Item j of n goes to
part ⌊jP/n⌋, so the split over P·Q parts refines the split over P parts. Samples are shuffled, or bucketed by length,
over the positions: the same on any devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from lockstep.config.sections import DataConfig
from lockstep.errors import ConfigError, DataError, many
from lockstep.events import Note
from lockstep.planning.decision import Decision, Decisions, Frozen, by_key, decide

Span = tuple[int, int]
Tail = Literal["spread", "merge", "drop"]


class BatchPlan(Frozen):
    """Sizes in samples. ``batch_size`` is the largest micro-batch of one device, before samples that are merged.

    ``ranks`` processes share every window; each holds ``devices_per_rank`` devices (more than one
    under ``dp`` only). ``least_window`` and ``least_part`` are 2 where BatchNorm needs two samples.
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
        full, rest = divmod(self.samples, self.global_batch)
        if rest == 0 or self.tail == "drop":
            return full
        merged = self.tail == "merge" or rest < self.least_window
        return max(1, full) if merged else full + 1

    def steps_left(self, position: int) -> int:
        """Steps of an epoch of which ``position`` samples are used."""
        if position >= self.samples:
            return 0
        return self.model_copy(update={"samples": self.samples - position}).steps_per_epoch

    def window(self, position: int) -> Span | None:
        """The slice of the epoch that the step at ``position`` takes; ``None`` when the epoch is over."""
        rest = self.samples - position
        if rest <= 0 or (self.tail == "drop" and rest < self.global_batch):
            return None
        left_over = rest - self.global_batch
        swallow = left_over < self.global_batch if self.tail == "merge" else left_over < self.least_window
        if self.tail != "drop" and swallow:
            return position, self.samples
        return position, position + self.global_batch

    def split(self, size: int) -> tuple[tuple[Span, ...], ...]:
        """Micro-batches of each rank, as spans within a window of ``size`` items.

        An empty span is an empty lane, or a rank without samples in a micro-batch of all ranks; () is an empty rank.
        """
        if self.lanes is not None:
            return _split_lanes(size, self.ranks, self.lanes, self.least_part)
        # Samples that would be too few for a step make its micro-batches larger, not more of them.
        merged = 0 < size - self.global_batch < self.least_window
        if self.least_part < self.least_window:
            limit = -(-self.global_batch // self.accumulate)
            number = -(-(self.global_batch if merged else size) // limit)
            return _split_micro_batches(size, self.ranks, number, self.least_window, self.least_part)
        most = self.accumulate if merged else size
        return _split_ranks(size, self.ranks, self.batch_size * self.devices_per_rank, self.least_part, most)


@lru_cache(maxsize=256)
def _split_micro_batches(
    size: int, ranks: int, number: int, least_window: int, least_part: int
) -> tuple[tuple[Span, ...], ...]:
    """Micro-batches first, and each of them into ranks: synchronised BatchNorm sees the same ones on any ranks."""
    spans = [(start, stop) for start, stop in parts(size, number, least_window) if stop > start]
    shares = [[(start + a, start + b) for a, b in parts(stop - start, ranks, least_part)] for start, stop in spans]
    return tuple(zip(*shares, strict=True))


@lru_cache(maxsize=256)
def _split_ranks(size: int, ranks: int, limit: int, least: int, most: int) -> tuple[tuple[Span, ...], ...]:
    """Ranks first; each cuts its share into micro-batches of at most ``limit``, but no more than ``most``."""
    shares = parts(size, ranks, least)
    longest = max(stop - start for start, stop in shares)
    micro_batches = min(most, -(-longest // limit))
    return tuple(
        tuple((start + a, start + b) for a, b in parts(stop - start, micro_batches, least) if b > a)
        for start, stop in shares
    )


@lru_cache(maxsize=256)
def _split_lanes(size: int, ranks: int, lanes: int, least: int) -> tuple[tuple[Span, ...], ...]:
    # Empty lanes keep their place: the summation tree has a leaf for each.
    spans = parts(size, lanes, least)
    per_rank = lanes // ranks
    return tuple(spans[r * per_rank : (r + 1) * per_rank] for r in range(ranks))


def parts(size: int, count: int, least: int = 1) -> tuple[Span, ...]:
    """``count`` contiguous spans; each holds at least ``least`` items or none (the last ones stay empty)."""
    used = max(1, min(count, size // least))
    bounds = [-(-index * size // used) for index in range(used + 1)]
    return tuple(pairwise(bounds)) + ((size, size),) * (count - used)


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
    """Sizes of a run, and the decisions on them.

    ``even``: every rank must have ``accumulate`` micro-batches in every step (Lightning's Trainer); a shorter tail
    joins the step before.

    Raises:
        ConfigError, DataError: a global batch that the ranks cannot share, or fewer samples than one step needs.
    """
    devices = ranks * devices_per_rank
    reasons = dict.fromkeys(("batch_size", "accumulate"), "as configured")
    per_device, global_batch = f"{batch_size} per device × {many(devices, 'device')}", global_batch_size
    reasons["global_batch"] = f"{per_device} × {many(accumulate, 'micro-batch')}"
    if global_batch is None:
        global_batch = batch_size * devices * accumulate
    elif global_batch < devices:
        raise ConfigError(
            f"global batch {global_batch} cannot be shared by {devices} devices",
            why="each device needs at least one sample of every full step",
            fix=f"use at most {global_batch} devices or set training.global_batch_size to at least {devices}",
        )
    else:  # in micro-batches of at most ``batch_size`` samples, as few and as even as can be
        share = -(-global_batch // devices)
        accumulate = -(-share // batch_size)
        batch_size = -(-share // accumulate)
        uneven = f", unevenly ({global_batch // devices} or {share} each)" if global_batch % devices else ""
        in_parts = f"{share} in {many(accumulate, 'micro-batch')}"
        reasons = {
            "global_batch": f"held at {global_batch} and shared by {many(devices, 'device')}{uneven}",
            "batch_size": f"a device's share of {in_parts} of no more than the set size",
            "accumulate": f"the fewest micro-batches that a device's share of {share} fits in",
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
    """``plan`` with a part for every micro-batch of every rank in each step, the last one of an epoch included."""
    fits, accumulate = plan.global_batch // (plan.ranks * plan.least_part), plan.accumulate
    if fits == 0:
        raise ConfigError(
            f"a global batch of {plan.global_batch} cannot be shared by {plan.ranks} ranks",
            why=f"a module sees a batch on every rank in every step, and BatchNorm needs {plan.least_part} samples",
            fix=f"use at most {many(plan.global_batch // plan.least_part, 'device')}, "
            f"or a global batch (batch size × devices × accumulation) of at least {plan.ranks * plan.least_part}",
        )
    if fits < accumulate:
        share = -(-plan.global_batch // plan.ranks)
        reasons["accumulate"] = (
            f"{fits} instead of {accumulate}: every micro-batch of every rank must have at least "
            f"{many(plan.least_part, 'sample')}, and of a step's some rank has only {plan.global_batch // plan.ranks}"
        )
        reasons["batch_size"] = f"a rank's share of {share} in {many(fits, 'micro-batch')}"
        size = -(-share // (fits * plan.devices_per_rank))
        plan = plan.model_copy(update={"accumulate": fits, "batch_size": size})
    least = max(plan.least_window, plan.ranks * plan.accumulate * plan.least_part)
    rest = plan.samples % plan.global_batch
    if plan.samples < least:
        raise DataError(
            f"the training set has {many(plan.samples, 'sample')}",
            why=f"one step of {many(plan.ranks, 'rank')} × {many(plan.accumulate, 'micro-batch')} needs {least}",
            fix="use fewer devices or less accumulation",
        )
    if plan.tail == "spread" and 0 < rest < least:
        reasons["tail"] = f"the last {rest} samples join the step before: they are too few for all ranks"
    return plan.model_copy(update={"least_window": least})


def _check_tail(plan: BatchPlan) -> str:
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
    rest = plan.samples % plan.global_batch
    if plan.tail == "drop" and plan.samples < plan.global_batch:
        raise ConfigError(
            f"tail: drop leaves no step: {plan.samples} samples are fewer than the global batch {plan.global_batch}",
            why="drop leaves out the last, short batch of an epoch",
            fix="use tail: spread, or a smaller batch",
        )
    if rest == 0:
        return f"{plan.samples} samples fill every step of {plan.global_batch}; there is no short batch"
    if plan.tail == "spread" and rest < plan.least_window:
        return f"the last {rest} sample joins the step before: BatchNorm cannot take one sample alone"
    return {
        "drop": f"the last {rest} samples of each epoch are left out, as configured",
        "merge": f"the last {rest} samples join the step before, as configured",
        "spread": f"the last {rest} samples form a smaller batch, split across ranks; nothing is dropped",
    }[plan.tail]


#: Samples of a default window: wide enough for little padding, narrow enough to mix a large data set.
WINDOW = 4096
#: Windows in an epoch of a smaller data set, at least: with fewer, its batches have the same samples in each.
MIN_WINDOWS = 4
MIN_WINDOW_SAMPLES = 512
BLOCKS = 8
#: Of a stream whose items draw from generators that training draws from, too.
DRAWS = "items draw from the global generators: they differ with the number of ranks"
OWN = "let the data set draw from a random.Random, numpy or torch generator that it seeds itself"


class SamplingFacts(Frozen):
    """How samples are chosen, where that is not each of them once an epoch of ``positions`` (at most ``most``).

    ``digest``: a hash of the weights. ``stream``: they are read in order, by one process; ``draws``: from the global
    generators.
    """

    kind: str
    digest: str
    positions: int
    most: int | None = None
    stream: bool = False
    draws: bool = False


class OrderPlan(Frozen):
    """Sizes in samples; all ``None`` when the order is a plain shuffle. A resume keeps all of it.

    ``window`` samples are sorted by length together, in blocks of ``block``. The items of a step are split into
    ``lanes`` strided parts (virtual ranks), so that parts that run at the same time have equal work.
    ``sampling``: how samples are chosen, with a ``digest`` of the weights; ``positions``: of an epoch.
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
    held: OrderPlan | None,
    sampling: SamplingFacts | None = None,
) -> tuple[OrderPlan, Decision]:
    """The order of a run of ``samples``, and the decision.

    ``lengths``: whether the task gives the length of each. ``held``: the order of the run, on resume.

    Raises:
        ConfigError: sizes that do not fit, lengths that are missing, or a change of the order on resume.
    """
    chosen, given = _sampled(config, samples, sampling)
    bucketing, positions = config.bucketing, chosen.positions or samples
    if bucketing == "on" and not lengths and held is None:
        raise ConfigError(
            "data.bucketing is on, but the task gives no lengths",
            why="an order by length needs one number per training sample",
            fix="return them from Task.lengths(), or set data.bucketing=auto",
        )
    if held is not None:
        _check_held(config, positions, chosen, held)
        order, reason = held, "as the run began: another order would repeat some samples and leave others out"
    elif bucketing == "off" or not lengths:
        order = chosen
        reason = "data.bucketing is off" if bucketing == "off" else "auto: the task gives no lengths of its samples"
    else:
        window, block = _sizes(config, positions)
        order = chosen.model_copy(update={"window": window, "block": block, "lanes": lanes})
        asked = "data.bucketing is on" if bucketing == "on" else "auto: the task gives the lengths of its samples"
        is_set = config.bucket_window or config.bucket_block
        reason = f"{asked}; {'sizes as configured' if is_set else f'the default sizes for {positions} samples'}"
        reason += ", on any devices"
    kind = "bucketed" if order.bucketed else order.sampling or "shuffled"
    return order, decide("order", (True, kind, f"{given}; {reason}" if given else reason), shown={kind: str(order)})


def _sampled(config: DataConfig, samples: int, sampling: SamplingFacts | None) -> tuple[OrderPlan, str]:
    """How samples are chosen, before bucketing, and why; all ``None`` where each is seen once an epoch."""
    positions = config.epoch_samples or (sampling.positions if sampling else samples)
    if sampling is not None and sampling.most is not None and positions > sampling.most:
        raise ConfigError(
            f"an epoch of {positions} samples cannot be drawn without replacement",
            why=f"{sampling.most} samples have a weight above 0",
            fix=f"set data.replacement=true, or data.epoch_samples to at most {sampling.most}",
        )
    length = None if positions == samples else positions
    why = "data.epoch_samples" if config.epoch_samples and length else ""
    if sampling is None or not sampling.digest:
        return OrderPlan(positions=length), why
    why = f"{'data.sampling' if config.sampling != 'auto' else 'as the training data say'}{why and ' and '}{why}"
    return OrderPlan(sampling=sampling.kind, digest=sampling.digest, positions=length), why


def order_notes(config: DataConfig, order: OrderPlan, global_batch: int) -> Iterator[Note]:
    """Notes on bucketing settings that have no effect, or reduce padding less than they could."""
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
    if block < 1 or window < 1 or window % block:
        raise ConfigError(
            f"windows of {window} samples cannot be cut into blocks of {block}",
            why="the window must be a positive multiple of the block",
            fix=f"take a window of {max(1, round(window / max(1, block))) * max(1, block)} samples",
        )


def _sizes(config: DataConfig, samples: int) -> tuple[int, int]:
    """Window and block: as configured, the other one to fit, or the defaults."""
    window, block = config.bucket_window, config.bucket_block
    if window is None and block is None:
        window = WINDOW
        while window > MIN_WINDOW_SAMPLES and samples < MIN_WINDOWS * window:
            window //= 2
    window = window or BLOCKS * (block or 1)
    block = block or max(1, window // BLOCKS)
    check_sizes(window, block)
    return window, block


def _check_held(config: DataConfig, samples: int, chosen: OrderPlan, held: OrderPlan) -> None:
    sizes: dict[str, int | None] = {}
    if held.bucketed and config.bucketing == "off":
        sizes = {"window": None, "block": None, "lanes": None}
    elif held.bucketed:
        sizes = {"window": config.bucket_window or held.window, "block": config.bucket_block or held.block}
    elif config.bucketing == "on":
        sizes = dict(zip(("window", "block"), _sizes(config, samples), strict=True))
    names = ("sampling", "digest", "positions")
    asked = held.model_copy(update={**sizes, **{name: getattr(chosen, name) for name in names}})
    if asked != held:
        raise ConfigError(
            f"the run's order is {held}; asked for is {asked}",
            why="in another order samples would repeat and others would be left out",
            fix="leave the weights and the settings of data (sampling, bucketing, epoch_samples) as they were, or "
            "start a new run with --init-from",
        )
