"""Checks of several ranks: rendezvous, clocks, all-reduce, and their findings."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.runtime import rank_device
from lockstep.hardware.resolve import Placement
from lockstep.hardware.world import World
from lockstep.lab.bench.comm import bus_factor, call_time
from lockstep.lab.doctor.gpus import own_versions
from lockstep.lab.doctor.report import AllReduce, Check, Finding, Meeting, RankFacts, size_text
from lockstep.launch.local.worker import Rank

#: Maximum time that a rank waits for the others.
TIMEOUT_S = 60.0
#: Bytes: the latency; a small bucket; enough to fill the line (DDP sends buckets of 25 MiB).
SIZES = (4 << 10, 1 << 20, 64 << 20)
CLOCK_ROUNDS = 8
RANKS = Check("ranks", "several devices train together only if their processes reach each other")
#: Beyond it, logs of several nodes cannot be compared, and tickets and certificates may be refused.
MAX_SKEW_S = 1.0
#: Minimum bus bandwidth; less means a fault: a GPU pair without peer access, or a network of 1 Gbit/s.
MIN_BUS_GB_S = {"nccl": 2.0, "gloo": 0.1}
#: Gradients of a model with 25 million parameters in float32, such as ResNet-50.
EXAMPLE_BYTES = 100_000_000


@contextmanager
def joined(world: World, placement: Placement) -> Iterator[Store]:
    """Open a gloo group of all ranks and destroy it at the end; the store stays usable as long as it is referenced.

    The launcher's store may be used for a second group afterwards (the training's), so this group has a prefix.
    """
    timeout = timedelta(seconds=TIMEOUT_S)
    base, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=timeout))
    store = PrefixStore("lockstep-doctor", base)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    failed = True
    try:
        yield store
        failed = False
    finally:
        # NCCL waits for all ranks in it, and after a failure they wait for this one.
        if not (failed and placement.backend == "nccl"):
            dist.destroy_process_group()


def meet(rank: Rank, placement: Placement) -> Meeting:
    """Measure as one rank that Lockstep's launcher has started."""
    with joined(rank.world, placement):
        return measure(Collectives(rank.world, timeout_s=TIMEOUT_S), rank.world, placement)


def measure(collectives: Collectives, world: World, placement: Placement) -> Meeting:
    """Gather facts, clocks and all-reduces of all ranks. Collective; the result is the same on every rank."""
    device = rank_device(placement.devices, world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    name = placement.devices[world.local_rank % len(placement.devices)]
    clock = _clocks_ahead(collectives)[world.rank]
    facts = RankFacts(rank=world.rank, host=socket.gethostname(), device=name, versions=own_versions(), clock_s=clock)
    backend = placement.backend or "gloo"
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=TIMEOUT_S))
    sums = tuple(_all_reduce(collectives, group, device, size) for size in SIZES)
    return Meeting(backend=backend, ranks=tuple(collectives.all_gather(facts)), all_reduce=sums)


def _clocks_ahead(collectives: Collectives) -> list[tuple[float, float]]:
    """Return the seconds that each rank's wall clock is ahead of rank 0's, and their uncertainty (±).

    A rank leaves a barrier after all have entered it, which bounds the difference of two clocks on both sides.
    """
    passages = []
    for _ in range(CLOCK_ROUNDS):
        entered = time.time()
        collectives.barrier()
        passages.append((entered, time.time()))
    ranks = collectives.all_gather(passages)
    offsets = []
    for rank in ranks:
        low = max(entered - left_first for (entered, _), (_, left_first) in zip(rank, ranks[0], strict=True))
        high = min(left - entered_first for (_, left), (entered_first, _) in zip(rank, ranks[0], strict=True))
        offsets.append(((low + high) / 2, (high - low) / 2))
    return offsets


def _all_reduce(
    collectives: Collectives, group: dist.ProcessGroup | None, device: torch.device, size: int
) -> AllReduce:
    # Whole numbers far below 2^24, so float32 sums are exact in any order.
    pattern = torch.arange(size // 4, dtype=torch.float32, device=device) % 251
    tensor = pattern + collectives.rank
    dist.all_reduce(tensor, group=group)
    ranks = collectives.size
    is_correct = torch.equal(tensor, pattern * ranks + ranks * (ranks - 1) / 2)
    wrong = tuple(rank for rank, correct in enumerate(collectives.all_gather(is_correct)) if not correct)
    tensor.zero_()
    seconds = call_time(collectives, lambda: dist.all_reduce(tensor, group=group), device)
    bus = bus_factor("all_reduce", ranks) * size / seconds / 1e9
    return AllReduce(bytes=size, seconds=seconds, bus_gb_s=bus, wrong=wrong)


def check_meeting(meeting: Meeting) -> Iterator[Finding]:
    has_several_hosts = len({rank.host for rank in meeting.ranks}) > 1
    devices = ", ".join(
        f"{rank.rank} on {rank.device}" + (f" of {rank.host}" if has_several_hosts else "") for rank in meeting.ranks
    )
    yield RANKS("ok", f"{len(meeting.ranks)} ranks met over {meeting.backend}: {devices}")
    if has_several_hosts:
        yield _check_same_versions(meeting.ranks)
    yield _check_skew(meeting.ranks)
    yield _check_sums(meeting)
    yield _check_bandwidth(meeting.backend, meeting.all_reduce)


def _check_same_versions(ranks: Sequence[RankFacts]) -> Finding:
    check = Check(
        "same versions",
        "different versions compute different numbers, and different versions of NCCL cannot communicate",
        "install the same constraints.txt on every node",
    )
    versions = {
        name: list(dict.fromkeys(rank.versions[name] or "none" for rank in ranks)) for name in ranks[0].versions
    }
    differing = [f"{name} {', '.join(values)}" for name, values in versions.items() if len(values) > 1]
    if differing:
        return check("fail", f"the nodes differ: {'; '.join(differing)}")
    return check("ok", "the same on every node")


def _check_skew(ranks: Sequence[RankFacts]) -> Finding:
    check = Check(
        "clock skew",
        "times in logs and run folders of several nodes are compared by their clocks",
        "let every node keep its time by NTP (chrony, systemd-timesyncd)",
    )
    farthest = max(ranks, key=lambda rank: abs(rank.clock_s[0]))
    ahead, uncertain = farthest.clock_s
    if abs(ahead) - uncertain > MAX_SKEW_S:
        direction = "ahead" if ahead > 0 else "behind"
        return check("warn", f"the clock of {farthest.host} is {abs(ahead):.1f} s {direction} of rank 0's")
    apart = f"{abs(ahead) * 1e3:.2f} ms apart (±{uncertain * 1e3:.2f} ms)"
    return check("ok", f"the ranks' clocks are at most {apart}")


def _check_sums(meeting: Meeting) -> Finding:
    check = Check(
        "all-reduce", "a step's gradients are summed over all ranks: a wrong sum trains a wrong model without an error"
    )
    rows = meeting.all_reduce
    wrong = [f"rank {', '.join(map(str, row.wrong))} at {size_text(row.bytes)}" for row in rows if row.wrong]
    if not wrong:
        return check("ok", f"the sums are right on every rank ({', '.join(size_text(row.bytes) for row in rows)})")
    fix = "test the machine's memory (memtest86+), and reinstall torch"
    if meeting.backend == "nccl":
        fix = (
            "try NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1: if the sums are right then, switch off PCIe access control "
            "services (ACS) and the IOMMU; else exchange the GPU or memory"
        )
    return check("fail", f"wrong sums on {'; '.join(wrong)}", fix)


def _check_bandwidth(backend: str, rows: Sequence[AllReduce]) -> Finding:
    check = Check(
        "bandwidth",
        "each step waits until the gradients are summed; this time decides whether more devices are faster",
        "set NCCL_DEBUG=INFO and look which path NCCL takes; see the finding on peer access"
        if backend == "nccl"
        else "end other programs that use the cores; between nodes, choose a faster interface (GLOO_SOCKET_IFNAME)",
    )
    smallest = rows[0]
    largest = rows[-1]
    example_s = EXAMPLE_BYTES / largest.bytes * largest.seconds
    text = (
        f"{largest.bus_gb_s:.2f} GB/s per rank, latency {smallest.seconds * 1e3:.2f} ms; the gradients of 25 million "
        f"parameters take about {example_s * 1e3:,.0f} ms"
    )
    if largest.bus_gb_s < MIN_BUS_GB_S[backend]:
        return check("warn", f"{text}; {backend} should reach {MIN_BUS_GB_S[backend]:g} GB/s")
    return check("ok", text)
