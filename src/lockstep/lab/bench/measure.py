"""Take real training steps on the ranks, and measure their time and memory."""

from __future__ import annotations

import gc
import resource
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lockstep._compat.torch import reset_compiler
from lockstep.engine.diagnostics.mfu import flops_of_sample
from lockstep.engine.runtime import rank_device
from lockstep.engine.training_data import training_source
from lockstep.hardware.detect import usable_memory
from lockstep.hardware.resolve import Placement
from lockstep.hardware.world import World
from lockstep.lab.bench.timing import Site, Stopwatch, counted_steps, on_site, training
from lockstep.lab.bench.trials import Case, TrialRank
from lockstep.planning import Plan

#: A rank is slow if its work takes this many times the median of the ranks.
SLOW = 1.25
#: This share of the fastest and of the slowest steps is left out of the parts: a hiccup is not the rule.
TRIM = 0.1
#: Share of a machine's free memory that the ranks of a trial on its CPU may take together.
CPU_SHARE = 0.8

Steps = Sequence[Mapping[str, float]]


def measure_cases(rank: TrialRank, first: Case, further_cases: Sequence[Case], counts_flops: bool) -> None:
    with on_site(rank, first.config, first.plan) as site:
        flops = None
        note = "not counted"
        if counts_flops:
            source = training_source(site.task, site.datasets, first.plan)
            flops, note = flops_of_sample(site.task, source, first.plan)
        for case in (first, *further_cases):
            row = measure(site, case)
            per_step = None if flops is None else flops * case.plan.batch.global_batch
            rank.report({**case.label, **row, "flops_per_step": per_step, "flops_note": note})


def measure(site: Site, case: Case) -> dict[str, Any]:
    """Measure time and memory of the steps of ``case``; the result is the same on every rank."""
    plan = case.plan
    watch = Stopwatch(site.device)
    devices = _own_devices(plan, site.device)
    reset_peak_memory(devices)
    with training(site, case.config, plan, watch) as (built, steps):
        several = site.rank.world.size > 1
        settle = _watch_last_gradient(built.strategy.module, watch) if several else lambda: None
        for number in counted_steps(site, case, watch, steps):
            if number == case.warm_up:
                settle()
    parts = site.collectives.all_gather(watch.steps())
    peaks = list(chain.from_iterable(site.collectives.all_gather(peak_memory(devices))))
    release(site.device)
    row = summarise(parts, plan.batch.global_batch)
    return {
        **row,
        "global_batch": plan.batch.global_batch,
        "accumulate": plan.batch.accumulate,
        "epoch_s": plan.task.train_samples / row["samples_per_s"],
        "memory_mb": max(peaks) / 1e6,
        "memory_mb_per_device": [peak / 1e6 for peak in peaks],
    }


def _own_devices(plan: Plan, device: torch.device) -> list[torch.device]:
    """Return the devices of this rank: one, or all of them in a single process (dp)."""
    if plan.world_size > 1:
        return [device]
    return [rank_device([name], World()) for name in dict.fromkeys(plan.placement["devices"])]


def _watch_last_gradient(model: nn.Module, watch: Stopwatch) -> Callable[[], None]:
    """Begin ``communication`` with the last gradient that a rank computes, since no computation hides it any more.

    The first steps show which parameter is the last. Call the result after them, to watch that parameter only.
    """
    last: list[Tensor] = []

    def note(parameter: Tensor) -> None:
        last[:] = [parameter]

    handles = [p.register_post_accumulate_grad_hook(note) for p in model.parameters() if p.requires_grad]

    def settle() -> None:
        for handle in handles:
            handle.remove()
        for parameter in last:
            parameter.register_post_accumulate_grad_hook(lambda _: watch.enter("communication"))

    return settle


def reset_peak_memory(devices: Sequence[torch.device]) -> None:
    """Start counting for :func:`peak_memory`."""
    if devices[0].type == "cuda":
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(devices: Sequence[torch.device]) -> list[int]:
    """Return the largest number of bytes in use since :func:`reset_peak_memory`, for each device of this rank.

    On a GPU: memory of torch's allocator; on a CPU: the process's resident memory, whose peak Linux can reset (proc(5),
    ``clear_refs``, value 5; ``VmHWM``).
    """
    if devices[0].type == "cuda":
        return [torch.cuda.max_memory_allocated(device) for device in devices]
    return [_status("VmHWM")]


def _status(name: str) -> int:
    """Return a size of this process from ``/proc``, in bytes."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return next(int(words[1]) * 1024 for words in lines if words[0] == f"{name}:")


def memory_share(placement: Placement) -> int | None:
    """Return the bytes that each rank on a CPU may allocate, so that the trial runs out of memory, not the machine."""
    if placement.accelerator == "gpu":
        return None
    return int(usable_memory()[1] * CPU_SHARE / placement.world_size)


def limit_memory(extra: int) -> None:
    """Let this process allocate at most ``extra`` bytes more than it has now; beyond it allocations fail.

    RLIMIT_DATA counts private writable memory (setrlimit(2), since Linux 4.7), not mapped files.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft_limit = _status("VmData") + extra
    if hard != resource.RLIM_INFINITY:
        soft_limit = min(soft_limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft_limit, hard))


def release(device: torch.device) -> None:
    """Free the memory of the last case."""
    gc.collect()
    reset_compiler()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def spread(name: str, values: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
    """Return the median of ``values`` as ``name``, their quartiles as ``name_low`` and ``name_high``."""
    low, median, high = np.quantile(np.asarray(values, dtype=float), (0.25, 0.5, 0.75)).tolist()
    return {name: median, f"{name}_low": low, f"{name}_high": high}


def with_waits(ranks: Sequence[Steps]) -> list[list[dict[str, float]]]:
    """Separate waiting for a slower rank (``wait``) from ``communication``.

    All ranks leave the reduction together, so the time from one reduction to the next is the same for all; a rank
    that has less work than the busiest one waits for the difference, inside its communication.
    """
    result: list[list[dict[str, float]]] = [[] for _ in ranks]
    for steps in zip(*ranks, strict=True):
        busy = [sum(parts.values()) - parts["communication"] for parts in steps]
        for busy_s, parts, rank_steps in zip(busy, steps, result, strict=True):
            wait = min(parts["communication"], max(busy) - busy_s)
            rank_steps.append({**parts, "communication": parts["communication"] - wait, "wait": wait})
    return result


def summarise(ranks: Sequence[Steps], samples: int) -> dict[str, Any]:
    """Summarise the steps of all ranks, each of ``samples``, as a row of a report; times in milliseconds.

    ``parts_ms`` are means over ranks and over the steps that are no hiccups (:data:`TRIM`), so they add up to
    ``mean_ms``, and ``shares`` to 1; ``step_ms`` is the median of all steps.
    """
    parted = with_waits(ranks)
    totals = np.array([[sum(parts.values()) for parts in steps] for steps in parted]).mean(axis=0)
    step = spread("step_ms", totals * 1e3)
    cut = int(len(totals) * TRIM)
    usual = np.argsort(totals)[cut : len(totals) - cut].tolist()
    parts = {name: statistics.fmean(steps[index][name] for steps in parted for index in usual) for name in parted[0][0]}
    mean = sum(parts.values())
    busy = [
        statistics.fmean(sum(steps[p].values()) - steps[p]["communication"] - steps[p]["wait"] for p in usual)
        for steps in parted
    ]
    return {
        "steps": len(totals),
        **step,
        "mean_ms": mean * 1e3,
        "samples_per_s": samples / step["step_ms"] * 1e3,
        "parts_ms": {name: seconds * 1e3 for name, seconds in parts.items()},
        "shares": {name: seconds / mean for name, seconds in parts.items()},
        "busy_ms": [seconds * 1e3 for seconds in busy],
    }


def slow_ranks(busy_ms: Sequence[float]) -> list[int]:
    """Return the ranks whose work takes clearly longer than that of the median rank."""
    if len(busy_ms) < 2:
        return []
    usual = statistics.median_low(busy_ms)
    return [rank for rank, rank_ms in enumerate(busy_ms) if rank_ms > SLOW * usual]
