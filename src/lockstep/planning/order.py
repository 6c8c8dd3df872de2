"""In which order a run visits its samples: shuffled, or bucketed by length. Pure arithmetic.

Nothing here depends on the batch size or the number of ranks, so the order is the same on any devices.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict

from lockstep.config.sections import DataConfig
from lockstep.errors import ConfigError
from lockstep.events import Note
from lockstep.planning.decision import Decision

#: Samples of a default window: wide enough for little padding, narrow enough to mix a large data set.
WINDOW = 4096
#: Windows in an epoch of a smaller data set, at least: with fewer, its batches have the same samples in each.
MIN_WINDOWS = 4
MIN_WINDOW_SAMPLES = 512
BLOCKS = 8


class OrderPlan(BaseModel):
    """Sizes in samples; all ``None`` when the order is a plain shuffle.

    ``window`` samples are sorted by length together, in blocks of ``block``. The items of a step are split into
    ``lanes`` strided parts (virtual ranks), so that parts that run at the same time have equal work.
    A resume keeps all three.
    """

    model_config = ConfigDict(frozen=True)

    window: int | None = None
    block: int | None = None
    lanes: int | None = None

    @property
    def bucketed(self) -> bool:
        return self.window is not None

    def __str__(self) -> str:
        if not self.bucketed:
            return "shuffled"
        return f"bucketed by length in windows of {self.window} samples and blocks of {self.block}"


def resolve_order(
    config: DataConfig, *, samples: int, lengths: bool, lanes: int, held: OrderPlan | None
) -> tuple[OrderPlan, Decision]:
    """The order of a run, and the decision.

    Args:
        samples: of the training set.
        lengths: whether the task gives the length of each.
        held: that of the run, on resume.

    Raises:
        ConfigError: sizes that do not fit, lengths that are missing, or a change of the order on resume.
    """
    order, reason = _order(config, samples, lengths, lanes, held)
    return order, Decision("order", "order", "bucketed" if order.bucketed else "shuffled", reason, str(order))


def _order(
    config: DataConfig, samples: int, lengths: bool, lanes: int, held: OrderPlan | None
) -> tuple[OrderPlan, str]:
    if held is not None:
        _check_held(config, samples, held)
        return held, "as the run began: another order would repeat some samples and leave others out"
    if config.bucketing == "off":
        return OrderPlan(), "data.bucketing is off"
    if not lengths:
        if config.bucketing == "on":
            raise ConfigError(
                "data.bucketing is on, but the task gives no lengths",
                why="an order by length needs one number per training sample",
                fix="return them from Task.lengths(), or set data.bucketing=auto",
            )
        return OrderPlan(), "auto: the task gives no lengths of its samples"
    window, block = _sizes(config, samples)
    given = config.bucket_window or config.bucket_block
    sizes = "sizes as configured" if given else f"the default sizes for {samples} samples"
    asked = "data.bucketing is on" if config.bucketing == "on" else "auto: the task gives the lengths of its samples"
    return OrderPlan(window=window, block=block, lanes=lanes), f"{asked}; {sizes}, on any devices"


def order_notes(config: DataConfig, order: OrderPlan, global_batch: int) -> Iterator[Note]:
    """Notes on bucketing settings that have no effect, or reduce padding less than they could."""
    if order.block is None:
        if config.bucket_window or config.bucket_block:
            text = "data.bucket_window and data.bucket_block have no effect: the order is not by length."
            yield Note("settings_unused", text)
    elif global_batch > order.block:
        yield Note(
            "small_blocks",
            f"A step of {global_batch} samples spans several blocks of {order.block}, whose lengths differ: "
            f"a data.bucket_block of at least {global_batch} (set before the run starts) reduces padding.",
        )


def check_sizes(window: int, block: int) -> None:
    """Refuse windows that blocks do not fill."""
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
    if window is None:
        assert block is not None
        window = BLOCKS * block
    if block is None:
        block = max(1, window // BLOCKS)
    check_sizes(window, block)
    return window, block


def _check_held(config: DataConfig, samples: int, held: OrderPlan) -> None:
    asked = held
    if held.bucketed and config.bucketing == "off":
        asked = OrderPlan()
    elif held.bucketed:
        sizes = {"window": config.bucket_window or held.window, "block": config.bucket_block or held.block}
        asked = held.model_copy(update=sizes)
    elif config.bucketing == "on":
        window, block = _sizes(config, samples)
        asked = OrderPlan(window=window, block=block)
    if asked != held:
        raise ConfigError(
            f"the run's order is {held}; asked for is {asked}",
            why="in another order samples would repeat and others would be left out",
            fix="leave data.bucketing, data.bucket_window and data.bucket_block as they were, or start a new run "
            "with --init-from",
        )
