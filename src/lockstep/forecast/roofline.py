"""How long operators take on a device that is not here: bound by arithmetic, by memory, or by their launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lockstep.errors import UsageError
from lockstep.hardware.peaks import known_gpus, memory_bandwidth, peak_flops


class Work(NamedTuple):
    """One operator: floating-point operations, bytes read and written, and whether it computes in 16 bits."""

    flops: float
    moved: float
    half: bool = False


@dataclass(frozen=True)
class Machine:
    """A device: operations and bytes a second that programs reach, and seconds to start a kernel.

    ``source``: where the figures come from.
    """

    name: str
    flops: float
    half_flops: float
    bandwidth: float
    launch_s: float
    source: str


#: Shares of a data sheet's peak that large kernels reach: the middle, and the range that forecasts carry. Published
#: training runs use 35 to 60 % of the arithmetic (PaLM, https://arxiv.org/abs/2204.02311, table 3), and copies 70 to
#: 90 % of the memory's speed.
REACHED_FLOPS, REACHED_BANDWIDTH = (0.35, 0.5, 0.65), (0.7, 0.8, 0.9)
#: Seconds between two kernels that eager torch starts from Python: low, middle, high.
LAUNCH_S = (3e-6, 5e-6, 8e-6)


def gpu_machine(name: str, place: int = 1) -> Machine:
    """A GPU by its driver's name. ``place``: 0 slow, 1 middle, 2 fast.

    Raises:
        UsageError: no figures are known for it.
    """
    single, source = peak_flops(name, "32")
    half, _ = peak_flops(name, "16-mixed")
    bandwidth, _ = memory_bandwidth(name)
    if single is None or half is None or bandwidth is None:
        raise UsageError(
            f"no data sheet figures for {name!r}",
            why="a modelled step needs the peaks of its arithmetic and memory",
            fix=f"name one of: {', '.join(known_gpus())}; or measure on a device that is here with --devices",
        )
    share = REACHED_FLOPS[place]
    return Machine(
        name, single * share, half * share, bandwidth * REACHED_BANDWIDTH[place], LAUNCH_S[2 - place], source
    )


def seconds(work: Sequence[Work], machine: Machine) -> float:
    """The roofline (Williams, Waterman, Patterson 2009, https://doi.org/10.1145/1498765.1498785), operator by operator.

    One after another, each as slow as the slowest of its arithmetic, its memory traffic and its launch.
    """
    return sum(
        max(
            item.flops / (machine.half_flops if item.half else machine.flops),
            item.moved / machine.bandwidth,
            machine.launch_s,
        )
        for item in work
    )
