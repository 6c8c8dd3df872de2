"""``bench comm``: what collectives and links between the chosen devices can do."""

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
from lockstep.engine.distributed.staging import finish, wire_device
from lockstep.engine.runtime import rank_device
from lockstep.errors import UsageError
from lockstep.hardware.resolve import Placement
from lockstep.hardware.world import World
from lockstep.lab.bench.report import BenchReport, Say
from lockstep.lab.bench.trials import TIMEOUT_S, TrialRank, new_trials
from lockstep.launch.meeting.membership import group
from lockstep.launch.prepare import place

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
#: A link with less than this share of the upper quartile of all bandwidths is slow.
SLOW_LINK = 0.6
#: Repetitions of each message: as many as fit into :data:`BUDGET_S`, within these.
LEAST, MOST, BUDGET_S = 5, 100, 0.5
WARM_UP = 3
#: torch 2.13 renamed them.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
#: Messages of the ping-pong between two ranks.
LINK_BYTES, ROUND_TRIPS = 4 << 20, 10


def bench_comm(given: Mapping[str, Any], *, most: int = 64 << 20, say: Say = lambda line: None) -> BenchReport:
    """Measure all-reduce, all-gather, reduce-scatter and broadcast, with messages of up to ``most`` bytes."""
    config = resolve({name: given[name] for name in ("hardware", "distributed", "runs_dir") if name in given})
    placement = place(config, World())
    if placement.world_size < 2:
        fix = "name two devices or more: --devices gpu:0,gpu:1, or two CPU ranks with --devices cpu,cpu"
        raise UsageError(f"there is only one rank, and so no communication ({', '.join(placement.devices)})", fix=fix)
    if most < 4096:
        raise UsageError("--max-mb is too small to fit a line through two message sizes", fix="use --max-mb 1 or more")
    sizes = message_sizes(most)
    settings = {
        "devices": list(placement.devices),
        "ranks": placement.world_size,
        "backend": placement.backend,
        "sizes": sizes,
    }
    report = BenchReport("comm", ", ".join(placement.devices), settings)
    links: list[dict[str, Any]] = []
    with report.kept(), new_trials() as trials:
        say(f"{placement.world_size} ranks over {placement.backend}: {', '.join(OPERATIONS)}")
        outcome = trials.run(measure_comm, placement, sizes, ranks=placement.world_size, config=config)
        report.rows += [row for row in outcome.rows if "operation" in row]
        links = [row for row in outcome.rows if "link" in row]
        if outcome.error:
            report.notes.append(f"the ranks failed: {outcome.error}")
    _conclude(report, links)
    return report


def _conclude(report: BenchReport, links: Sequence[Mapping[str, Any]]) -> None:
    devices, backend = report.settings["devices"], report.settings["backend"]
    fits: dict[str, Fit] = {}
    for operation in OPERATIONS:
        rows = [row for row in report.rows if row["operation"] == operation and row["status"] == "ok"]
        if len(rows) >= 2:
            fits[operation] = fit_alpha_beta([row["bytes"] for row in rows], [row["latency_us"] / 1e6 for row in rows])
        elif any(row["operation"] == operation for row in report.rows):
            report.notes.append(f"{operation} is not available over {backend}")
    known = {name: {"ranks": len(devices), **fit._asdict()} for name, fit in fits.items()}
    report.extra = {"fits": known, "links": list(links)}
    report.verdict = "too little was measured"
    if fit := fits.get("all_reduce"):
        best = max(row["bus_gb_s"] for row in report.rows if row["operation"] == "all_reduce")
        speed = f"{1 / fit.beta_s_per_byte / 1e9:.3g} GB/s" if fit.beta_s_per_byte else "no bandwidth limit seen"
        report.verdict = (
            f"all-reduce among {len(devices)} ranks: α = {fit.alpha_s * 1e6:.3g} µs, 1/β = {speed} "
            f"(fit within {fit.error:.0%}), bus at most {best:.3g} GB/s"
        )
    bandwidths = {(row["link"][0], row["link"][1]): row["gb_s"] for row in links}
    culprits, slow = slow_links(bandwidths)
    report.notes += [
        f"rank {rank} ({devices[rank]}) is slow: all its links are slower than the others" for rank in culprits
    ]
    report.notes += [
        f"the link between ranks {one} and {other} is slow: {bandwidths[one, other]:.3g} GB/s" for one, other in slow
    ]
    if bandwidths and not culprits and not slow and not report.partial:
        least, most = min(bandwidths.values()), max(bandwidths.values())
        report.notes.append(f"no slow link: {least:.3g} to {most:.3g} GB/s between any two ranks")


def measure_comm(rank: TrialRank, placement: Placement, sizes: Sequence[int]) -> None:
    """On a rank: every operation with every size, then each pair of ranks separately."""
    world = rank.world
    device = rank_device(placement.devices, world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    config = resolve({"distributed": {"timeout_s": TIMEOUT_S}})
    with group(world, config, placement.as_dict(), rank.folder.logs) as team:
        for operation, size in itertools.product(OPERATIONS, sizes):
            rank.check()
            rank.report({"operation": operation, **measure_message(team.collectives, operation, size, device)})
        if world.size > 2:
            for one, other in itertools.combinations(range(world.size), 2):
                rank.check()
                rank.report(_link(team.collectives, one, other, device))


def measure_message(collectives: Collectives, operation: str, size: int, device: torch.device) -> dict[str, Any]:
    ranks = collectives.size
    part = max(1, size // 4 // ranks)
    exact = part * ranks * 4  # every rank's part is equally large
    whole, own = torch.zeros(part * ranks, device=device), torch.zeros(part, device=device)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: _ALL_GATHER(whole, own),
        "reduce_scatter": lambda: _REDUCE_SCATTER(own, whole),
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
    """Seconds of one call: the slowest rank's median, each call begun together."""

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


def _link(collectives: Collectives, one: int, other: int, device: torch.device) -> dict[str, Any]:
    """Ping-pong between two ranks while the others wait; half of the quickest round trip counts."""
    message = torch.zeros(LINK_BYTES // 4, device=wire_device(device, None))
    times = []
    if collectives.rank in (one, other):
        for _ in range(ROUND_TRIPS):
            started = time.perf_counter()
            if collectives.rank == one:
                dist.send(message, dst=other)
                dist.recv(message, src=other)
            else:
                dist.recv(message, src=one)
                dist.send(message, dst=one)
            finish(device)
            times.append((time.perf_counter() - started) / 2)
    quickest = collectives.all_gather(min(times, default=0.0))
    return {"link": [one, other], "bytes": LINK_BYTES, "gb_s": LINK_BYTES / quickest[one] / 1e9}


def bus_factor(operation: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth: what travels over each rank's line for a byte of the whole message.

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
    """The α–β model (Hockney 1994, https://doi.org/10.1016/S0167-8191(06)80021-9) that fits best, none negative.

    Least squares of *relative* errors, since sizes span orders of magnitude: each equation is divided by its time.
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
    """Ranks all of whose links are slow, and slow links between other ranks."""
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
    return [4**power for power in range(5, most.bit_length()) if 4**power <= most]
