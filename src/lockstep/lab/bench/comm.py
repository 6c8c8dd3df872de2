"""``bench comm``: speed of collectives between the chosen devices."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
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
from lockstep.launch.prepare import place

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
    placement = place(config, World())
    if placement.world_size < 2:
        raise UsageError(
            f"there is only one rank, and so no communication ({', '.join(placement.devices)})",
            fix="name two devices or more: --devices gpu:0,gpu:1, or two CPU ranks with --devices cpu,cpu",
        )
    if max_bytes < 4096:
        raise UsageError("--max-mb is too small to fit a line through two message sizes", fix="use --max-mb 1 or more")
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
    devices = report.settings["devices"]
    backend = report.settings["backend"]
    fits: dict[str, Fit] = {}
    for operation in OPERATIONS:
        rows = [row for row in report.rows if row["operation"] == operation and row["status"] == "ok"]
        if len(rows) >= 2:
            fits[operation] = fit_alpha_beta([row["bytes"] for row in rows], [row["latency_us"] / 1e6 for row in rows])
        elif any(row["operation"] == operation for row in report.rows):
            report.notes.append(f"{operation} is not available over {backend}")
    fit_rows = {name: {"ranks": len(devices), **fit._asdict()} for name, fit in fits.items()}
    report.extra = {"fits": fit_rows}
    report.verdict = "too little was measured"
    if fit := fits.get("all_reduce"):
        best = max(row["bus_gb_s"] for row in report.rows if row["operation"] == "all_reduce")
        speed = f"{1 / fit.beta_s_per_byte / 1e9:.3g} GB/s" if fit.beta_s_per_byte else "no bandwidth limit seen"
        report.verdict = (
            f"all-reduce among {len(devices)} ranks: α = {fit.alpha_s * 1e6:.3g} µs, 1/β = {speed} "
            f"(fit within {fit.error:.0%}), bus at most {best:.3g} GB/s"
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


class Fit(NamedTuple):
    """t = α + β·bytes. ``alpha_s``: latency; ``beta_s_per_byte``; ``error``: the median relative error of the fit."""

    alpha_s: float
    beta_s_per_byte: float
    error: float

    def seconds(self, size: float) -> float:
        return self.alpha_s + self.beta_s_per_byte * size


def fit_alpha_beta(sizes: Sequence[float], seconds: Sequence[float]) -> Fit:
    """Fit the α–β model (Hockney 1994, https://doi.org/10.1016/S0167-8191(06)80021-9) with neither negative.

    Least squares of *relative* errors, since sizes span orders of magnitude: each equation is divided by its time.
    """
    s = np.asarray(sizes, dtype=float)
    t = np.asarray(seconds, dtype=float)
    scale = s.max()
    rows = np.stack([1 / t, s / scale / t], axis=1)
    alpha, beta = np.linalg.lstsq(rows, np.ones_like(t), rcond=None)[0]
    if alpha < 0 or beta < 0:
        # The minimum on the border of the allowed region: one of the two is zero.
        column = 1 if alpha < 0 else 0
        only = float(rows[:, column].sum() / (rows[:, column] ** 2).sum())
        alpha, beta = (0.0, only) if column else (only, 0.0)
    fit = Fit(float(alpha), float(beta / scale), 0.0)
    errors = np.abs(fit.alpha_s + fit.beta_s_per_byte * s - t) / t
    return fit._replace(error=float(np.median(errors)))


def message_sizes(max_bytes: int) -> list[int]:
    """Return sizes in bytes: 1 KB, then times 4, up to ``max_bytes``."""
    return [4**power for power in range(5, max_bytes.bit_length()) if 4**power <= max_bytes]
