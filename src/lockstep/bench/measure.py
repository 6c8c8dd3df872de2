"""On the ranks: take real training steps, and say where their time and memory went."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lockstep.bench.summary import summarise
from lockstep.bench.trials import Case, PeakMemory, Rank, Utilisation, limit_memory
from lockstep.config import RunConfig
from lockstep.data.loader import make_loader
from lockstep.data.requests import Request
from lockstep.engine.distributed.collectives import Collectives, shared
from lockstep.engine.distributed.staging import between, finish, moment, to_device
from lockstep.engine.loop import StepResult, training_steps
from lockstep.engine.parts import Parts, build_parts
from lockstep.engine.process.runtime import rank_device, runtime
from lockstep.engine.rank_context import RankContext
from lockstep.engine.strategies.base import Flags
from lockstep.engine.task import Datasets, Loss, Task
from lockstep.engine.trained import bare, build_model
from lockstep.engine.training_data import kept_on, open_data, training_source, walk
from lockstep.hardware.world import World
from lockstep.planning import Plan
from lockstep.tasks.registry import load_task

#: Parts of a step. ``other``: what the host does in between.
PARTS = ("data", "forward", "backward", "communication", "optimizer", "other")
_NEXT_STEP = "next step"


class Stopwatch:
    """Notes when which part begins.

    On a GPU the notes are events on its stream: what the host does while the GPU is still busy costs nothing there,
    and waiting counts only where the GPU has run out of work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Any]] = []

    def enter(self, part: str) -> None:
        """From now on time belongs to ``part``."""
        self._marks.append((part, moment(self._device)))

    def next_step(self) -> None:
        """A step ends here, and the next one begins."""
        self.enter(_NEXT_STEP)

    def marks(self) -> list[tuple[str, Any]]:
        """Each part that was entered, and when; for :func:`between`."""
        finish(self._device)
        return self._marks

    def steps(self) -> list[dict[str, float]]:
        """Seconds of each part, for every step between two calls of :meth:`next_step`."""
        found: list[dict[str, float]] = []
        for (part, start), (_, stop) in pairwise(self.marks()):
            if part == _NEXT_STEP:
                found.append(dict.fromkeys(PARTS, 0.0))
            if found:
                found[-1]["other" if part == _NEXT_STEP else part] += between(start, stop)
        return found


def time_update(parts: Parts, watch: Stopwatch) -> None:
    """``parts.update.apply`` counts as ``optimizer``."""
    apply = parts.update.apply

    def timed(*arguments: Any, **more: Any) -> None:
        watch.enter("optimizer")
        apply(*arguments, **more)
        watch.enter("other")

    parts.update.apply = timed  # type: ignore[method-assign]


def timed_batches(batches: Iterator[Any], watch: Stopwatch) -> Iterator[Any]:
    """``batches``; waiting for one counts as ``data``."""
    while True:
        watch.enter("data")
        try:
            batch = next(batches)
        except StopIteration:
            return
        watch.enter("other")
        yield batch


def time_loss(task: Task, watch: Stopwatch) -> None:
    """``task.loss`` counts as ``forward``, and what follows it as ``backward``. Before the strategy is made."""
    loss: Callable[[nn.Module, Any], Loss] = type(task).loss.__get__(task)

    def timed(model: nn.Module, batch: Any) -> Loss:
        watch.enter("forward")
        result = loss(model, batch)
        watch.enter("backward")
        return result

    task.loss = timed  # type: ignore[method-assign]


class Site(NamedTuple):
    """What the cases of one trial share."""

    rank: Rank
    task: Task
    datasets: Datasets
    device: torch.device
    collectives: Collectives


@contextlib.contextmanager
def on_site(rank: Rank, config: RunConfig, plan: Plan) -> Iterator[Site]:
    """The rank's task with its data, device and process group."""
    world, timeout_s = rank.world, config.distributed.timeout_s
    task = load_task(rank.folder, config)
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
        context = RankContext(site.rank.folder, world, config, plan, site.device, site.collectives)
        parts = build_parts(context, site.task, site.datasets, None)
        source, _ = kept_on(training_source(site.task, site.datasets, plan), site.device, config.data.device)
        largest = plan.batch.batch_size
        requests = chain.from_iterable(window.requests for window in walk(plan, world))
        loader = make_loader(source, requests, plan.loader, world.rank, largest=largest)
        parts.strategy.module.train()
        with contextlib.closing(loader):
            time_update(parts, watch)
            steps = training_steps(
                walk(plan, world),
                timed_batches(iter(loader), watch),
                parts.strategy,
                parts.update,
                parts.state,
                epoch_over=lambda stop: plan.batch.window(stop) is None,
                requested=Flags,
                norm_every=config.telemetry.log_interval,
            )
            yield parts, steps


def counted_steps(site: Site, case: Case, watch: Stopwatch, steps: Iterator[StepResult]) -> Iterator[int]:
    """Take the steps of ``case`` and yield the number of each; from ``case.warm_up`` on ``watch`` notes their ends."""
    for number, _ in zip(range(1, case.plan.total_steps + 1), steps, strict=False):
        site.rank.check()
        yield number
        if number >= case.warm_up:
            watch.next_step()


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
    torch.compiler.reset()
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
    batch = to_device(source.batch(Request(0, 0, 0, size, window=(0, plan.batch.global_batch))), site.device)
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
