"""From one device's step to the step of many: computation, messages, loading and waiting for the slowest.

Pure, with the buckets in which DistributedDataParallel reduces gradients beside the backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any, NamedTuple

from lockstep.lab.forecast.collectives import Cluster, all_gather, all_reduce, all_reduce_between_nodes
from lockstep.planning.resolve import FIRST_BUCKET_BYTES
from lockstep.strategies import find_strategy

#: Lockstep sums loss, count and requests beside the gradients, in this number of bytes.
COUNT_BYTES = 40
#: Synchronised BatchNorm sums two numbers a channel, of a few hundred channels.
BLOCKING_BYTES = 4096
#: torch.nn.parallel.DistributedDataParallel's buckets: 25 MiB, the first 1 MiB so that messages begin early.
DEFAULT_BUCKET = 25 << 20
FIRST_BUCKET = FIRST_BUCKET_BYTES


@dataclass(frozen=True)
class Step:
    """One device's step, measured or modelled; seconds of one micro-batch of ``batch_size`` samples.

    Attributes:
        data_s: waiting for input. other_s: work of the host in between. jitter_s: standard deviation of a step.
        spread: relative uncertainty of all these times.
        gradients, ready: bytes of each gradient in the order of the backward, and when it is there (share of it).
        blocks: bytes of each block that fsdp shards separately.
        loader_rate: maximum samples a second of a rank's loader; ``None``: unknown.
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
    loader_rate: float | None = None

    @property
    def seconds(self) -> float:
        return self.data_s + self.forward_s + self.backward_s + self.optimizer_s + self.other_s

    def scaled(self, factor: float) -> Step:
        """Return the step on a device that takes ``factor`` times as long."""
        names = ("data_s", "forward_s", "backward_s", "optimizer_s", "other_s", "jitter_s")
        return replace(self, **{name: getattr(self, name) * factor for name in names})


@dataclass(frozen=True)
class Wish:
    """The request for a forecast: numbers of devices ``gpus``, ``per_node`` of them a node.

    ``interconnect``: as for :func:`~lockstep.lab.forecast.collectives.cluster_of`, or ``measured``, between the chosen
    devices. ``gpu``: a hypothetical one, whose step is modelled. ``memory``: bytes of each device, to choose the
    strategy, unless ``strategy`` is ``ddp`` or ``fsdp``. ``steps``, ``repeats``: of each measurement.
    """

    gpus: tuple[int, ...]
    interconnect: str = "nvlink,ib400"
    per_node: int = 8
    gpu: str | None = None
    memory: float | None = None
    strategy: str | None = None
    steps: int = 30
    repeats: int = 3


@dataclass(frozen=True)
class Setting:
    """The properties of a run that decide its speed on several devices.

    Attributes:
        overlap: share of the backward during which messages travel beside it: 1 on GPUs; 0 if the ranks'
            cores carry the messages.
        contention: how many times longer a device computes because others share its machine, by number of devices.
        blocking: short messages of each micro-batch that computation waits for: two for every synchronised BatchNorm.
        shrink: size of ddp's gradients and fsdp's gathered parameters as sent, against 32 bits.
        meeting_s: extra seconds of each message that computation waits for, if ranks share cores.
        joint: ddp's gradients and count travel in one message after the backward.
        hybrid: fsdp divides the model within each node only.
    """

    cluster: Cluster
    strategy: str = "ddp"
    accumulate: int = 1
    bucket_bytes: int | None = None
    shrink: float = 1.0
    overlap: float = 1.0
    contention: Mapping[int, float] = field(default_factory=dict)
    blocking: int = 0
    meeting_s: float = 0.0
    joint: bool = False
    hybrid: bool = False

    @property
    def sharded(self) -> bool:
        """Blocks are gathered and gradients scattered; else gradients are summed by all-reduce."""
        return find_strategy(self.strategy).messages == "gather"

    def holders(self, devices: int) -> int:
        if not self.sharded:
            return 1
        return min(devices, self.cluster.per_node) if self.hybrid else devices

    def slowed(self, devices: int) -> float:
        """Return the contention of this number of devices, or of the nearest one below."""
        measured_counts = [count for count in self.contention if count <= devices]
        return self.contention[max(measured_counts)] if measured_counts else 1.0


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
    single = sum(_parts(step, 1, replace(setting, contention={})).values())
    samples = step.batch_size * setting.accumulate * devices
    efficiency = single / taken if taken else 1.0
    return Prediction(devices, taken, samples / taken, efficiency, parts, bytes_sent(step, devices, setting))


def _parts(step: Step, devices: int, setting: Setting) -> dict[str, float]:
    here = step.scaled(setting.slowed(devices))
    k = setting.accumulate
    compute = k * (here.forward_s + here.backward_s + here.other_s) + here.optimizer_s / setting.holders(devices)
    waiting = 0.0
    if devices > 1:
        waiting = _fsdp(here, devices, setting) if setting.sharded else _ddp(here, devices, setting)
        waiting += k * setting.blocking * all_reduce(BLOCKING_BYTES, devices, setting.cluster)
        # Of fsdp each block's two gathers and its scatter; and the last message: ddp's gradients, or fsdp's norm.
        gathers = 3 * sum(size > 0 for size in step.blocks) if setting.sharded else 0
        waiting += (k * (gathers + setting.blocking) + 1) * setting.meeting_s
    straggler = here.jitter_s * math.sqrt(k) * expected_max(devices)
    load = 0.0 if step.loader_rate is None else k * step.batch_size / step.loader_rate
    data = max(k * here.data_s, load - compute - waiting - straggler)
    return {"compute": compute, "communication": waiting, "straggler": straggler, "data": data}


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
        limit = cap if cap is not None else DEFAULT_BUCKET if closed else FIRST_BUCKET
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
    holders = setting.holders(devices)

    def gather(size: float) -> float:
        return all_gather(size * setting.shrink, holders, setting.cluster) if size else 0.0

    def scatter(size: float) -> float:
        between = all_reduce_between_nodes(size, devices, setting.cluster) if setting.hybrid else 0.0
        return all_gather(size, holders, setting.cluster) + between if size else 0.0

    first, last = (blocks[0], blocks[-1]) if blocks else (0, 0)
    hidden = sum(map(gather, blocks[1:])), sum(map(gather, blocks[:-1])) + sum(map(scatter, blocks[1:]))
    open_ends = 2 * gather(around) + gather(first) + gather(last) + scatter(first) + scatter(around)
    late = max(0.0, hidden[0] - step.forward_s * setting.overlap)
    late += max(0.0, hidden[1] - step.backward_s * setting.overlap)
    short = 2 * all_reduce(COUNT_BYTES, devices, setting.cluster)  # loss and count; the norm
    return setting.accumulate * (open_ends + late) + short


def bytes_sent(step: Step, devices: int, setting: Setting) -> float:
    """Bytes of a step: 2(n-1)/n of ddp's gradients; with fsdp (n-1)/n of the parameters twice, of gradients once.

    Hybrid: so inside a node of n devices, and then 2(m-1)/m of a device's part among m nodes.
    """
    ring = (devices - 1) / devices
    if setting.sharded:
        holders = setting.holders(devices)
        nodes = setting.cluster.nodes(devices) if setting.hybrid else 1
        share = (holders - 1) / holders * (2 * setting.shrink + 1) + 2 * (nodes - 1) / nodes / holders
        return share * sum(step.blocks) * setting.accumulate
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
    cases = [predict(case, devices, by) for case, by in _variations(step, setting)]
    pairs = list(zip(cases[::2], cases[1::2], strict=True))
    slow, fast = _propagate(expected.samples_per_s, [(bad.samples_per_s, good.samples_per_s) for bad, good in pairs])
    lowest, highest = _propagate(expected.efficiency, [(bad.efficiency, good.efficiency) for bad, good in pairs])
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
    for figure in (2, 0):
        yield step, replace(setting, cluster=replace(setting.cluster, beta_place=figure))
    for figure in (2, 0):
        yield step, replace(setting, cluster=replace(setting.cluster, alpha_place=figure))
    for share in (0.8, 1.0):  # messages and kernels share a GPU's memory and some of its multiprocessors
        yield step, replace(setting, overlap=share * setting.overlap)
    for factor in (1.5, 0.5):
        yield step, replace(setting, meeting_s=factor * setting.meeting_s)


def _propagate(expected: float, pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    low = math.sqrt(sum(max(0.0, expected - min(pair)) ** 2 for pair in pairs))
    high = math.sqrt(sum(max(0.0, max(pair) - expected) ** 2 for pair in pairs))
    return max(0.0, expected - low), expected + high
