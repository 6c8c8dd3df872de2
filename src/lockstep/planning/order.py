"""In which order a run visits its samples: shuffled, or bucketed by length; the same on any devices. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.config.sections import DataConfig
from lockstep.errors import ConfigError
from lockstep.events import Note
from lockstep.planning.decision import Decision, Frozen, decide

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
