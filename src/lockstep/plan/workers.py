"""How many processes load the data of a rank: by a rule from cores, or from measured rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from lockstep.config.sections import DataConfig

#: Data should come this much faster than the step takes it, so that a slow batch does not stop it.
HEADROOM = 1.2
#: Rates closer than this are the same.
CLOSE = 0.95


class Recommendation(NamedTuple):
    """``bound``: what limits training with this setting, ``compute`` or ``data``."""

    num_workers: int
    bound: str
    reason: str


def recommend(rates: Mapping[int, float], demand: float) -> Recommendation:
    """How many loader processes to use, and why: the fewest that keep up with the step, else the fastest.

    Args:
        rates: samples per second by number of workers; at least one.
        demand: samples per second that the step would take if it never waited.
    """
    enough = [workers for workers, rate in sorted(rates.items()) if rate >= HEADROOM * demand]
    if enough:
        few = enough[0]
        return Recommendation(
            few, "compute", f"{_load(few, rates[few])}, a step needs {demand:,.0f}: more would only take cores from it"
        )
    fastest = max(rates.values())
    best = min(workers for workers, rate in rates.items() if rate >= CLOSE * fastest)
    if rates[best] >= demand:
        bound, end = "compute", f"just enough for the {demand:,.0f} that a step needs"
    else:
        waits = 1 - rates[best] / demand
        bound, end = "data", f"a step needs {demand:,.0f}: training waits for data {waits:.0%} of the time"
    return Recommendation(best, bound, f"{_load(best, rates[best])}, no number is faster; {end}")


def _load(workers: int, rate: float) -> str:
    return f"{workers} worker{' loads' if workers == 1 else 's load'} {rate:,.0f} samples/s"


def worker_counts(cores: int) -> list[int]:
    """0, 1, 2, 4, … up to ``cores``, and ``cores`` itself."""
    return sorted({0, cores, *(2**power for power in range(cores.bit_length()) if 2**power <= cores)})


def automatic_workers(cores: int, local_ranks: int) -> int:
    """Loader processes per rank when nobody sets them: what the cores of a node leave, at most 4."""
    return max(0, min(4, cores // local_ranks - 1))


def choose_workers(
    data: DataConfig,
    *,
    whole_batches: bool,
    quick_on_cpu: bool,
    read_file: str | None = None,
    cores: int,
    local_ranks: int,
    measured: Recommendation | str | None,
) -> tuple[int, str]:
    """Loader processes of each rank, and why.

    Args:
        whole_batches: the data set gives whole batches from memory.
        quick_on_cpu: samples are quickly made, and the step computes on the CPU.
        read_file: an open file of the data set whose position its processes would share.
        cores: CPU cores that this node may use.
        measured: what was found by measuring for ``data.num_workers: auto``, or why nothing was.
    """
    if isinstance(data.num_workers, int):
        return data.num_workers, "as configured"
    if data.num_workers == "auto" and isinstance(measured, Recommendation):
        return measured.num_workers, f"measured: {measured.reason}"
    if whole_batches:
        workers, reason = 0, "the data set gives whole batches from memory"
    elif read_file is not None:
        workers, reason = 0, f"worker processes would share the position in {read_file}, which the data set has open"
    elif quick_on_cpu:
        workers, reason = 0, "a sample is made in less time than another process needs to hand it over"
    else:
        workers = automatic_workers(cores, local_ranks)
        reason = f"{cores} cores shared by {local_ranks} rank(s), at most 4 each, one core left for the step"
    if data.num_workers == "auto":
        reason += f" (auto: {measured or 'measured when training starts'})"
    return workers, reason
