"""On the ranks: take real training steps, and say where their time and memory went."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lockstep.bench.rank import PeakMemory, Rank, Utilisation, limit_memory
from lockstep.bench.stopwatch import LastGradient, Stopwatch, TimedUpdate, time_loss, timed_batches
from lockstep.bench.summary import summarise
from lockstep.config import RunConfig
from lockstep.data.loader import make_loader
from lockstep.data.requests import Request
from lockstep.engine.distributed.collectives import Collectives, shared
from lockstep.engine.distributed.staging import to_device
from lockstep.engine.loop import StepResult, training_steps
from lockstep.engine.parts import Parts, build_parts
from lockstep.engine.process.runtime import rank_device, runtime
from lockstep.engine.rank_context import RankContext
from lockstep.engine.strategies.base import Flags
from lockstep.engine.task import Datasets, Task
from lockstep.engine.trained import bare, build_model
from lockstep.engine.training_data import kept_on, open_data, training_source, walk
from lockstep.hardware.world import World
from lockstep.planning import Plan
from lockstep.tasks.registry import load_task

#: Samples whose floating-point operations are counted.
COUNTED = 8


@dataclass(frozen=True)
class Case:
    """One thing to measure. ``label`` goes into its row."""

    label: Mapping[str, Any]
    config: RunConfig
    plan: Plan
    warm_up: int


class FlopCount(NamedTuple):
    """Floating-point operations of one sample, or ``None``, and why."""

    per_sample: float | None
    note: str


class Site(NamedTuple):
    """What the cases of one trial share."""

    rank: Rank
    task: Task
    datasets: Datasets
    device: torch.device
    collectives: Collectives


def measure_cases(rank: Rank, cases: Sequence[Case], memory_limit: int | None, *, counts_flops: bool) -> None:
    """Report a row for each case, in their order."""
    with on_site(rank, cases[0].config, cases[0].plan) as site:
        flops = count_flops(site, cases[0].plan) if counts_flops else FlopCount(None, "not counted")
        if memory_limit is not None:
            limit_memory(memory_limit)
        for case in cases:
            row = measure(site, case)
            per_step = None if flops.per_sample is None else flops.per_sample * case.plan.batch.global_batch
            rank.report(
                {
                    **case.label,
                    **row,
                    "flops_per_step": per_step,
                    "flops_note": flops.note,
                }
            )


@contextlib.contextmanager
def on_site(rank: Rank, config: RunConfig, plan: Plan) -> Iterator[Site]:
    """The rank's task with its data, device and process group."""
    world, timeout_s = rank.world, config.distributed.timeout_s
    task = load_task(rank.run, config)
    device = rank_device(tuple(plan.placement["devices"]), world)
    with runtime(plan, device, world, timeout_s, detect_anomaly=False), shared(world, timeout_s):
        collectives = Collectives(world, timeout_s=timeout_s)
        yield Site(rank, task, open_data(task, config, collectives), device, collectives)


@contextlib.contextmanager
def training(
    site: Site, config: RunConfig, plan: Plan, watch: Stopwatch
) -> Iterator[tuple[Parts, Iterator[StepResult]]]:
    """The engine's own loop for ``plan``, with its parts timed; yields what it trains and its steps."""
    world = site.rank.world
    time_loss(site.task, watch)
    with runtime(plan, site.device, world, config.distributed.timeout_s, detect_anomaly=False):
        context = RankContext(site.rank.run, world, config, plan, site.device, site.collectives)
        parts = build_parts(context, site.task, site.datasets, None)
        source, _ = kept_on(training_source(site.task, site.datasets, plan), site.device, config.data.device)
        largest = plan.batch.batch_size
        loader = make_loader(source, requests_of(plan, world), plan.loader, world.rank, largest=largest)
        parts.strategy.module.train()
        with contextlib.closing(loader):
            update: Any = TimedUpdate(parts.update, watch)
            steps = training_steps(
                walk(plan, world),
                timed_batches(iter(loader), watch),
                parts.strategy,
                update,
                parts.state,
                epoch_over=lambda stop: plan.batch.window(stop) is None,
                requested=Flags,
                norm_every=config.telemetry.log_interval,
            )
            yield parts, steps


def requests_of(plan: Plan, world: World) -> Iterator[Request]:
    """The micro-batches of a rank, in order."""
    return chain.from_iterable(window.requests for window in walk(plan, world))


def measure(site: Site, case: Case) -> dict[str, Any]:
    """Time and memory of the steps of ``case``; the same on every rank."""
    plan, world, watch = case.plan, site.rank.world, Stopwatch(site.device)
    devices = own_devices(plan, site.device)
    memory, busy = PeakMemory(devices), Utilisation(devices, plan.threads)
    memory.reset()
    total = plan.total_steps
    with busy, training(site, case.config, plan, watch) as (built, steps):
        last = LastGradient(built.strategy.module, watch) if world.size > 1 else None
        for number, _ in enumerate(steps, start=1):
            site.rank.check()
            if number == case.warm_up:
                busy.begin()
                if last is not None:
                    last.settle()
            if number >= case.warm_up:
                watch.next_step()
            if number == total:
                break
        utilisation = busy.read()
        if last is not None:
            last.close()
    parts = site.collectives.all_gather(watch.steps())
    peaks = list(chain.from_iterable(site.collectives.all_gather(memory.read())))
    release(site.device)
    return {
        **summarise(parts, plan.batch.global_batch),
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
    import gc

    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def count_flops(site: Site, plan: Plan) -> FlopCount:
    """Floating-point operations of forward and backward.

    Counted by torch.utils.flop_counter: matrix products, convolutions and attention; everything else is nought.
    """
    if site.task.lengths() is not None:
        return FlopCount(None, "the samples differ in length, so no one number holds for all")
    model = build_model(site.task).to(site.device).train()
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        return FlopCount(None, "torch does not count what its recurrent kernels compute")
    source = training_source(site.task, site.datasets, plan)
    size = min(COUNTED, plan.batch.batch_size)
    batch = to_device(source.batch(Request(0, 0, 0, size, window=(0, plan.batch.global_batch))), site.device)
    counter = FlopCounterMode(display=False)
    try:
        with counter:
            site.task.loss(bare(model), batch).total.backward()
    except Exception as error:  # whatever the task's operators raise under a dispatch mode
        return FlopCount(None, f"torch's counter failed: {type(error).__name__}")
    total = counter.get_total_flops()
    if not total:
        return FlopCount(None, "the model has no matrix product, convolution or attention that torch counts")
    note = f"matrix products, convolutions and attention, counted by torch on {size} samples"
    return FlopCount(total / size, note)
