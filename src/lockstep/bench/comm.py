"""``bench comm``: what collectives and links between the chosen devices can do."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep.bench.rank import Rank
from lockstep.bench.report import BenchReport, Say
from lockstep.bench.summary import OPERATIONS, Fit, bus_factor, fit_alpha_beta, message_sizes, slow_links
from lockstep.bench.trials import TIMEOUT_S, new_trials
from lockstep.config import resolve
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.distributed.staging import finish, wire_device
from lockstep.engine.process.runtime import join, rank_device
from lockstep.errors import UsageError
from lockstep.hardware.resolve import Placement
from lockstep.hardware.world import World
from lockstep.launch.prepare import place

#: Repetitions of each message: as many as fit into :data:`BUDGET_S`, within these.
LEAST, MOST, BUDGET_S = 5, 100, 0.5
WARM_UP = 3
#: torch 2.13 renamed them.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
#: Messages of the ping-pong between two ranks.
LINK_BYTES, ROUND_TRIPS = 4 << 20, 10


def bench_comm(given: Mapping[str, Any], *, most: int = 64 << 20, say: Say = lambda line: None) -> BenchReport:
    """Measure all-reduce, all-gather, reduce-scatter and broadcast among ranks on the chosen devices.

    Args:
        given: settings, of which ``hardware`` and ``distributed`` count; two devices or more.
        most: bytes of the largest message.

    Raises:
        UsageError: one device, or devices that this machine does not have.
    """
    config = resolve({name: given[name] for name in ("hardware", "distributed", "runs_dir") if name in given})
    placement = place(config, World())
    if placement.world_size < 2:
        raise UsageError(
            f"there is only one rank, and so no communication ({', '.join(placement.devices)})",
            fix="name two devices or more: --devices gpu:0,gpu:1, or two CPU ranks with --devices cpu,cpu",
        )
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
    ranks, fits = report.settings["ranks"], {}
    for operation in OPERATIONS:
        rows = [row for row in report.rows if row["operation"] == operation and row["status"] == "ok"]
        if len(rows) >= 2:
            fits[operation] = fit_alpha_beta([row["bytes"] for row in rows], [row["latency_us"] / 1e6 for row in rows])
    report.extra = {
        "fits": {name: {"ranks": ranks, **fit._asdict()} for name, fit in fits.items()},
        "links": list(links),
    }
    if "all_reduce" in fits:
        best = max(row["bus_gb_s"] for row in report.rows if row["operation"] == "all_reduce" and row.get("bus_gb_s"))
        report.verdict = f"all-reduce among {ranks} ranks: {_in_words(fits['all_reduce'])}, bus at most {best:.3g} GB/s"
    else:
        report.verdict = "too little was measured"
    bandwidths = {(row["link"][0], row["link"][1]): row["gb_s"] for row in links}
    culprits, slow = slow_links(bandwidths)
    devices = report.settings["devices"]
    for rank in culprits:
        report.notes.append(f"rank {rank} ({devices[rank]}) is slow: all its links are slower than the others")
    for one, other in slow:
        report.notes.append(f"the link between ranks {one} and {other} is slow: {bandwidths[one, other]:.3g} GB/s")
    if bandwidths and not culprits and not slow and not report.partial:
        least, most = min(bandwidths.values()), max(bandwidths.values())
        report.notes.append(f"no slow link: {least:.3g} to {most:.3g} GB/s between any two ranks")
    unknown = {row["operation"] for row in report.rows if row["status"] != "ok"}
    report.notes += [f"{name} is not available over {report.settings['backend']}" for name in sorted(unknown)]


def _in_words(fit: Fit) -> str:
    speed = f"{1 / fit.beta_s_per_byte / 1e9:.3g} GB/s" if fit.beta_s_per_byte else "no bandwidth limit seen"
    return f"α = {fit.alpha_s * 1e6:.3g} µs, 1/β = {speed} (fit within {fit.error:.0%})"


def measure_comm(rank: Rank, placement: Placement, sizes: Sequence[int]) -> None:
    """On a rank: every operation with every size, then each pair of ranks separately."""
    world = rank.world
    device = rank_device(placement.devices, world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    join(placement.backend, device, world, TIMEOUT_S)
    collectives = Collectives(world, timeout_s=TIMEOUT_S)
    for operation, size in itertools.product(OPERATIONS, sizes):
        rank.check()
        rank.report({"operation": operation, **measure_message(collectives, operation, size, device)})
    if world.size > 2:
        for one, other in itertools.combinations(range(world.size), 2):
            rank.check()
            rank.report(_link(collectives, one, other, device))
    dist.destroy_process_group()


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
