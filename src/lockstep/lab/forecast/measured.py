"""Measure one device's step, and the contention of ranks on one machine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.distributed.staging import Group, all_gather_rows
from lockstep.engine.distributed.sync_batchnorm import convert
from lockstep.hardware.detect import usable_cores
from lockstep.hardware.world import World
from lockstep.lab.bench.measure import summarise
from lockstep.lab.bench.timing import Site, Stopwatch, counted_steps, on_site, training
from lockstep.lab.bench.trials import TIMEOUT_S, Case, Subject, TrialRank
from lockstep.lab.forecast.footprint import Footprint
from lockstep.lab.forecast.scaling import Step

#: Messages in a forward, to measure the cost of one for ranks that share cores.
MEETINGS = 8
#: Result of a turn of :func:`measure_alone`.
Row = Mapping[str, Any]


def measure_alone(rank: TrialRank, together: Case, alone: Case, rounds: int) -> None:
    """Report in turns the times of one device's step and of all at the same time.

    ``together`` makes the ranks meet; its steps are not taken.
    """
    with on_site(rank, together.config, together.plan) as site:
        for _ in range(rounds):
            rank.report(take_turn(site, alone, synced=together.plan.sync_batchnorm))


def take_turn(site: Site, case: Case, *, synced: bool) -> dict[str, Any]:
    """Measure a step on the first rank while the others wait, and on all at the same time; the same on each rank.

    Ranks do not communicate during these steps, but in those of ``met_ms``: on a CPU, with :data:`MEETINGS` short
    messages in the forward. Times are means without hiccups, of several ranks the median; ``None``: not measured.
    ``synced``: BatchNorm is computed as if it were synchronised, which takes longer than torch's BatchNorm.
    """
    collectives = site.collectives
    ranks = site.collectives.size
    samples = case.plan.batch.global_batch
    group = dist.new_subgroups(1)[0] if synced and ranks > 1 else None

    def steps_of(count: int, meetings: int = 0) -> list[list[dict[str, float]]]:
        collectives.barrier()
        taking = collectives.rank < count
        local_steps = timed_steps(_by_itself(site), case, group if count > 1 else None, meetings) if taking else []
        return [steps for steps in collectives.all_gather(local_steps) if steps]

    def mean_ms(ranks: list[list[dict[str, float]]]) -> float:
        return float(statistics.median(summarise([steps], samples)["mean_ms"] for steps in ranks))

    alone = steps_of(1)
    # Hooks do not run in compiled graphs.
    meet = ranks > 1 and site.device.type == "cpu" and not case.config.training.compile
    return {
        "alone_ms": mean_ms(alone),
        "parts_ms": summarise(alone, samples)["parts_ms"],
        "times_ms": [sum(parts.values()) * 1e3 for parts in alone[0]],
        "beside_ms": mean_ms(steps_of(ranks)) if ranks > 1 else None,
        "met_ms": mean_ms(steps_of(ranks, MEETINGS)) if meet else None,
    }


def _by_itself(site: Site) -> Site:
    """Return the same rank in a world of one."""
    world = World()
    return site._replace(rank=replace(site.rank, world=world), collectives=Collectives(world, timeout_s=TIMEOUT_S))


def timed_steps(site: Site, case: Case, synced: Group = None, meetings: int = 0) -> list[dict[str, float]]:
    """Time each part of the steps of ``case`` after its warm-up, with BatchNorm over the group ``synced``.

    ``meetings``: short messages among all ranks in each forward, before layers at even distances.
    """
    watch = Stopwatch(site.device)
    row = torch.zeros(64)

    def meet(*_: object) -> None:
        all_gather_rows(row, None)

    with training(site, case.config, case.plan, watch) as (fit, steps):
        if synced is not None:
            convert(fit.strategy.module, synced)
        layers = [module for module in fit.strategy.module.modules() if not any(module.children())]
        for index in range(meetings):
            layer = layers[index * len(layers) // meetings]
            layer.register_forward_pre_hook(meet)
        for _ in counted_steps(site, case, watch, steps):
            pass
    return watch.steps()


WARM_UP = 5
#: Quartiles lie this many standard deviations apart (normal distribution).
QUARTILES = 1.349


def cases(subject: Subject, devices: Sequence[str], size: int, steps: int, strategy: str = "auto") -> tuple[Case, Case]:
    """Make two cases with the same batch per device: on all ``devices`` together, and on the first alone."""
    base = subject.base
    threads = base.config.training.threads or (1 if base.placement.accelerator == "cpu" else None)
    sized = {"batch_size": size, "global_batch_size": None, "accumulate": 1, "threads": threads}
    single = {"training": sized, "hardware": {"selected_devices": [devices[0]], "strategy": "auto"}}
    # The ranks take separate steps, so the batches of all devices may be more than the data set.
    all_of_them = {
        "training": {**sized, "tail": "spread"},
        "hardware": {"selected_devices": list(devices), "strategy": strategy},
    }
    together, alone = (subject.case({}, changes, steps=steps, warm_up=WARM_UP) for changes in (all_of_them, single))
    return together, alone


def step_of(footprint: Footprint, turns: Sequence[Row], loader_rate: float | None, *, alike: bool) -> Step:
    """Make a step from the rows of :func:`measure_alone`; ``alike``: the work of all ranks is equal."""
    turns = sorted(turns, key=lambda turn: turn["alone_ms"])
    fastest = turns[0]
    median = turns[len(turns) // 2]
    slowest = turns[-1]
    measured = ("data", "forward", "backward", "optimizer", "other")
    return Step(
        batch_size=footprint.batch_size,
        **{f"{name}_s": median["parts_ms"][name] / 1e3 for name in measured},
        jitter_s=jitter(turns, alike),
        spread=(slowest["alone_ms"] / fastest["alone_ms"]) ** 0.5 - 1,
        gradients=footprint.gradients,
        ready=footprint.ready_by(lambda work: work.flops + work.moved),
        blocks=footprint.blocks,
        loader_rate=loader_rate,
    )


def counts_beside(gpus: Sequence[int], devices: int) -> list[int]:
    """Return the numbers of local devices to measure together; all of them for larger forecasts."""
    return sorted({min(count, devices) for count in gpus if count > 1}) or [devices]


def contention(turns: Sequence[Row], ranks: int, waits: bool) -> float:
    """Return the slowdown of a step by other ranks on one machine: the median over neighbours in time.

    CPU ``ranks`` (0 for GPUs) share cores by turns. If a rank ``waits`` for others in mid-step, it waits for whole
    turns: three ranks on two cores then take twice as long as one, not 1.5 times.
    """
    shifts = -(-ranks // usable_cores()) if waits else 1
    slower: float = statistics.median(turn["beside_ms"] / turn["alone_ms"] for turn in turns)
    return max(1.0, shifts, slower)


def meeting(turns: Sequence[Row], ranks: int, message_s: float) -> float:
    """Return the extra seconds of a message in mid-step for ranks on cores of one machine; 0 if not measured.

    A message takes longer than between idle ranks (``message_s``): the ranks reach it one after the other, and sleeping
    ranks wake up late.
    """
    shifts = -(-ranks // usable_cores())
    costs_s = list[float]()
    for turn in turns:
        if turn["met_ms"] is not None:
            costs_ms = turn["met_ms"] - max(turn["beside_ms"], shifts * turn["alone_ms"])
            costs_s.append(costs_ms / 1e3 / MEETINGS)
    return max(0.0, statistics.median(costs_s) - message_s) if costs_s else 0.0


def jitter(turns: Sequence[Row], alike: bool) -> float:
    """Estimate the standard deviation of simultaneous steps of ranks, in seconds, from quartiles.

    ``turns``: of one device; the same steps in each. ``alike``: the work of all ranks is equal, so differences from
    step to step are not jitter.
    """
    times = np.array([turn["times_ms"] for turn in turns]) / 1e3
    if not alike or len(times) == 1:
        low, high = np.quantile(times, (0.25, 0.75), axis=1)
        return float(np.median(high - low)) / QUARTILES
    times -= np.median(times, axis=1, keepdims=True)
    times -= times.mean(axis=0)
    low, high = np.quantile(times, (0.25, 0.75))
    return float(high - low) / QUARTILES * math.sqrt(len(times) / (len(times) - 1))
