"""``lockstep memory``: predict the memory that a task needs on each device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import chain
from typing import Any, TextIO

import numpy as np
from pydantic import ByteSize, TypeAdapter, ValidationError

from lockstep.config import RunConfig
from lockstep.data.requests import fetch
from lockstep.errors import UnsupportedError, UsageError, many
from lockstep.hardware.detect import detect_devices
from lockstep.hardware.resolve import CONTEXT
from lockstep.lab.bench.trials import Subject
from lockstep.lab.forecast.footprint import Footprint, StepCounter
from lockstep.planning.batch import BatchPlan, resolve_batch
from lockstep.strategies import StrategySpec, auto_strategy, find_strategy, strategies
from lockstep.telemetry.console import print_table, say

#: More devices than any cluster has.
MOST = 1_000_000
#: torch's allocator hands out GPU memory in blocks of these bytes (c10/cuda/CUDACachingAllocator, kMinBlockSize).
GPU_BLOCK = 512
#: The share that a GPU's allocator loses to blocks that do not fit: an allowance, not a measurement.
GPU_LOSS = 0.05
#: Rounds of the search for the largest batch; each of them counts a step.
_ROUNDS = 5
_KINDS = ("parameters", "buffers", "gradients", "optimizer", "batch", "activations", "gathered", "device")
#: Bytes of one device, by kind.
Kinds = dict[str, float]


def total(kinds: Mapping[str, float]) -> float:
    return sum(kinds.values())


def device_memory(footprint: Footprint, strategy: str, ranks: int, *, on_gpu: bool, offloaded: bool = False) -> Kinds:
    """Predict the memory of one device with a batch as in ``footprint``.

    With a replicated state it has everything; ddp's footprint must be counted with gradients kept, as its buckets do.
    With a sharded one (FSDP2, by block) it has 1/``ranks`` of parameters, gradients and optimizer (none where
    ``offloaded``); also the root's parameters, two gathered blocks (the one in use and the next), and one block's
    gradients twice (as computed, and as input of the reduce-scatter); or, if that is more, the root's parameters twice
    (as received, and as used) and a block's.
    """
    kinds: Kinds = dict(footprint.kinds)
    spec = find_strategy(strategy)
    if spec.memory is not None:
        kinds = dict(spec.memory(kinds, ranks))
    elif spec.state == "sharded":
        for kind in ("parameters", "gradients", "optimizer"):
            kinds[kind] = 0.0 if offloaded else kinds[kind] / ranks
        *blocks, root = footprint.blocks
        largest = max(blocks, default=0)
        kinds["gathered"] = max(root + 4 * largest, 2 * root + largest)
    # On GPUs there is memory outside tensors.
    return {**kinds, "device": CONTEXT + GPU_LOSS * total(kinds)} if on_gpu else kinds


def largest_batch(memory_of: Callable[[int], float], limit: float, first: int, max_batch: int) -> int:
    """Find the largest batch up to ``max_batch`` whose memory is within ``limit``, beginning at ``first``.

    Memory grows with the batch along a convex, piecewise linear curve (it is the highest of many moments, each of
    them linear), so a line through two sizes leads to a candidate, which is then counted itself.
    """
    needs = {size: memory_of(size) for size in {min(first, max_batch), min(2 * first, max_batch), 1}}
    if needs[1] > limit:
        return 0
    for _ in range(_ROUNDS):
        fits = max(size for size, need in needs.items() if need <= limit)
        fails = min((size for size, need in needs.items() if need > limit), default=max_batch + 1)
        if fits + 1 == fails:
            return fits
        below = max((size for size in needs if size < fits), default=fits)
        smaller, larger = (fits, fails) if fails in needs else (below, fits)
        guess = 2 * fits
        if needs[larger] > needs[smaller]:
            guess = fits + int((limit - needs[fits]) * (larger - smaller) / (needs[larger] - needs[smaller]))
        candidate = max(fits + 1, min(guess, fails - 1))
        needs[candidate] = memory_of(candidate)
    return max(size for size, need in needs.items() if need <= limit)


def choose_strategy(totals: Mapping[str, float], ranks: int, limit: float | None) -> tuple[str, str]:
    whole = auto_strategy(ranks)
    sharded = auto_strategy(ranks, fits=False)
    if limit is None:
        return whole, "the devices' memory is not known; give it with --memory 80GB"
    has = gigabytes(limit)
    need = totals[whole]
    less = totals[sharded]
    if need <= limit:
        return whole, f"a device needs {gigabytes(need)} of {has}"
    if less <= limit:
        return sharded, f"{whole} needs {gigabytes(need)} of {has}, {sharded} {gigabytes(less)}"
    lowest_need = gigabytes(min(need, less))
    return whole, f"nothing fits: at least {lowest_need} of {has}; take a smaller batch or more devices"


def check_strategy(name: str | None, *, speed: bool = False) -> str | None:
    """Check a strategy's name; ``None`` for ``auto``. ``speed``: refuse one whose speed cannot be predicted."""
    if name in (None, "auto"):
        return None
    spec = find_strategy(name)
    if speed and spec.messages is None:
        predictable = ", ".join(name for name, spec in strategies().items() if spec.messages)
        raise UnsupportedError(
            f"no forecast available for strategy {name}",
            why="its communication is not modelled",
            fix=f"name one of {predictable}, leave --strategy out, or measure it with `lockstep bench scaling`",
        )
    return spec.name


def gigabytes(size: float) -> str:
    """Format bytes: MB below a GB, in units of 1e6 and 1e9."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"


def parse_memory(text: str) -> float:
    """Convert ``80GB``, ``24GiB``, ``500MB`` or bytes to bytes. Raises :class:`UsageError`."""
    with contextlib.suppress(ValidationError):
        size = TypeAdapter(ByteSize).validate_python(text)
        if size > 0:
            return float(size)
    raise UsageError(f"invalid value for --memory: {text!r}", fix="write for example --memory 80GB or 24GiB")


@dataclass
class Counting:
    """Counts steps of a task on a device of ``subject``'s placement, or on ``gpus`` hypothetical GPUs."""

    subject: Subject
    gpus: int | None = None

    def __post_init__(self) -> None:
        self.base = self.subject.base
        self.config = self.subject.base.config
        self.on_gpu = self.gpus is not None or self.base.placement.accelerator == "gpu"
        self.ranks = self.gpus or len(self.base.placement.devices)
        self.footprint = lru_cache(maxsize=64)(self._footprint)

    @property
    def most(self) -> int:
        """The largest batch that the data set has for each device."""
        return max(1, self.base.plan.task.train_samples // self.ranks)

    @property
    def size(self) -> int:
        """The batch of a device as planned, as far as there are samples."""
        return min(self.shared.batch_size, self.base.plan.task.train_samples)

    @cached_property
    def shared(self) -> BatchPlan:
        """How the devices share a global batch: hypothetical GPUs divide a constant one again."""
        training = self.config.training
        if self.gpus is None or training.global_batch_size is None:
            return self.base.plan.batch
        return resolve_batch(
            samples=self.base.plan.task.train_samples,
            ranks=self.gpus,
            devices_per_rank=1,
            batch_size=training.batch_size,
            accumulate=training.accumulate,
            global_batch_size=training.global_batch_size,
            tail="spread",
            lanes=None,
            has_batchnorm=self.base.facts.has_batchnorm,
            sync_batchnorm=True,
        )[0]

    @cached_property
    def _order(self) -> Any:
        """The longest samples first where the task gives their lengths."""
        lengths = self.base.task.lengths()
        samples = self.base.plan.task.train_samples
        return np.arange(samples) if lengths is None else np.argsort(np.asarray(lengths))[::-1]

    def batch(self, size: int) -> Any:
        """Return ``size`` training samples, the longest ones."""
        task = self.base.task
        seed = self.config.training.seed
        return fetch(self.base.datasets.train, task.collate, seed, 0, self._order[:size])

    def _footprint(self, size: int, keep_gradients: bool, recompute: bool = False) -> Footprint:
        block = GPU_BLOCK if self.on_gpu else 1
        return StepCounter(self.base.task, self.config, size, keep_gradients, block, recompute).count(self.batch(size))

    def memory(self, strategy: str, ranks: int, size: int) -> Kinds:
        """Return the memory of a device; a rank with several micro-batches keeps its gradients between them."""
        spec = find_strategy(strategy)
        offloaded = False
        if "fsdp" in spec.settings:
            offloaded = self.config.fsdp.cpu_offload and self.on_gpu
            refuse_hybrid(self.config)
        keep_gradients = not spec.one_process or self.shared.accumulate > 1
        footprint = self.footprint(size, keep_gradients, self.config.recomputes_activations(strategy))
        return device_memory(footprint, strategy, ranks, on_gpu=self.on_gpu, offloaded=offloaded)


def estimate_memory(
    subject: Subject, *, gpus: int | None = None, limit: float | None = None, strategy: str | None = None
) -> dict[str, Any]:
    """Predict memory by strategy, the largest batch that fits, and choose a strategy.

    ``gpus``: a number of hypothetical GPUs, instead of the chosen devices. ``limit``: bytes of each; ``None`` asks the
    devices that are here. ``strategy``: only this one. Raises :class:`UsageError`.
    """
    base = subject.base
    counting = Counting(subject, gpus)
    ranks = counting.ranks
    size = counting.size
    if strategy is not None:
        _refuse(find_strategy(strategy), base.placement.devices if gpus is None else ())

    def need(name: str, size: int) -> float:
        return total(counting.memory(name, ranks, size))

    devices = list(base.placement.devices) if gpus is None else [many(gpus, "GPU")]
    limit = _free(devices) if limit is None and gpus is None else limit
    automatic = dict.fromkeys(auto_strategy(ranks, fits=fits) for fits in (True, False))
    names = (strategy,) if strategy else tuple(automatic)
    estimates = {name: counting.memory(name, ranks, size) for name in names}
    totals = {name: total(kinds) for name, kinds in estimates.items()}
    chosen, reason = (strategy, "as set") if strategy else choose_strategy(totals, ranks, limit)
    largest = {
        name: largest_batch(partial(need, name), limit, size, counting.most) for name in names if limit is not None
    }
    return {
        "task": subject.name,
        "devices": devices,
        "precision": base.placement.precision,
        "batch_size": size,
        "accumulate": counting.shared.accumulate,
        "limit": limit,
        "strategies": {name: {**kinds, "total": totals[name]} for name, kinds in estimates.items()},
        "largest_batch": largest,
        "most": counting.most,
        "chosen": {"strategy": chosen, "reason": reason},
        "notes": _notes(counting, size, [find_strategy(name) for name in names]),
    }


def _refuse(spec: StrategySpec, devices: tuple[str, ...]) -> None:
    """Refuse a strategy whose memory cannot be predicted, or that cannot use ``devices``."""
    if spec.memory is None and (spec.scatters or spec.state == "staged"):
        raise UnsupportedError(
            f"no prediction available for the memory of strategy {spec.name}",
            why="its devices have different parts of a step",
            fix=f"measure it: `lockstep bench batch-size --strategy {spec.name}`",
        )
    if spec.refuses is not None and devices:
        spec.refuses(devices)


def refuse_hybrid(config: RunConfig) -> None:
    if config.fsdp.sharding == "hybrid":
        raise UnsupportedError(
            "no prediction available for fsdp.sharding=hybrid",
            why="it depends on the GPUs of a node",
            fix="set fsdp.sharding=full, or measure it: `lockstep bench batch-size`, `lockstep bench scaling`",
        )


def _free(devices: Sequence[str]) -> float | None:
    """Return the smallest memory of ``devices`` in bytes; ranks that share a device share its memory."""
    device_gb = {device.id: device.free_gb if device.kind == "cpu" else device.memory_gb for device in detect_devices()}
    sizes = [size * 1e9 / devices.count(name) for name in devices if (size := device_gb.get(name)) is not None]
    return min(sizes) if len(sizes) == len(devices) else None


def _notes(counting: Counting, size: int, specs: Sequence[StrategySpec]) -> list[str]:
    fsdp = counting.config.fsdp
    uses_fsdp = any("fsdp" in spec.settings for spec in specs)
    footprint = counting.footprint(size, any(not spec.one_process for spec in specs))
    tensors = "tensors without memory" if footprint.on == "fake" else "real tensors, since the model reads values"
    notes = {
        f"two steps of the task's model, loss and optimizer were counted on {tensors}": True,
        f"there are only {size} samples for a batch of {counting.shared.batch_size}": size < counting.shared.batch_size,
        "the batch is the one of the longest samples": counting.base.task.lengths() is not None,
        "device: an allowance for context, libraries and lost blocks; scratch memory of kernels is not counted": (
            counting.on_gpu
        ),
        "gathered: the blocks in use; the rest of the model is sharded": any(s.state == "sharded" for s in specs),
        "ddp: the gradients are in its buckets, which take no further memory": any(s.has_buckets for s in specs),
        "fsdp.cpu_offload: parameters, gradients and optimizer are in host memory": (
            uses_fsdp and fsdp.cpu_offload and counting.on_gpu
        ),
    }
    return [note for note, applies in notes.items() if applies]


def print_memory(estimate: Mapping[str, Any], stream: TextIO) -> None:
    by_name = estimate["strategies"]
    largest = estimate["largest_batch"]
    rows = [
        (kind, *(gigabytes(kinds.get(kind, 0)) for kinds in by_name.values()))
        for kind in dict.fromkeys((*_KINDS, *chain.from_iterable(by_name.values())))
        if any(kind in kinds for kinds in by_name.values())
    ]
    if largest:
        shown = {name: f"{size}{' (all of the data)' * (size == estimate['most'])}" for name, size in largest.items()}
        rows.append(("largest batch", *(shown.get(name, "-") for name in by_name)))
    print_table(("of each device", *by_name), rows, stream)
    limit = "not known" if estimate["limit"] is None else gigabytes(estimate["limit"])
    devices = ", ".join(estimate["devices"])
    say(f"batch {estimate['batch_size']} per device on {devices}; memory of a device: {limit}", stream)
    say(f"take {estimate['chosen']['strategy']}: {estimate['chosen']['reason']}", stream)
    for note in estimate["notes"]:
        say(f"note: {note}", stream)
