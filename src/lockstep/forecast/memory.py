"""Pure arithmetic on a counted step: the memory of a device by strategy, the largest batch, and which strategy."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from lockstep.errors import UnsupportedError, UsageError
from lockstep.forecast.footprint import STATE, Footprint, StageCount
from lockstep.hardware.resolve import CONTEXT
from lockstep.strategies import auto_strategy, find_strategy, strategies

#: More devices than any cluster has.
MOST = 1_000_000
#: What a GPU needs before the first tensor (context, libraries' workspaces), and the share that its allocator loses to
#: blocks that do not fit: allowances, not measurements of the device at hand.
GPU_CONTEXT, GPU_LOSS = CONTEXT, 0.05
#: Rounds of the search for the largest batch; each of them counts a step.
_ROUNDS = 5
_UNITS = {"": 1.0, "B": 1.0, "MB": 1e6, "GB": 1e9, "TB": 1e12, "MIB": 2.0**20, "GIB": 2.0**30}


#: Bytes of one device, by kind.
Kinds = dict[str, float]


def total(kinds: Mapping[str, float]) -> float:
    return sum(kinds.values())


def device_memory(footprint: Footprint, strategy: str, ranks: int, *, on_gpu: bool, offloaded: bool = False) -> Kinds:
    """The memory of one device with a batch as in ``footprint``.

    With a replicated state it has everything; ddp's gradients are in its buckets during the whole step, so its
    footprint must be counted with gradients kept. With a sharded one (FSDP2, by block) it has 1/ranks of parameters,
    gradients and optimizer; also the root's parameters, two gathered blocks (the one in use and the next), and one
    block's gradients twice (as computed, and as input of the reduce-scatter); or, where that is more, the root's
    parameters twice (as received, and as used) and a block's.

    Args:
        ranks: that share one copy of the model (of ``fsdp.sharding: hybrid``: those of a node).
        offloaded: parameters, gradients and optimizer are in host memory (``fsdp.cpu_offload``).
    """
    kinds: Kinds = dict(footprint.kinds)
    spec = find_strategy(strategy)
    if spec.memory is not None:
        kinds = dict(spec.memory(kinds, ranks))
    elif spec.state == "sharded":
        for kind in ("parameters", "gradients", "optimizer"):
            kinds[kind] = 0.0 if offloaded else kinds[kind] / ranks
        *blocks, root = footprint.blocks
        largest = max(blocks, default=0)
        kinds["gathered"] = max(root + 4 * largest, 2 * root + largest)
    return _with_allowance(kinds, on_gpu)


def data_parallel_memory(footprint: Footprint, devices: int, *, accumulates: bool) -> tuple[Kinds, Kinds]:
    """The memory of the first GPU of one process with several, and of each other one (torch.nn.DataParallel's source).

    Each holds a replica of parameters and buffers, its part of the batch, activations, and the gradients of its
    replica until the backward of all is over. On the first one there are also the optimizer, the batch and the outputs
    of all, the outputs' gradients, and the sum of all replicas' gradients.

    Args:
        footprint: of one device's part of the batch, gradients kept.
        accumulates: there are several micro-batches, so that the gradients of those before are there as well.
    """
    kinds: Kinds = dict(footprint.kinds)
    gathered = (devices - 1) * kinds["batch"] + 2 * devices * footprint.outputs
    first = {**kinds, "gradients": (2 + accumulates) * kinds["gradients"], "gathered": gathered}
    return _with_allowance(first, True), _with_allowance({**kinds, "optimizer": 0.0}, True)


def pipeline_memory(
    stages: Sequence[StageCount],
    bounds: Sequence[int],
    *,
    batch_bytes: int,
    schedule: str,
    micro_batches: int,
    on_gpu: bool,
) -> list[Kinds]:
    """The memory of each device of a pipeline.

    A device holds the activations of ``micro_batches`` at once (``gpipe``), or of at most as many as there are devices
    from it on (``1f1b``). What it sends, outputs to the next device and gradients to the one before, is kept until the
    end of the step. The first device and the last one have the micro-batch itself, too.

    Args:
        bounds: the first stage of each device, and behind the last one the number of stages.
        batch_bytes: of a micro-batch.
    """
    devices, found = len(bounds) - 1, []
    for place, (start, stop) in enumerate(pairwise(bounds)):
        own = stages[start:stop]
        at_once = micro_batches if schedule == "gpipe" else min(micro_batches, devices - place)
        kinds: Kinds = {kind: sum(stage.state[kind] for stage in own) for kind in STATE}
        is_first, is_last = place == 0, place == devices - 1
        kinds["batch"] = batch_bytes if is_first or is_last else 0.0
        held, passing = sum(stage.held for stage in own), max(stage.most - stage.held for stage in own)
        kinds["activations"] = at_once * held + passing
        received = 0 if is_first else (at_once + micro_batches) * own[0].received  # and as large a gradient each
        sent = 0 if is_last else (micro_batches - at_once) * own[-1].sent
        kinds["messages"] = received + sent
        found.append(_with_allowance(kinds, on_gpu))
    return found


def _with_allowance(kinds: Kinds, on_gpu: bool) -> Kinds:
    """``kinds``, and on GPUs what no tensor shows."""
    return {**kinds, "device": GPU_CONTEXT + GPU_LOSS * total(kinds)} if on_gpu else kinds


def largest_batch(memory_of: Callable[[int], float], limit: float, first: int, most: int) -> int:
    """The largest batch whose memory is within ``limit``, among 1 … ``most``; 0 when none fits.

    Memory grows with the batch along a convex, piecewise linear curve (it is the highest of many moments, each of
    them linear), so a line through two sizes leads to a candidate, which is then counted itself.

    Args:
        memory_of: bytes for a batch size.
        first: where the search begins.
    """
    known = {size: memory_of(size) for size in {min(first, most), min(2 * first, most), 1}}
    if known[1] > limit:
        return 0
    for _ in range(_ROUNDS):
        fits = max(size for size, need in known.items() if need <= limit)
        fails = min((size for size, need in known.items() if need > limit), default=None)
        if fits == most or fits + 1 == fails:
            return fits
        candidate = _between(known, limit, fits, fails, most)
        known[candidate] = memory_of(candidate)
    return max(size for size, need in known.items() if need <= limit)


def _between(known: Mapping[int, float], limit: float, fits: int, fails: int | None, most: int) -> int:
    """Where a line through two known sizes meets the limit, strictly between what fits and what does not."""
    below = max((size for size in known if size < fits), default=None)
    one, other = (fits, fails) if fails is not None else (below, fits)
    if one is None or other is None or known[other] <= known[one]:
        guess = 2 * fits
    else:
        slope = (known[other] - known[one]) / (other - one)
        guess = fits + int((limit - known[fits]) / slope)
    upper = most if fails is None else fails - 1
    return max(fits + 1, min(guess, upper))


def choose_strategy(totals: Mapping[str, float], ranks: int, limit: float | None) -> tuple[str, str]:
    """Which strategy to take for ``ranks`` devices with ``limit`` bytes each, and why."""
    first, sharded = auto_strategy(ranks), auto_strategy(ranks, fits=False)
    if limit is None:
        return first, "the devices' memory is not known; give it with --memory 80GB"
    need = totals[first]
    if need <= limit:
        return first, f"a device needs {gigabytes(need)} of {gigabytes(limit)}"
    if totals[sharded] <= limit:
        return sharded, f"{first} needs {gigabytes(need)} of {gigabytes(limit)}, {sharded} {gigabytes(totals[sharded])}"
    least = min(totals[first], totals[sharded])
    return (
        first,
        f"nothing fits: at least {gigabytes(least)} of {gigabytes(limit)}; take a smaller batch or more devices",
    )


def check_strategy(name: str | None, *, speed: bool = False) -> str | None:
    """``None`` for ``auto``.

    Args:
        speed: its speed is to be predicted, not only its memory.

    Raises:
        ConfigError: there is no such strategy.
        UnsupportedError: what it sends in a step is not known.
    """
    if name in (None, "auto"):
        return None
    if speed and find_strategy(name).messages is None:
        known = ", ".join(each for each, spec in strategies().items() if spec.messages)
        raise UnsupportedError(
            f"there is no prediction for strategy {name}",
            why="how long its devices communicate in a step is not modelled",
            fix=f"name one of {known}, leave --strategy out, or measure it with `lockstep bench scaling`",
        )
    return find_strategy(name).name


def gigabytes(size: float) -> str:
    """Bytes for people: MB below a GB, in units of 1e6 and 1e9."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"


def parse_memory(text: str) -> float:
    """``80GB``, ``24GiB``, ``500MB`` or bytes, as bytes.

    Raises:
        UsageError: anything else, or nothing at all.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    factor = _UNITS.get(found[2].upper()) if found else None
    if not found or factor is None or not float(found[1]) > 0:
        raise UsageError(f"invalid value for --memory: {text!r}", fix="write for example --memory 80GB or 24GiB")
    return float(found[1]) * factor
