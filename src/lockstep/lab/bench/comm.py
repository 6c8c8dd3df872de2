"""``bench comm``: speed of collectives between the chosen devices."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep.config import resolve
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.distributed.staging import finish
from lockstep.engine.runtime import rank_device
from lockstep.errors import UsageError
from lockstep.hardware.resolve import Placement
from lockstep.hardware.world import World
from lockstep.lab.bench.report import BenchReport, Say
from lockstep.lab.bench.trials import TIMEOUT_S, TrialRank, new_trials
from lockstep.launch.meeting.membership import group
from lockstep.launch.prepare import placement_of

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
#: Repetitions of each message: as many as fit into :data:`BUDGET_S`, within these.
LEAST = 5
MOST = 100
BUDGET_S = 0.5
WARM_UP = 3
#: torch 2.13 renamed them.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def bench_comm(overrides: Mapping[str, Any], *, max_bytes: int = 64 << 20, say: Say = lambda line: None) -> BenchReport:
    """Measure all-reduce, all-gather, reduce-scatter and broadcast, with messages of up to ``max_bytes``."""
    config = resolve({name: overrides[name] for name in ("hardware", "distributed", "runs_dir") if name in overrides})
    placement = placement_of(config, World())
    if placement.world_size < 2:
        raise UsageError(
            f"there is only one rank, and so no communication ({', '.join(placement.devices)})",
            fix="name two devices or more: --devices gpu:0,gpu:1, or two CPU ranks with --devices cpu,cpu",
        )
    if max_bytes < 4096:
        raise UsageError("--max-mb is too small to show a bandwidth", fix="use --max-mb 1 or more")
    sizes = message_sizes(max_bytes)
    settings = {
        "devices": list(placement.devices),
        "ranks": placement.world_size,
        "backend": placement.backend,
        "sizes": sizes,
    }
    report = BenchReport("comm", ", ".join(placement.devices), settings)
    with report.kept(), new_trials() as trials:
        say(f"{placement.world_size} ranks over {placement.backend}: {', '.join(OPERATIONS)}")
        outcome = trials.run(measure_comm, placement, sizes, ranks=placement.world_size, config=config)
        report.rows += outcome.rows
        if outcome.error:
            report.notes.append(f"the ranks failed: {outcome.error}")
    _conclude(report)
    return report


def _conclude(report: BenchReport) -> None:
    for operation in OPERATIONS:
        statuses = {row["status"] for row in report.rows if row["operation"] == operation}
        if statuses == {"not supported"}:
            report.notes.append(f"{operation} is not available over {report.settings['backend']}")
    sums = [row for row in report.rows if row["operation"] == "all_reduce"]
    report.verdict = "too little was measured"
    if sums:
        best = max(row["bus_gb_s"] for row in sums)
        report.verdict = (
            f"all-reduce among {report.settings['ranks']} ranks: latency {sums[0]['latency_us']:.3g} µs, "
            f"bus at most {best:.3g} GB/s"
        )


def measure_comm(rank: TrialRank, placement: Placement, sizes: Sequence[int]) -> None:
    """Measure as one rank: every operation with every size."""
    world = rank.world
    device = rank_device(placement.devices, world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    config = resolve({"distributed": {"timeout_s": TIMEOUT_S}})
    with group(world, config, placement.as_dict(), rank.folder.logs) as team:
        for operation, size in itertools.product(OPERATIONS, sizes):
            rank.check()
            rank.report({"operation": operation, **measure_message(team.collectives, operation, size, device)})


def measure_message(collectives: Collectives, operation: str, size: int, device: torch.device) -> dict[str, Any]:
    ranks = collectives.size
    part = max(1, size // 4 // ranks)
    exact = part * ranks * 4  # every rank's part is equally large
    whole = torch.zeros(part * ranks, device=device)
    shard = torch.zeros(part, device=device)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: _ALL_GATHER(whole, shard),
        "reduce_scatter": lambda: _REDUCE_SCATTER(shard, whole),
        "broadcast": lambda: dist.broadcast(whole, src=0),
    }
    try:
        seconds = call_time(collectives, calls[operation], device)
    except (NotImplementedError, RuntimeError) as error:
        if "not support" not in str(error):
            raise
        return {"bytes": exact, "status": "not supported"}
    algorithm = exact / seconds / 1e9
    return {
        "bytes": exact,
        "latency_us": seconds * 1e6,
        "algorithm_gb_s": algorithm,
        "bus_gb_s": algorithm * bus_factor(operation, ranks),
        "status": "ok",
    }


def call_time(collectives: Collectives, call: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of one call: the slowest rank's median, with a barrier before each call."""

    def once() -> float:
        finish(device)
        collectives.barrier()
        started = time.perf_counter()
        call()
        finish(device)
        return time.perf_counter() - started

    warm = [once() for _ in range(WARM_UP)]
    repeats = collectives.broadcast(round(min(MOST, max(LEAST, BUDGET_S / max(warm[-1], 1e-6)))))
    return max(collectives.all_gather(statistics.median(once() for _ in range(repeats))))


def bus_factor(operation: str, ranks: int) -> float:
    """Return bus bandwidth over algorithm bandwidth: bytes on each rank's line for a byte of the whole message.

    Source: nccl-tests, doc/PERFORMANCE.md.
    """
    ring = (ranks - 1) / ranks
    return {"all_reduce": 2 * ring, "all_gather": ring, "reduce_scatter": ring, "broadcast": 1.0}[operation]


def message_sizes(max_bytes: int) -> list[int]:
    """Return sizes in bytes: 1 KB, then times 4, up to ``max_bytes``."""
    return [4**power for power in range(5, max_bytes.bit_length()) if 4**power <= max_bytes]
