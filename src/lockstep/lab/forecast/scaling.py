"""From one device's step to the step of many: computation, messages, loading and waiting for the slowest.

Pure, with the buckets in which DistributedDataParallel reduces gradients beside the backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, NamedTuple

from lockstep.lab.forecast.collectives import Cluster, all_gather, all_reduce
from lockstep.planning.resolve import FIRST_BUCKET_BYTES
from lockstep.strategies import find_strategy

#: Lockstep sums loss, count and requests beside the gradients, in this number of bytes.
COUNT_BYTES = 40
#: Synchronised BatchNorm sums two numbers a channel, of a few hundred channels.
BLOCKING_BYTES = 4096
#: torch.nn.parallel.DistributedDataParallel's buckets: 25 MiB, the first 1 MiB so that messages begin early.
DEFAULT_BUCKET = 25 << 20


@dataclass(frozen=True)
class Step:
    """One device's step, measured or modelled; seconds of one micro-batch of ``batch_size`` samples.

    Attributes:
        data_s: waiting for input. other_s: work of the host in between. jitter_s: standard deviation of a step.
        spread: relative uncertainty of all these times.
        gradients, ready: bytes of each gradient in the order of the backward, and when it is there (share of it).
        blocks: bytes of each block that fsdp shards separately.
    """

    batch_size: int
    forward_s: float
    backward_s: float
    optimizer_s: float
    gradients: tuple[int, ...]
    ready: tuple[float, ...]
    data_s: float = 0.0
    other_s: float = 0.0
    jitter_s: float = 0.0
    spread: float = 0.0
    blocks: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        return self.data_s + self.forward_s + self.backward_s + self.optimizer_s + self.other_s

    def scaled(self, factor: float) -> Step:
        """Return the step on a device that takes ``factor`` times as long."""
        names = ("data_s", "forward_s", "backward_s", "optimizer_s", "other_s", "jitter_s")
        return replace(self, **{name: getattr(self, name) * factor for name in names})


@dataclass(frozen=True)
class Setting:
    """The properties of a run that decide its speed on several devices.

    Attributes:
        overlap: share of the backward during which messages travel beside it.
        blocking: short messages of each micro-batch that computation waits for: two for every synchronised BatchNorm.
        shrink: size of ddp's gradients and fsdp's gathered parameters as sent, against 32 bits.
        joint: ddp's gradients and count travel in one message after the backward.
    """

    cluster: Cluster
    strategy: str = "ddp"
    accumulate: int = 1
    bucket_bytes: int | None = None
    shrink: float = 1.0
    overlap: float = 1.0
    blocking: int = 0
    joint: bool = False

    @property
    def sharded(self) -> bool:
        """Blocks are gathered and gradients scattered; else gradients are summed by all-reduce."""
        return find_strategy(self.strategy).messages == "gather"


class Prediction(NamedTuple):
    """``parts``: seconds of a step by part; they add up to ``step_s``. ``sent``: bytes each device sends in a step."""

    devices: int
    step_s: float
    samples_per_s: float
    efficiency: float
    parts: dict[str, float]
    sent: float


def predict(step: Step, devices: int, setting: Setting) -> Prediction:
    """Predict the step of ``devices`` devices, each with the batch of one (weak scaling)."""
    parts = _parts(step, devices, setting)
    taken = sum(parts.values())
    single = sum(_parts(step, 1, setting).values())
    samples = step.batch_size * setting.accumulate * devices
    efficiency = single / taken if taken else 1.0
    return Prediction(devices, taken, samples / taken, efficiency, parts, bytes_sent(step, devices, setting))


def _parts(step: Step, devices: int, setting: Setting) -> dict[str, float]:
    k = setting.accumulate
    updated_share = 1 / devices if setting.sharded else 1.0
    compute = k * (step.forward_s + step.backward_s + step.other_s) + step.optimizer_s * updated_share
    waiting = 0.0
    if devices > 1:
        waiting = _fsdp(step, devices, setting) if setting.sharded else _ddp(step, devices, setting)
        waiting += k * setting.blocking * all_reduce(BLOCKING_BYTES, devices, setting.cluster)
    straggler = step.jitter_s * math.sqrt(k) * expected_max(devices)
    return {"compute": compute, "communication": waiting, "straggler": straggler, "data": k * step.data_s}


def _ddp(step: Step, devices: int, setting: Setting) -> float:
    """Return the seconds of communication that no computation hides: buckets as they fill, one message at a time."""
    if setting.joint:
        return all_reduce(sum(step.gradients) + COUNT_BYTES, devices, setting.cluster)
    count = all_reduce(COUNT_BYTES, devices, setting.cluster)
    messages = [(step.backward_s * (1 - setting.overlap), count)]
    for bucket in buckets(step.gradients, step.ready, setting.bucket_bytes):
        ready = step.backward_s * (1 - setting.overlap * (1 - bucket.ready))
        messages.append((ready, all_reduce(bucket.size * setting.shrink, devices, setting.cluster)))
    return exposed(messages, step.backward_s)


class Bucket(NamedTuple):
    """Gradients that travel together: their bytes, and the share of the backward after which all are there."""

    size: int
    ready: float


def buckets(sizes: Sequence[int], ready: Sequence[float], cap: int | None = None) -> list[Bucket]:
    """Return DDP's buckets after its first step, which shows the order of the gradients.

    A bucket closes with the gradient that brings it to its cap (torch's ``compute_bucket_assignment_by_size``); without
    ``cap``, torch's default, with its smaller first bucket. ``ready``: when each gradient is there, ascending.
    """
    closed: list[Bucket] = []
    filled = 0
    for size, when in zip(sizes, ready, strict=True):
        filled += size
        limit = cap if cap is not None else DEFAULT_BUCKET if closed else FIRST_BUCKET_BYTES
        if filled >= limit:
            closed.append(Bucket(filled, when))
            filled = 0
    return [*closed, Bucket(filled, ready[-1])] if filled else closed


def exposed(messages: Sequence[tuple[float, float]], backward_s: float) -> float:
    """Return the seconds from the end of the backward to the end of the last message.

    ``messages``: the earliest start and the seconds of each, in the order of sending.
    """
    free = 0.0
    for ready, seconds in messages:  # one at a time
        free = max(free, ready) + seconds
    return max(0.0, free - backward_s)


def _fsdp(step: Step, devices: int, setting: Setting) -> float:
    """Return the seconds of exposed communication of fsdp.

    Blocks are gathered before their forward and backward, and their gradients scattered after it. The next block's
    messages overlap with the work on this one. Nothing overlaps with the gathers of the root and of the first block of
    each pass, nor with the scatters of the last block and the root.
    """
    *inner, around = step.blocks
    blocks = [size for size in inner if size]

    def gather(size: float) -> float:
        return all_gather(size * setting.shrink, devices, setting.cluster) if size else 0.0

    def scatter(size: float) -> float:
        return all_gather(size, devices, setting.cluster) if size else 0.0

    first, last = (blocks[0], blocks[-1]) if blocks else (0, 0)
    hidden = sum(map(gather, blocks[1:])), sum(map(gather, blocks[:-1])) + sum(map(scatter, blocks[1:]))
    open_ends = 2 * gather(around) + gather(first) + gather(last) + scatter(first) + scatter(around)
    late = max(0.0, hidden[0] - step.forward_s * setting.overlap)
    late += max(0.0, hidden[1] - step.backward_s * setting.overlap)
    short = 2 * all_reduce(COUNT_BYTES, devices, setting.cluster)  # loss and count; the norm
    return setting.accumulate * (open_ends + late) + short


def bytes_sent(step: Step, devices: int, setting: Setting) -> float:
    """Count bytes of a step: 2(n-1)/n of gradients; with fsdp (n-1)/n of the parameters twice, of gradients once."""
    ring = (devices - 1) / devices
    if setting.sharded:
        return ring * (2 * setting.shrink + 1) * sum(step.blocks) * setting.accumulate
    return 2 * ring * (setting.shrink * sum(step.gradients) + COUNT_BYTES * (devices > 1))


def expected_max(devices: int) -> float:
    """Return the expected maximum of n independent standard normal numbers (Blom 1958).

    Devices that are always slow, and pauses of all devices at once, are not included.
    """
    return NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))


def with_error_bars(step: Step, devices: int, setting: Setting) -> dict[str, Any]:
    """Make a row of a report: :func:`predict`, with a low and a high for samples a second and for efficiency.

    Each uncertain input is moved to its low and its high separately; the deviations add up in squares.
    """
    expected = predict(step, devices, setting)
    cases = [predict(case, devices, varied) for case, varied in _variations(step, setting)]
    slow, fast = _propagate(expected.samples_per_s, [case.samples_per_s for case in cases])
    lowest, highest = _propagate(expected.efficiency, [case.efficiency for case in cases])
    return {
        "gpus": devices,
        "step_ms": expected.step_s * 1e3,
        "samples_per_s": expected.samples_per_s,
        "samples_per_s_low": slow,
        "samples_per_s_high": fast,
        "efficiency": expected.efficiency,
        "efficiency_low": lowest,
        # It may be above 1, since fsdp divides the optimizer's work.
        "efficiency_high": max(expected.efficiency, min(1.0, highest)),
        "parts_ms": {name: seconds * 1e3 for name, seconds in expected.parts.items()},
        "sent_mb": expected.sent / 1e6,
    }


def _variations(step: Step, setting: Setting) -> Iterator[tuple[Step, Setting]]:
    """Yield a bad and a good case for each uncertain input, in turns."""
    for factor in (1 + step.spread, 1 / (1 + step.spread)):
        yield step.scaled(factor), setting
    for factor in (2.0, 0.5):
        yield replace(step, jitter_s=factor * step.jitter_s), setting
    for index in (2, 0):
        yield step, replace(setting, cluster=replace(setting.cluster, beta_index=index))
    for index in (2, 0):
        yield step, replace(setting, cluster=replace(setting.cluster, alpha_index=index))
    for share in (0.8, 1.0):  # messages and kernels share a GPU's memory and some of its multiprocessors
        yield step, replace(setting, overlap=share * setting.overlap)


def _propagate(expected: float, cases: Sequence[float]) -> tuple[float, float]:
    """Return the low and the high end of the error bar, from pairs of cases that move one input each."""
    pairs = list(zip(cases[::2], cases[1::2], strict=True))
    low = math.sqrt(sum(max(0.0, expected - min(pair)) ** 2 for pair in pairs))
    high = math.sqrt(sum(max(0.0, max(pair) - expected) ** 2 for pair in pairs))
    return max(0.0, expected - low), expected + high
