"""On the ranks: take real training steps, and say where their time and memory went."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lockstep._compat.torch import reset_compiler
from lockstep.bench.rank import PeakMemory, Rank, Utilisation, limit_memory
from lockstep.bench.summary import summarise
from lockstep.bench.timing import Site, Stopwatch, counted_steps, on_site, training
from lockstep.bench.trials import Case
from lockstep.data.reader import Unreadable
from lockstep.data.requests import Request
from lockstep.engine.distributed.staging import to_device
from lockstep.engine.process.runtime import rank_device
from lockstep.engine.trained import bare, build_model
from lockstep.engine.training_data import training_source
from lockstep.hardware.world import World
from lockstep.planning import Plan


def watch_last_gradient(model: nn.Module, watch: Stopwatch) -> Callable[[], None]:
    """With the last gradient that a rank computes, ``communication`` begins: what of it no computation hides.

    Which parameter is the last one is learned in the first steps. The result is called then: only that one is watched.
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


#: Samples whose floating-point operations are counted.
COUNTED = 8


def measure_cases(
    rank: Rank, first: Case, others: Sequence[Case], memory_limit: int | None, counts_flops: bool
) -> None:
    """Report a row for each case, in their order."""
    with on_site(rank, first.config, first.plan) as site:
        flops, note = count_flops(site, first.plan) if counts_flops else (None, "not counted")
        if memory_limit is not None:
            limit_memory(memory_limit)
        for case in (first, *others):
            row = measure(site, case)
            per_step = None if flops is None else flops * case.plan.batch.global_batch
            rank.report({**case.label, **row, "flops_per_step": per_step, "flops_note": note})


def measure(site: Site, case: Case) -> dict[str, Any]:
    """Time and memory of the steps of ``case``; the same on every rank."""
    plan, watch = case.plan, Stopwatch(site.device)
    devices = own_devices(plan, site.device)
    memory, busy = PeakMemory(devices), Utilisation(devices, plan.threads)
    memory.reset()
    with busy, training(site, case.config, plan, watch) as (built, steps):
        several = site.rank.world.size > 1
        settle = watch_last_gradient(built.strategy.module, watch) if several else lambda: None
        for number in counted_steps(site, case, watch, steps):
            if number == case.warm_up:
                busy.begin()
                settle()
        utilisation = busy.read()
    parts = site.collectives.all_gather(watch.steps())
    peaks = list(chain.from_iterable(site.collectives.all_gather(memory.read())))
    release(site.device)
    row = summarise(parts, plan.batch.global_batch)
    return {
        **row,
        "global_batch": plan.batch.global_batch,
        "accumulate": plan.batch.accumulate,
        "epoch_s": plan.task.train_samples / row["samples_per_s"],
        "memory_mb": max(peaks) / 1e6,
        "memory_mb_per_device": [peak / 1e6 for peak in peaks],
        "utilisation_per_device": list(chain.from_iterable(site.collectives.all_gather(utilisation))),
    }


def own_devices(plan: Plan, device: torch.device) -> list[torch.device]:
    """The devices that this rank computes on: one, or all where it is the only rank (dp)."""
    if plan.world_size > 1:
        return [device]
    return [rank_device([name], World()) for name in dict.fromkeys(plan.placement["devices"])]


def release(device: torch.device) -> None:
    """Give back what the last case has allocated."""
    gc.collect()
    reset_compiler()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def count_flops(site: Site, plan: Plan) -> tuple[float | None, str]:
    """Floating-point operations of forward and backward for one sample, or ``None``; and how, or why not.

    Counted by torch.utils.flop_counter: matrix products, convolutions and attention; everything else is nought.
    """
    if site.task.lengths() is not None:
        return None, "the samples differ in length, so no one number holds for all"
    model = build_model(site.task).to(site.device).train()
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        return None, "torch does not count what its recurrent kernels compute"
    source = training_source(site.task, site.datasets, plan)
    size = min(COUNTED, plan.batch.batch_size)
    batch = source.batch(Request(0, 0, 0, size, window=(0, plan.batch.global_batch)))
    batch = to_device(batch.stand_in if isinstance(batch, Unreadable) else batch, site.device)
    counter = FlopCounterMode(display=False)
    try:
        with counter:
            site.task.loss(bare(model), batch).total.backward()
    except Exception as error:  # whatever the task's operators raise under a dispatch mode
        return None, f"torch's counter failed: {type(error).__name__}"
    total = counter.get_total_flops()
    if not total:
        return None, "the model has no matrix product, convolution or attention that torch counts"
    note = f"matrix products, convolutions and attention, counted by torch on {size} samples"
    return total / size, note
