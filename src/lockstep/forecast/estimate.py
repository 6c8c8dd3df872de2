"""``lockstep memory``: from a task and devices to the memory that each of them needs, before anything is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import chain
from typing import Any, TextIO

import numpy as np

from lockstep.bench.trials import Subject
from lockstep.data.requests import fetch
from lockstep.engine.strategies.stages import shares
from lockstep.errors import UnsupportedError
from lockstep.forecast.footprint import Footprint, StageCount, bytes_of, count_stages, count_step
from lockstep.forecast.memory import (
    Kinds,
    choose_strategy,
    data_parallel_memory,
    device_memory,
    gigabytes,
    largest_batch,
    pipeline_memory,
    total,
)
from lockstep.hardware.detect import detect_devices
from lockstep.planning.batch import BatchPlan, resolve_batch
from lockstep.strategies import StrategySpec, auto_strategy, find_strategy
from lockstep.telemetry.tables import print_table, say

#: torch's allocator hands out GPU memory in blocks of these bytes (c10/cuda/CUDACachingAllocator, kMinBlockSize).
GPU_BLOCK = 512
#: GPUs of a hypothetical machine.
GPUS_PER_NODE = 8
_KINDS = ("parameters", "buffers", "gradients", "optimizer", "batch", "activations", "gathered", "messages", "device")


@dataclass
class Counting:
    """Counts steps of a task as they would be on a device of ``subject``'s placement, or on ``gpus`` GPUs elsewhere.

    ``per_node``: how many of them make a node; ``None``: they are all in one.
    """

    subject: Subject
    gpus: int | None = None
    per_node: int | None = None

    def __post_init__(self) -> None:
        self.footprint = lru_cache(maxsize=64)(self._footprint)
        self.stages = lru_cache(maxsize=64)(self._stages)

    @property
    def on_gpu(self) -> bool:
        return self.gpus is not None or self.subject.base.placement.accelerator == "gpu"

    @property
    def _block(self) -> int:
        return GPU_BLOCK if self.on_gpu else 1

    @property
    def ranks(self) -> int:
        return self.gpus or len(self.subject.base.placement.devices)

    @property
    def most(self) -> int:
        """The largest batch that the data set has for each device."""
        return max(1, self.subject.base.plan.task.train_samples // self.ranks)

    def batch(self, size: int) -> Any:
        """``size`` training samples; the longest ones where the task gives their lengths."""
        base = self.subject.base
        where = self._order[:size]
        return fetch(base.datasets.train, base.task.collate, base.config.training.seed, 0, where)

    @cached_property
    def _order(self) -> Any:
        lengths = self.subject.base.task.lengths()
        samples = self.subject.base.plan.task.train_samples
        return np.arange(samples) if lengths is None else np.argsort(np.asarray(lengths))[::-1]

    @cached_property
    def shared(self) -> BatchPlan:
        """How the devices share a global batch: hypothetical GPUs divide a constant one again.

        Raises:
            ConfigError: it has fewer samples than there are devices.
        """
        base = self.subject.base
        training = base.config.training
        if self.gpus is None or training.global_batch_size is None:
            return base.plan.batch
        return resolve_batch(
            samples=base.plan.task.train_samples,
            ranks=self.gpus,
            devices_per_rank=1,
            batch_size=training.batch_size,
            accumulate=training.accumulate,
            global_batch_size=training.global_batch_size,
            tail="spread",
            lanes=None,
            has_batchnorm=base.facts.has_batchnorm,
            sync_batchnorm=True,
        )[0]

    @property
    def size(self) -> int:
        """The batch of a device as planned, as far as there are samples."""
        return min(self.shared.batch_size, self.subject.base.plan.task.train_samples)

    def _footprint(self, size: int, keep_gradients: bool, recompute: bool = False) -> Footprint:
        how: dict[str, Any] = {"keep_gradients": keep_gradients, "recompute": recompute, "block": self._block}
        return count_step(self.subject.base.task, self.subject.base.config, self.batch(size), size, **how)

    def _stages(self, size: int, devices: int) -> list[StageCount]:
        base = self.subject.base
        return count_stages(base.task, base.config, self.batch(size), size, devices=devices, block=self._block)

    def memory(self, strategy: str, ranks: int, size: int) -> Kinds:
        """What the fullest of ``ranks`` devices has."""
        return max(self.each(strategy, ranks, size).values(), key=total)

    def each(self, strategy: str, ranks: int, size: int) -> dict[str, Kinds]:
        """What each kind of device has, by name: the name of the strategy where all are alike.

        A rank with several micro-batches keeps its gradients between them.
        """
        base, spec, accumulates = self.subject.base, find_strategy(strategy), self.shared.accumulate > 1
        if spec.scatters:
            pair = data_parallel_memory(self.footprint(size, True), ranks, accumulates=accumulates)
            return dict(zip((strategy, f"{strategy}, each other"), pair, strict=True))
        if spec.state == "staged":
            return {f"device {place}": each for place, each in enumerate(self.pipeline(ranks, size), start=1)}
        offloaded, holders, recompute = False, ranks, base.config.training.activation_checkpointing
        if "fsdp" in spec.settings:
            settings = base.config.fsdp
            recompute, offloaded = recompute or settings.activation_checkpointing, settings.cpu_offload and self.on_gpu
            holders = min(ranks, (self.per_node if settings.sharding == "hybrid" else None) or ranks)
        footprint = self.footprint(size, not spec.one_process or accumulates, recompute)
        return {strategy: device_memory(footprint, strategy, holders, on_gpu=self.on_gpu, offloaded=offloaded)}

    def pipeline(self, devices: int, size: int) -> list[Kinds]:
        """What each device of a pipeline holds, with stages cut by what their operators compute and move."""
        config, stages = self.subject.base.config, self.stages(size, devices)
        return pipeline_memory(
            stages,
            shares([stage.cost for stage in stages], devices),
            batch_bytes=bytes_of(self.batch(size)),
            schedule=config.pipeline.schedule,
            micro_batches=self.micro_batches(size),
            on_gpu=self.on_gpu,
        )

    def micro_batches(self, size: int) -> int:
        """Of a pipeline's step; one process has one of them at a time."""
        config = self.subject.base.config
        if config.pipeline.in_process:
            return 1
        wanted = config.training.global_batch_size
        return config.training.accumulate if wanted is None else -(-wanted // size)


def estimate_memory(
    subject: Subject, *, gpus: int | None = None, limit: float | None = None, strategy: str | None = None
) -> dict[str, Any]:
    """Memory by strategy, the largest batch that fits, and which strategy to take.

    Args:
        gpus: a number of hypothetical GPUs, instead of the chosen devices.
        limit: bytes of each device; ``None`` asks the devices, as far as they are here.
        strategy: only this one; ``None``: all that the number of devices allows.

    Raises:
        UsageError: settings that contradict each other.
    """
    base, counting = subject.base, Counting(subject, gpus, None if gpus is None else GPUS_PER_NODE)
    ranks, size = counting.ranks, counting.size
    if strategy is not None:
        _refuse(find_strategy(strategy), counting)

    def need(name: str, size: int) -> float:
        return total(counting.memory(name, ranks, size))

    devices = list(base.placement.devices) if gpus is None else [f"{gpus} GPU{'s' * (gpus > 1)}"]
    limit = _free(devices) if limit is None and gpus is None else limit
    choices = (auto_strategy(ranks), auto_strategy(ranks, fits=False))
    wanted = (strategy,) if strategy else tuple(dict.fromkeys(choices))
    estimates = {name: counting.memory(name, ranks, size) for name in wanted}
    for name in wanted:
        estimates |= counting.each(name, ranks, size)
    totals = {name: total(kinds) for name, kinds in estimates.items()}
    chosen, reason = (strategy, "as set") if strategy else choose_strategy(totals, ranks, limit)
    largest = {
        name: largest_batch(partial(need, name), limit, size, counting.most) for name in wanted if limit is not None
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
        "notes": _notes(counting, size, [find_strategy(name) for name in wanted]),
    }


def _refuse(spec: StrategySpec, counting: Counting) -> None:
    """Raise :class:`UnsupportedError` when these devices cannot have the strategy."""
    ranks, per_node = counting.ranks, counting.per_node
    if ranks == 1 and (spec.scatters or spec.state == "staged"):
        raise UnsupportedError(
            f"strategy {spec.name} needs several devices",
            why=spec.summary,
            fix="name them with --devices, or a number of hypothetical GPUs: --gpus 2",
        )
    if spec.scatters and per_node is not None and ranks > per_node:
        raise UnsupportedError(
            f"strategy {spec.name} cannot use {ranks} GPUs",
            why=f"it is one process on one machine, which is taken to have {per_node}",
            fix=f"--gpus {per_node}, or --strategy ddp",
        )
    if spec.refuses is not None and counting.gpus is None:
        spec.refuses(counting.subject.base.placement.devices)


def _free(devices: Sequence[str]) -> float | None:
    """Bytes that the scarcest of the devices has; ranks that share one share its memory."""
    known = {device.id: device.free_gb if device.kind == "cpu" else device.memory_gb for device in detect_devices()}
    sizes = [size * 1e9 / devices.count(name) for name in devices if (size := known.get(name)) is not None]
    return min(sizes) if len(sizes) == len(devices) else None


def _notes(counting: Counting, size: int, specs: Sequence[StrategySpec]) -> list[str]:
    footprint = counting.footprint(size, any(not spec.one_process for spec in specs))
    how = (
        "tensors without memory" if footprint.on == "fake" else "real tensors on the CPU, since the model reads values"
    )
    notes = [f"two steps of the task's own model, loss and optimizer were counted on {how}"]
    planned = counting.shared.batch_size
    if size < planned:
        notes.append(f"there are only {size} samples for a batch of {planned}")
    if counting.subject.base.task.lengths() is not None:
        notes.append("the batch is the one of the longest samples")
    if counting.on_gpu:
        notes.append("device: an allowance for context, libraries and lost blocks; kernels' own scratch is not counted")
    for spec in specs:
        name = spec.name
        if spec.state == "sharded":
            notes.append(f"{name}: parameters, gradients and optimizer are sharded; gathered: the blocks in use")
        if "fsdp" in spec.settings:
            fsdp = counting.subject.base.config.fsdp
            if fsdp.sharding == "hybrid" and counting.per_node is not None:
                notes.append(f"fsdp.sharding hybrid: nodes of {counting.per_node} GPUs are assumed")
            if fsdp.cpu_offload and counting.on_gpu:
                notes.append("fsdp.cpu_offload: parameters, gradients and optimizer are in host memory")
        if spec.scatters:
            notes.append(
                f"{name}: the first GPU also has the optimizer, batch and outputs of all GPUs with their gradients "
                "(gathered), and the sum of the gradients: it is the fullest"
            )
        if spec.state == "staged":
            notes += _pipeline_notes(counting, size)
        if spec.has_buckets:
            notes.append(f"{name}: the gradients are in its buckets, which take no further memory")
    return notes


def _pipeline_notes(counting: Counting, size: int) -> list[str]:
    config, devices = counting.subject.base.config.pipeline, counting.ranks
    stages, parts = len(counting.stages(size, devices)), counting.micro_batches(size)
    how = f"{parts} micro-batch{'es' * (parts > 1)} a step ({config.schedule})"
    notes = [
        f"pipeline: the fullest device; {'one micro-batch at a time' if config.in_process else how}",
        "messages: what a device has received, and what it has sent and keeps until the step's end",
    ]
    if stages > devices:
        notes.append(
            f"{stages} stages are cut by what their operators compute and move; a training cuts by measured times"
        )
    return notes


def print_memory(found: Mapping[str, Any], stream: TextIO) -> None:
    """A table of kinds by strategy, and what follows."""
    names = list(found["strategies"])
    rows = [
        (kind, *(gigabytes(found["strategies"][name].get(kind, 0)) for name in names))
        for kind in dict.fromkeys((*_KINDS, *chain.from_iterable(found["strategies"].values())))
        if any(kind in found["strategies"][name] for name in names)
    ]
    if found["largest_batch"]:
        rows.append(("largest batch", *(_largest(found, name) for name in names)))
    print_table(("of each device", *names), rows, stream)
    limit = "not known" if found["limit"] is None else gigabytes(found["limit"])
    say(f"batch {found['batch_size']} per device on {', '.join(found['devices'])}; memory of a device: {limit}", stream)
    say(f"take {found['chosen']['strategy']}: {found['chosen']['reason']}", stream)
    for note in found["notes"]:
        say(f"note: {note}", stream)


def _largest(found: Mapping[str, Any], name: str) -> str:
    size = found["largest_batch"].get(name)
    if size is None:
        return "-"
    return f"{size} (all of the data)" if size == found["most"] else str(size)
