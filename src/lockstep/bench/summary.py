"""Pure arithmetic on measured times: medians, shares, waiting, speed-up; bandwidths, the α–β model, slow links."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

#: A rank whose own work takes this many times the median of the ranks is called slow.
SLOW = 1.25
#: This share of the fastest and of the slowest steps is left out of the parts: a hiccup is not the rule.
TRIM = 0.1

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
#: A link with less than this share of the upper quartile of all bandwidths is slow.
SLOW_LINK = 0.6

Steps = Sequence[Mapping[str, float]]


def spread(name: str, values: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
    """The median of at least one value as ``name``, its lower and upper quartile as ``name_low`` and ``name_high``."""
    low, middle, high = np.quantile(np.asarray(values, dtype=float), (0.25, 0.5, 0.75)).tolist()
    return {name: middle, f"{name}_low": low, f"{name}_high": high}


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
    step = spread("step_ms", totals * 1e3)
    cut = int(len(totals) * TRIM)
    usual = np.argsort(totals)[cut : len(totals) - cut].tolist()
    parts = {name: statistics.fmean(steps[place][name] for steps in parted for place in usual) for name in parted[0][0]}
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


def bus_factor(operation: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth: what travels over each rank's line for a byte of the message.

    Source: nccl-tests, doc/PERFORMANCE.md. The size of a message is that of the whole result (all-gather) or of the
    whole input (reduce-scatter), as there.
    """
    ring = (ranks - 1) / ranks
    return {"all_reduce": 2 * ring, "all_gather": ring, "reduce_scatter": ring, "broadcast": 1.0}[operation]


class Fit(NamedTuple):
    """t = α + β·bytes. ``alpha_s``: latency; ``beta_s_per_byte``; ``error``: the median relative error of the fit."""

    alpha_s: float
    beta_s_per_byte: float
    error: float

    def seconds(self, size: float) -> float:
        return self.alpha_s + self.beta_s_per_byte * size


def fit_alpha_beta(sizes: Sequence[float], seconds: Sequence[float]) -> Fit:
    """The α–β model (Hockney 1994, https://doi.org/10.1016/S0167-8191(06)80021-9) that fits best, none negative.

    Least squares of *relative* errors, since sizes span orders of magnitude: each equation is divided by its time.

    Args:
        sizes, seconds: at least two different sizes; times above 0.
    """
    s, t = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    scale = s.max()
    rows = np.stack([1 / t, s / scale / t], axis=1)
    alpha, beta = np.linalg.lstsq(rows, np.ones_like(t), rcond=None)[0]
    if alpha < 0 or beta < 0:
        # The least on the border of the allowed region: one of the two is nought.
        column = 1 if alpha < 0 else 0
        only = float(rows[:, column].sum() / (rows[:, column] ** 2).sum())
        alpha, beta = (0.0, only) if column else (only, 0.0)
    fit = Fit(float(alpha), float(beta / scale), 0.0)
    errors = np.abs(fit.alpha_s + fit.beta_s_per_byte * s - t) / t
    return fit._replace(error=float(np.median(errors)))


def slow_links(bandwidths: Mapping[tuple[int, int], float]) -> tuple[list[int], list[tuple[int, int]]]:
    """Ranks all of whose links are slow, and slow links between other ranks.

    Args:
        bandwidths: of each pair of ranks.
    """
    if len(bandwidths) < 3:
        return [], []  # with two ranks there is nothing to compare
    # One slow rank of three or four makes half of the links slow or more, so the median says little.
    usual = float(np.quantile(list(bandwidths.values()), 0.75, method="higher"))
    slow = {pair for pair, bandwidth in bandwidths.items() if bandwidth < SLOW_LINK * usual}
    ranks = sorted({rank for pair in bandwidths for rank in pair})
    culprits = [rank for rank in ranks if all(pair in slow for pair in bandwidths if rank in pair)]
    rest = sorted(pair for pair in slow if not set(pair) & set(culprits))
    return culprits, rest


def message_sizes(most: int) -> list[int]:
    """Bytes: 1 KB, then times 4, up to ``most``."""
    sizes = [1024]
    while sizes[-1] * 4 <= most:
        sizes.append(sizes[-1] * 4)
    return sizes
