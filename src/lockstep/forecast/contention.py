"""How much ranks on one machine slow each other down, from rows of :func:`~lockstep.forecast.measure.take_turns`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from lockstep.forecast.measure import MEETINGS
from lockstep.hardware.host import usable_cores

#: Quartiles lie this many standard deviations apart (normal distribution).
QUARTILES = 1.349


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
