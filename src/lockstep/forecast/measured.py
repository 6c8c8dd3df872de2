"""Measuring one device's step, and what ranks of one machine do to each other."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lockstep.bench.comm import bench_comm
from lockstep.bench.loader import bench_loader
from lockstep.bench.results import BenchReport
from lockstep.bench.trials import Case, Subject, Trials, new_trials
from lockstep.config.load import merge
from lockstep.errors import LockstepError, RunError
from lockstep.forecast.collectives import Cluster, measured_cluster
from lockstep.forecast.estimate import Counting
from lockstep.forecast.measure import MEETINGS, measure_alone
from lockstep.forecast.scaling import Setting, Step, Wish
from lockstep.hardware.host import usable_cores
from lockstep.strategies import find_strategy

WARM_UP = 5
#: Quartiles lie this many standard deviations apart (normal distribution).
QUARTILES = 1.349

Say = Callable[[str], None]


def measured(
    subject: Subject, wish: Wish, cluster: Cluster | None, blocking: int, say: Say
) -> tuple[Step, Setting, list[str]]:
    """One device's step, and what ranks on one machine do to each other where ``cluster`` is to be measured.

    Args:
        blocking: messages in a forward and backward that wait for all ranks.
    """
    base = subject.base
    devices, on_cpu = list(base.placement.devices), base.placement.accelerator == "cpu"
    counts = counts_beside(wish.gpus, len(devices)) if cluster is None else []
    found: list[list[dict[str, Any]]] = []
    with new_trials() as trials:
        for count in counts or [1]:
            say(f"{wish.repeats} times {wish.steps} steps of {count} device(s), without communication")
            found.append(_trial(subject, trials, devices[:count], wish))
    step = step_of(Counting(subject).size, found[0], _loader_rate(subject, say), alike=base.plan.order.bucketed)
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
    collective = wish.strategy is not None and find_strategy(wish.strategy).forward_is_collective
    waits = collective or blocking > 0
    slowed = {count: contention(rows, count if on_cpu else 0, waits) for count, rows in zip(counts, found, strict=True)}
    costs = meeting(found[-1], counts[-1], fit["alpha_s"] / 2) if on_cpu else 0.0
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


def _trial(subject: Subject, trials: Trials, devices: Sequence[str], wish: Wish) -> list[dict[str, Any]]:
    """Rows of :func:`~lockstep.forecast.measure.measure_alone` on ``devices``."""
    together, alone = cases(subject, devices, wish.steps)
    outcome = trials.run_case(measure_alone, together, alone, wish.repeats, task=subject.base.task)
    if outcome.ended == "stopped":
        raise KeyboardInterrupt
    if not outcome.rows or outcome.ended != "done":
        raise RunError("the step could not be measured", why=outcome.error or outcome.ended)
    return outcome.rows


def cases(subject: Subject, devices: Sequence[str], steps: int, strategy: str = "auto") -> tuple[Case, Case]:
    """The same batch per device on all ``devices`` together, and on the first alone; a thread a rank on the CPU."""
    base = subject.base
    threads = base.config.training.threads or (1 if base.placement.accelerator == "cpu" else None)
    sized = {"batch_size": Counting(subject).size, "global_batch_size": None, "accumulate": 1, "threads": threads}
    changes = {"training": sized, "hardware": {"selected_devices": list(devices), "strategy": strategy}}
    one = merge(changes, {"hardware": {"selected_devices": [devices[0]], "strategy": "auto"}})
    # The ranks take separate steps, so the batches of all devices may be more than the data set.
    all_of_them = merge(changes, {"training": {"tail": "spread"}})
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


def step_of(batch_size: int, measured: Sequence[dict[str, Any]], loader_rate: float | None, *, alike: bool) -> Step:
    """A step from rows of :func:`~lockstep.forecast.measure.measure_alone`; ``alike``: ranks' parts are equal work."""
    gradients = next(row for row in measured if "gradients" in row)
    rows = sorted((row for row in measured if row.get("count") == 1), key=lambda row: row["step_ms"])
    middle = rows[len(rows) // 2]
    parts = {name: milliseconds / 1e3 for name, milliseconds in middle["parts_ms"].items()}
    times = [row["step_ms"] for row in rows]
    return Step(
        batch_size=batch_size,
        **{f"{name}_s": parts[name] for name in ("data", "forward", "backward", "optimizer", "other")},
        jitter_s=jitter(rows, alike),
        spread=(max(times) / min(times)) ** 0.5 - 1,
        gradients=tuple(gradients["gradients"]),
        ready=tuple(gradients["ready"]),
        loader_rate=loader_rate,
    )


def counts_beside(gpus: Sequence[int], devices: int) -> list[int]:
    """Numbers of the devices that are here to measure beside each other; all of them for every larger wish."""
    return sorted({min(count, devices) for count in gpus if count > 1}) or [devices]


def contention(rows: Sequence[dict[str, Any]], ranks: int, waits: bool) -> float:
    """How many times longer a step takes beside others on one machine: the median over neighbours in time.

    CPU ranks share cores by turns. Those that wait for each other in mid-step wait for whole turns: three ranks on
    two cores then take twice as long as one, not 1.5 times.

    Args:
        ranks: on cores of this machine, one thread each; 0 for GPUs.
        waits: whether there are messages in mid-step that all wait for.
    """
    turns = -(-ranks // usable_cores()) if waits else 1
    return max(1.0, turns, statistics.median(b / a for a, b, _ in _turns(rows)))


def meeting(rows: Sequence[dict[str, Any]], ranks: int, message_s: float) -> float:
    """Seconds that a message in mid-step costs ranks on cores of one machine, beside its own time; 0 if not measured.

    It is more than the message takes between idle ranks: they come to it one after the other, and those that sleep
    meanwhile are woken late.

    Args:
        message_s: a short message between idle ranks.
    """
    turns = -(-ranks // usable_cores())
    times = [(met - max(b, turns * a)) / 1e3 / MEETINGS for a, b, met in _turns(rows) if met is not None]
    return max(0.0, statistics.median(times) - message_s) if times else 0.0


def jitter(rows: Sequence[dict[str, Any]], alike: bool) -> float:
    """Standard deviation, in seconds, by which steps of ranks at the same time differ, from its quartiles.

    Args:
        rows: of one device; the same steps in each.
        alike: the ranks' parts of a step are equal work, so what differs from step to step is not jitter.
    """
    times = np.array([row["times_ms"] for row in rows]) / 1e3
    if not alike or len(times) == 1:
        low, high = np.quantile(times, (0.25, 0.75), axis=1)
        return float(np.median(high - low)) / QUARTILES
    times -= np.median(times, axis=1, keepdims=True)
    times -= times.mean(axis=0)
    low, high = np.quantile(times, (0.25, 0.75))
    return float(high - low) / QUARTILES * math.sqrt(len(times) / (len(times) - 1))


def _turns(rows: Sequence[dict[str, Any]]) -> list[tuple[float, float, float | None]]:
    """Milliseconds of a step alone, beside others, and with messages, by round."""

    def times(several: bool, meetings: int) -> list[float]:
        return [
            row["step_ms"]
            for row in rows
            if "count" in row and (row["count"] > 1) is several and row.get("meetings", 0) == meetings
        ]

    alone, beside = times(False, 0), times(True, 0)
    met: list[float | None] = [*times(True, MEETINGS)] or [None] * len(beside)
    return list(zip(alone, beside, met, strict=True))
