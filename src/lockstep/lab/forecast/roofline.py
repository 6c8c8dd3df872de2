"""The step of a hypothetical GPU, by the roofline of every operator that the task's step starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lockstep.errors import UsageError
from lockstep.hardware.peaks import PEAKS
from lockstep.lab.forecast.footprint import Footprint, Work
from lockstep.lab.forecast.scaling import Step

#: Shares of a data sheet's peak that large kernels reach: slow, typical, fast. Published training runs use 35 to 60 %
#: of the arithmetic (PaLM, https://arxiv.org/abs/2204.02311, table 3), and copies 70 to 90 % of the memory's speed.
REACHED_FLOPS = (0.35, 0.5, 0.65)
REACHED_BANDWIDTH = (0.7, 0.8, 0.9)
#: Seconds between two kernels that eager torch starts from Python: slow, typical, fast.
LAUNCH_S = (8e-6, 5e-6, 3e-6)


class Machine(NamedTuple):
    """Operations (in 32 and in 16 bits) and bytes a second that programs reach, seconds to start a kernel."""

    flops: float
    half_flops: float
    bandwidth: float
    launch_s: float


def gpu_machines(name: str) -> list[Machine]:
    """Look up a GPU by its driver's name: a slow, a typical and a fast case."""
    peaks = PEAKS.get(name)
    if peaks is None:
        raise UsageError(
            f"no data sheet figures for {name!r}",
            why="a modelled step needs the peaks of its arithmetic and memory",
            fix=f"name one of: {', '.join(PEAKS)}; or measure on a local device with --devices",
        )
    return [
        Machine(1e12 * peaks.fp32 * flops, 1e12 * peaks.half * flops, 1e9 * peaks.memory * bandwidth, launch_s)
        for flops, bandwidth, launch_s in zip(REACHED_FLOPS, REACHED_BANDWIDTH, LAUNCH_S, strict=True)
    ]


def seconds(work: Sequence[Work], machine: Machine) -> float:
    """Sum the roofline of each operator (Williams, Waterman, Patterson 2009, https://doi.org/10.1145/1498765.1498785).

    One after another, each as slow as the slowest of its arithmetic, its memory traffic and its launch.
    """
    rates = {False: machine.flops, True: machine.half_flops}
    return sum(max(op.flops / rates[op.half], op.moved / machine.bandwidth, machine.launch_s) for op in work)


def modelled_step(footprint: Footprint, gpu: str) -> tuple[Step, list[str]]:
    """Model a step on a hypothetical GPU: the roofline of every operator that the task's step starts."""
    slow, typical, fast = gpu_machines(gpu)
    parts = (footprint.forward, footprint.backward, footprint.optimizer)
    longest, shortest = (sum(seconds(part, machine) for part in parts) for machine in (slow, fast))
    forward_s, backward_s, optimizer_s = (seconds(part, typical) for part in parts)
    step = Step(
        batch_size=footprint.batch_size,
        forward_s=forward_s,
        backward_s=backward_s,
        optimizer_s=optimizer_s,
        gradients=footprint.gradients,
        ready=footprint.ready_by(lambda work: seconds([work], typical)),
        spread=(longest / shortest) ** 0.5 - 1,
        blocks=footprint.blocks,
    )
    flops = sum(work.flops for part in parts for work in part)
    note = (
        f"the step is modelled, not measured: {len(footprint.forward) + len(footprint.backward)} operators, "
        f"{flops / 1e12:.3g} TFLOP, on {gpu} ({PEAKS[gpu].source}) at {typical.flops / 1e12:.3g} TFLOP/s "
        f"({typical.half_flops / 1e12:.3g} in 16 bits), {typical.bandwidth / 1e9:.0f} GB/s and "
        f"{typical.launch_s * 1e6:.0f} µs a kernel; between the slow and the fast case lies a factor of "
        f"{longest / shortest:.2g}"
    )
    return step, [
        note,
        "input is taken to keep up, if there are enough loader processes, and every GPU to be equally fast",
    ]
