"""Pure arithmetic on measured times: medians with spread, shares, waiting, speed-up."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

#: A rank whose own work takes this many times the median of the ranks is called slow.
SLOW = 1.25
#: This share of the fastest and of the slowest steps is left out of the parts: a hiccup is not the rule.
TRIM = 0.1

Steps = Sequence[Mapping[str, float]]


class Spread(NamedTuple):
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Median, lower and upper quartile of at least one value."""
    low, middle, high = np.quantile(np.asarray(values, dtype=float), (0.25, 0.5, 0.75)).tolist()
    return Spread(middle, low, high)


def with_waits(ranks: Sequence[Steps]) -> list[list[dict[str, float]]]:
    """Take waiting for a slower rank out of ``communication``, as a separate part ``wait``.

    All ranks leave the reduction together, so the time from one reduction to the next is the same for all; a rank
    that has less work than the busiest one waits for the difference, inside its communication.

    Args:
        ranks: the parts of each step in seconds, by rank.
    """
    result: list[list[dict[str, float]]] = [[] for _ in ranks]
    for steps in zip(*ranks, strict=True):
        busy = [sum(parts.values()) - parts["communication"] for parts in steps]
        for own, parts, found in zip(busy, steps, result, strict=True):
            wait = min(parts["communication"], max(busy) - own)
            found.append({**parts, "communication": parts["communication"] - wait, "wait": wait})
    return result


def summarise(ranks: Sequence[Steps], samples: int) -> dict[str, Any]:
    """What a row of a report says about the steps of all ranks.

    Times are in milliseconds. ``parts_ms`` are means over ranks and over the steps that are no hiccups
    (:data:`TRIM`), so they add up to ``mean_ms``, and ``shares`` to 1; ``step_ms`` is the median of all steps.

    Args:
        ranks: the parts of each step in seconds, by rank; at least one step.
        samples: of one step, over all ranks.
    """
    parted = with_waits(ranks)
    totals = np.array([[sum(parts.values()) for parts in steps] for steps in parted]).mean(axis=0)
    step = spread(totals.tolist())
    cut = int(len(totals) * TRIM)
    usual = np.argsort(totals)[cut : len(totals) - cut].tolist()
    names = list(parted[0][0])
    parts = {name: statistics.fmean(steps[place][name] for steps in parted for place in usual) for name in names}
    mean = sum(parts.values())
    busy = [
        statistics.fmean(sum(steps[p].values()) - steps[p]["communication"] - steps[p]["wait"] for p in usual)
        for steps in parted
    ]
    return {
        "steps": len(totals),
        "step_ms": step.median * 1e3,
        "step_ms_low": step.low * 1e3,
        "step_ms_high": step.high * 1e3,
        "mean_ms": mean * 1e3,
        "samples_per_s": samples / step.median,
        "parts_ms": {name: seconds * 1e3 for name, seconds in parts.items()},
        "shares": {name: seconds / mean for name, seconds in parts.items()},
        "busy_ms": [seconds * 1e3 for seconds in busy],
    }


def slow_ranks(busy_ms: Sequence[float]) -> list[int]:
    """Ranks whose own work takes clearly longer than that of the median rank."""
    if len(busy_ms) < 2:
        return []
    usual = statistics.median_low(busy_ms)
    return [rank for rank, own in enumerate(busy_ms) if own > SLOW * usual]


def speed_up(samples_per_s: float, of_one: float, devices: int) -> tuple[float, float]:
    """Speed-up over one device, and efficiency: the speed-up that each device contributes.

    Both for weak and for strong scaling, since both compare samples per second.
    """
    gain = samples_per_s / of_one
    return gain, gain / devices


def device_counts(devices: int) -> list[int]:
    """How many of ``devices`` to measure with: all numbers up to 4, then powers of two, and all of them."""
    few = range(1, min(devices, 4) + 1)
    powers = [2**power for power in range(3, devices.bit_length()) if 2**power <= devices]
    return sorted({*few, *powers, devices})
