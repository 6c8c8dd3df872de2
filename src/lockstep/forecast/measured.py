"""Measuring one device's step, and what ranks of one machine do to each other."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from lockstep.bench.comm import bench_comm
from lockstep.bench.loader import bench_loader
from lockstep.bench.rank import Rank
from lockstep.bench.report import BenchReport, Say
from lockstep.bench.summary import summarise
from lockstep.bench.timing import Site, Stopwatch, counted_steps, on_site, training
from lockstep.bench.trials import TIMEOUT_S, Case, Subject, Trials, new_trials
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.distributed.staging import Group, all_gather_rows, between
from lockstep.engine.distributed.sync_batchnorm import convert
from lockstep.errors import LockstepError, RunError, many
from lockstep.forecast.collectives import Cluster, measured_cluster
from lockstep.forecast.scaling import Setting, Step, Wish
from lockstep.hardware.host import usable_cores
from lockstep.hardware.world import World

#: Messages in a forward by which it is measured what one costs ranks that share cores.
MEETINGS = 8
#: Steps in which the arrival of every single gradient is noted; the notes cost time, so these are not the timed ones.
WATCHED = 8
_ARRIVAL = "gradient of "
#: What :func:`measure_alone` reports: the gradients, then a turn each.
Row = Mapping[str, Any]


def measure_alone(rank: Rank, together: Case, alone: Case, rounds: int) -> None:
    """Report the gradients of a step, and then in turns the times of one device's step and of all at the same time.

    Args:
        together: makes the ranks meet; its steps are not taken. alone: one device's case.
    """
    with on_site(rank, together.config, together.plan) as site:
        rank.report(gradients_of(site, alone))
        for _ in range(rounds):
            rank.report(take_turn(site, alone, synced=together.plan.sync_batchnorm))


def take_turn(site: Site, case: Case, *, synced: bool) -> dict[str, Any]:
    """How long a step takes on the first rank while the others wait, and on all at the same time; the same on each.

    Ranks do not communicate during these steps, but in those of ``met_ms``: on a CPU, with :data:`MEETINGS` short
    messages in the forward. Times are means without hiccups, of several ranks the median; ``None``: not measured.

    Args:
        synced: several ranks compute their BatchNorm as if they synchronised it, which takes longer than torch's own.
    """
    collectives, ranks, samples = site.collectives, site.collectives.size, case.plan.batch.global_batch
    group = dist.new_subgroups(1)[0] if synced and ranks > 1 else None

    def steps_of(count: int, meetings: int = 0) -> list[list[dict[str, float]]]:
        collectives.barrier()
        taking = collectives.rank < count
        own = timed_steps(_by_itself(site), case, group if count > 1 else None, meetings) if taking else []
        return [steps for steps in collectives.all_gather(own) if steps]

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
    """The same rank as if there were no other."""
    world = World()
    return site._replace(rank=replace(site.rank, world=world), collectives=Collectives(world, timeout_s=TIMEOUT_S))


def timed_steps(site: Site, case: Case, synced: Group = None, meetings: int = 0) -> list[dict[str, float]]:
    """Seconds of each part of the steps of ``case`` after its warm-up.

    Args:
        synced: with BatchNorm over this group.
        meetings: short messages among all ranks in each forward.
    """
    watch = Stopwatch(site.device)
    with training(site, case.config, case.plan, watch) as (fit, steps):
        if synced is not None:
            convert(fit.strategy.module, synced)
        _let_meet(fit.strategy.module, meetings)
        for _ in counted_steps(site, case, watch, steps):
            pass
    return watch.steps()


def _let_meet(model: nn.Module, meetings: int) -> None:
    """Before layers at even distances in ``model``, all ranks wait for each other."""
    layers = [module for module in model.modules() if not any(module.children())]
    row = torch.zeros(64)

    def meet(*_: object) -> None:
        all_gather_rows(row, None)

    for place in range(meetings):
        layers[place * len(layers) // meetings].register_forward_pre_hook(meet)


def gradients_of(site: Site, case: Case) -> dict[str, Any]:
    """Bytes of each gradient in the order of the backward, and the share of the backward after which it was there."""
    site, watch = _by_itself(site), Stopwatch(site.device)
    with training(site, case.config, case.plan, watch) as (fit, steps):
        trained = {name: p for name, p in fit.strategy.module.named_parameters() if p.requires_grad}
        for name, parameter in trained.items():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: watch.enter(_ARRIVAL + name))
        for _ in zip(range(WATCHED), steps, strict=False):
            pass
    shares: dict[str, list[float]] = {}
    passed: dict[str, float] = {}
    begun: Any = None
    for part, when in watch.marks():
        if part == "backward":
            begun, passed = when, {}
        elif part.startswith(_ARRIVAL):
            passed[part.removeprefix(_ARRIVAL)] = between(begun, when)
        elif part == "optimizer":
            whole = max(passed.values(), default=0.0)
            for name, seconds in passed.items():
                shares.setdefault(name, []).append(seconds / whole if whole > 0 else 1.0)
    ready = {name: statistics.median(found) for name, found in shares.items()}
    order = sorted(ready, key=ready.__getitem__)
    return {"gradients": [trained[name].nbytes for name in order], "ready": [ready[name] for name in order]}


WARM_UP = 5
#: Quartiles lie this many standard deviations apart (normal distribution).
QUARTILES = 1.349


def measured(
    subject: Subject, wish: Wish, cluster: Cluster | None, size: int, waits: bool, say: Say
) -> tuple[Step, Setting, list[str]]:
    """One device's step, and what ranks on one machine do to each other where ``cluster`` is to be measured.

    Args:
        size: the batch of a device. waits: ranks wait for each other in mid-step.
    """
    base = subject.base
    devices, on_cpu = list(base.placement.devices), base.placement.accelerator == "cpu"
    counts = counts_beside(wish.gpus, len(devices)) if cluster is None else []
    found: list[Sequence[Row]] = []
    with new_trials() as trials:
        for count in counts or [1]:
            say(f"{wish.repeats} times {wish.steps} steps of {many(count, 'device')}, without communication")
            found.append(_trial(subject, trials, devices[:count], size, wish))
    gradients, turns = found[0][0], [rows[1:] for rows in found]
    rate, alike = _loader_rate(subject, say), base.plan.order.bucketed
    step = step_of(size, gradients, turns[0], rate, alike=alike)
    notes = [
        f"the step was measured on {devices[0]}: {step.seconds * 1e3:.3g} ms (within {step.spread:.0%}), jitter "
        f"{step.jitter_s * 1e3:.2g} ms"
    ]
    if cluster is not None:
        return step, Setting(cluster), notes
    say(f"messages between {len(devices)} devices")
    comm = _unless_stopped(bench_comm(subject.given, most=max(1 << 20, min(64 << 20, sum(step.gradients))), say=say))
    fit = comm.extra.get("fits", {}).get("all_reduce")
    if fit is None:
        raise RunError("the messages between the devices could not be measured", why="; ".join(comm.notes))
    cluster = measured_cluster(fit["alpha_s"], fit["beta_s_per_byte"], len(devices), max(fit["error"], 0.1))
    slowed = {count: contention(each, count if on_cpu else 0, waits) for count, each in zip(counts, turns, strict=True)}
    costs = meeting(turns[-1], counts[-1], fit["alpha_s"] / 2) if on_cpu else 0.0
    spare = max(0.0, usable_cores() - len(devices) * (base.config.training.threads or 1)) / len(devices)
    overlap = min(1.0, spare) if on_cpu else 1.0
    notes.append(f"messages were measured between {', '.join(devices)}: {comm.verdict}")
    notes += [
        f"{count} devices of this machine, without communication, take {by:.2f} times as long"
        for count, by in slowed.items()
    ]
    if on_cpu and overlap < 1:
        notes.append(f"the ranks' cores carry the messages too: {overlap:.0%} of the backward hides them")
    if costs > 0:
        notes.append(f"a message in mid-step costs these ranks {costs * 1e3:.2g} ms beside its own time, measured")
    return step, Setting(cluster, overlap=overlap, contention=slowed, meeting_s=costs), notes


def _unless_stopped(report: BenchReport) -> BenchReport:
    """Raises :class:`KeyboardInterrupt` where a signal ended it: then it ends the forecast too."""
    if report.partial:
        raise KeyboardInterrupt
    return report


def _trial(subject: Subject, trials: Trials, devices: Sequence[str], size: int, wish: Wish) -> Sequence[Row]:
    """Rows of :func:`measure_alone` on ``devices``."""
    together, alone = cases(subject, devices, size, wish.steps)
    outcome = trials.run_case(measure_alone, together, alone, wish.repeats, task=subject.base.task)
    if outcome.ended == "stopped":
        raise KeyboardInterrupt
    if not outcome.rows or outcome.ended != "done":
        raise RunError("the step could not be measured", why=outcome.error or outcome.ended)
    return outcome.rows


def cases(subject: Subject, devices: Sequence[str], size: int, steps: int, strategy: str = "auto") -> tuple[Case, Case]:
    """The same batch per device on all ``devices`` together, and on the first alone; a thread a rank on the CPU."""
    base = subject.base
    threads = base.config.training.threads or (1 if base.placement.accelerator == "cpu" else None)
    sized = {"batch_size": size, "global_batch_size": None, "accumulate": 1, "threads": threads}
    one = {"training": sized, "hardware": {"selected_devices": [devices[0]], "strategy": "auto"}}
    # The ranks take separate steps, so the batches of all devices may be more than the data set.
    all_of_them = {
        "training": {**sized, "tail": "spread"},
        "hardware": {"selected_devices": list(devices), "strategy": strategy},
    }
    together, alone = (subject.case({}, what, steps=steps, warm_up=WARM_UP) for what in (all_of_them, one))
    return together, alone


def _loader_rate(subject: Subject, say: Say) -> float | None:
    """Samples a second of the loader that the plan takes, or ``None``."""
    workers = subject.base.plan.loader.num_workers
    try:
        rows = _unless_stopped(bench_loader(subject, workers=[workers], seconds=1.0, say=say)).rows
    except LockstepError:
        return None
    rates = [row["samples_per_s"] for row in rows if row["status"] == "ok" and row["samples_per_s"] > 0]
    return rates[0] if rates else None


def step_of(batch_size: int, gradients: Row, turns: Sequence[Row], loader_rate: float | None, *, alike: bool) -> Step:
    """A step from the rows of :func:`measure_alone`; ``alike``: ranks' parts are equal work."""
    turns = sorted(turns, key=lambda turn: turn["alone_ms"])
    least, middle, most = turns[0], turns[len(turns) // 2], turns[-1]
    parts = {name: milliseconds / 1e3 for name, milliseconds in middle["parts_ms"].items()}
    return Step(
        batch_size=batch_size,
        **{f"{name}_s": parts[name] for name in ("data", "forward", "backward", "optimizer", "other")},
        jitter_s=jitter(turns, alike),
        spread=(most["alone_ms"] / least["alone_ms"]) ** 0.5 - 1,
        gradients=tuple(gradients["gradients"]),
        ready=tuple(gradients["ready"]),
        loader_rate=loader_rate,
    )


def counts_beside(gpus: Sequence[int], devices: int) -> list[int]:
    """Numbers of the devices that are here to measure beside each other; all of them for every larger wish."""
    return sorted({min(count, devices) for count in gpus if count > 1}) or [devices]


def contention(turns: Sequence[Row], ranks: int, waits: bool) -> float:
    """How many times longer a step takes beside others on one machine: the median over neighbours in time.

    CPU ranks share cores by turns. Those that wait for each other in mid-step wait for whole turns: three ranks on
    two cores then take twice as long as one, not 1.5 times.

    Args:
        ranks: on cores of this machine, one thread each; 0 for GPUs.
        waits: whether there are messages in mid-step that all wait for.
    """
    shifts = -(-ranks // usable_cores()) if waits else 1
    slower: float = statistics.median(turn["beside_ms"] / turn["alone_ms"] for turn in turns)
    return max(1.0, shifts, slower)


def meeting(turns: Sequence[Row], ranks: int, message_s: float) -> float:
    """Seconds that a message in mid-step costs ranks on cores of one machine, beside its own time; 0 if not measured.

    It is more than the message takes between idle ranks: they come to it one after the other, and those that sleep
    meanwhile are woken late.

    Args:
        message_s: a short message between idle ranks.
    """
    shifts = -(-ranks // usable_cores())
    found = [
        (turn["met_ms"] - max(turn["beside_ms"], shifts * turn["alone_ms"])) / 1e3 / MEETINGS
        for turn in turns
        if turn["met_ms"] is not None
    ]
    return max(0.0, statistics.median(found) - message_s) if found else 0.0


def jitter(turns: Sequence[Row], alike: bool) -> float:
    """Standard deviation, in seconds, by which steps of ranks at the same time differ, from its quartiles.

    Args:
        turns: of one device; the same steps in each.
        alike: the ranks' parts of a step are equal work, so what differs from step to step is not jitter.
    """
    times = np.array([turn["times_ms"] for turn in turns]) / 1e3
    if not alike or len(times) == 1:
        low, high = np.quantile(times, (0.25, 0.75), axis=1)
        return float(np.median(high - low)) / QUARTILES
    times -= np.median(times, axis=1, keepdims=True)
    times -= times.mean(axis=0)
    low, high = np.quantile(times, (0.25, 0.75))
    return float(high - low) / QUARTILES * math.sqrt(len(times) / (len(times) - 1))
