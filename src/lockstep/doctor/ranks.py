"""What the ranks of the checks do together: meet, compare clocks, sum numbers; and the findings about it.

The same for ranks that Lockstep's launcher started (:func:`meet`) and for those of ``torchrun``
or ``srun`` (:mod:`lockstep.doctor.examine`).
"""

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

from lockstep.bench.comm import call_time
from lockstep.bench.summary import bus_factor
from lockstep.doctor.finding import Finding
from lockstep.doctor.gpus import own_versions
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.process.runtime import rank_device
from lockstep.hardware.resolve import Placement
from lockstep.hardware.world import World
from lockstep.launch.local.worker import Rank
from lockstep.planning.decision import Frozen

#: How long a rank waits for the others.
TIMEOUT_S = 60.0
#: Bytes: the latency; a small bucket; enough to fill the line (DDP sends buckets of 25 MiB).
SIZES = (4 << 10, 1 << 20, 64 << 20)
CLOCK_ROUNDS = 8
TOGETHER = "several devices train together only if their processes reach each other"
#: Beyond it, logs of several nodes cannot be compared, and tickets and certificates may be refused.
MOST_SKEW_S = 1.0
#: Bus bandwidth below which something is wrong: a GPU pair without peer access, or a network of 1 Gbit/s.
LEAST_BUS_GB_S = {"nccl": 2.0, "gloo": 0.1}
#: The gradients of a model with 25 million parameters in float32: an example that people know (ResNet-50).
EXAMPLE_BYTES = 100_000_000


class RankFacts(Frozen):
    """One rank. ``clock_s``: how far its clock is ahead of rank 0's, and how exactly that is known (±), seconds."""

    rank: int
    host: str
    device: str
    versions: dict[str, str]
    clock_s: tuple[float, float] = (0.0, 0.0)


class AllReduce(Frozen):
    """All-reduces of one size. ``wrong``: ranks whose sum was wrong. ``seconds``: of one, the slowest rank's median.

    ``bus_gb_s`` is 2(n−1)/n · bytes / seconds in 1e9 bytes: what travels over each rank's line in a ring, which
    compares with the line's own speed (nccl-tests, doc/PERFORMANCE.md).
    """

    bytes: int
    seconds: float
    bus_gb_s: float
    wrong: tuple[int, ...] = ()


class Meeting(Frozen):
    """What the ranks found out together."""

    backend: str
    ranks: tuple[RankFacts, ...]
    all_reduce: tuple[AllReduce, ...]


@contextmanager
def joined(world: World, placement: Placement) -> Iterator[Store]:
    """A gloo group of all ranks, destroyed at the end; the store stays usable as long as it is referenced.

    The launcher's store may serve a second group afterwards (the training's), so this one has separate names there.

    Raises:
        RuntimeError: the others did not join within :data:`TIMEOUT_S`, or cannot be reached.
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
        # NCCL waits for all ranks there, and after a failure they wait for this one.
        if not (failed and placement.backend == "nccl"):
            dist.destroy_process_group()


def meet(rank: Rank, placement: Placement) -> Meeting:
    """One rank of the examination, started by Lockstep's launcher."""
    with joined(rank.world, placement):
        return measure(Collectives(rank.world, timeout_s=TIMEOUT_S), rank.world, placement)


def measure(collectives: Collectives, world: World, placement: Placement) -> Meeting:
    """Facts, clocks and all-reduces of all ranks; collective, the same on every rank."""
    device = rank_device(placement.devices, world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    name = placement.devices[world.local_rank % len(placement.devices)]
    clock = _clock_ahead(collectives)
    facts = RankFacts(rank=world.rank, host=socket.gethostname(), device=name, versions=own_versions(), clock_s=clock)
    backend = placement.backend or "gloo"
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=TIMEOUT_S))
    sums = tuple(_all_reduce(collectives, group, device, size) for size in SIZES)
    return Meeting(backend=backend, ranks=tuple(collectives.all_gather(facts)), all_reduce=sums)


def _clock_ahead(collectives: Collectives) -> tuple[float, float]:
    """Seconds that this rank's wall clock is ahead of rank 0's, and ±, by the quickest of some exchanges.

    Rank 0 asks, notes when it asked and was answered, and takes the middle (F. Cristian, "Probabilistic clock
    synchronization", Distributed Computing 3, 1989).
    """
    found = {0: (0.0, 0.0)}
    for rank in range(1, collectives.size):
        if collectives.is_main:
            found[rank] = min((_ask(rank) for _ in range(CLOCK_ROUNDS)), key=lambda answer: answer[1])
        elif collectives.rank == rank:
            for _ in range(CLOCK_ROUNDS):
                dist.recv(torch.zeros(1), src=0)
                dist.send(torch.tensor([time.time()], dtype=torch.float64), dst=0)
    return collectives.broadcast(found)[collectives.rank]


def _ask(rank: int) -> tuple[float, float]:
    answer = torch.zeros(1, dtype=torch.float64)
    asked = time.time()
    dist.send(torch.zeros(1), dst=rank)
    dist.recv(answer, src=rank)
    answered = time.time()
    return answer.item() - (asked + answered) / 2, (answered - asked) / 2


def _all_reduce(
    collectives: Collectives, group: dist.ProcessGroup | None, device: torch.device, size: int
) -> AllReduce:
    # Whole numbers far below 2^24, so float32 sums are exact in any order.
    pattern = torch.arange(size // 4, dtype=torch.float32, device=device) % 251
    tensor = pattern + collectives.rank
    dist.all_reduce(tensor, group=group)
    ranks = collectives.size
    right = torch.equal(tensor, pattern * ranks + ranks * (ranks - 1) / 2)
    wrong = tuple(rank for rank, each in enumerate(collectives.all_gather(right)) if not each)
    tensor.zero_()
    seconds = call_time(collectives, lambda: dist.all_reduce(tensor, group=group), device)
    bus = bus_factor("all_reduce", ranks) * size / seconds / 1e9
    return AllReduce(bytes=size, seconds=seconds, bus_gb_s=bus, wrong=wrong)


def check_meeting(meeting: Meeting) -> Iterator[Finding]:
    """Findings about ranks that have met."""
    hosts = list(dict.fromkeys(rank.host for rank in meeting.ranks))
    devices = ", ".join(
        f"{rank.rank} on {rank.device}{f' of {rank.host}' * (len(hosts) > 1)}" for rank in meeting.ranks
    )
    what = f"{len(meeting.ranks)} ranks met over {meeting.backend}: {devices}"
    yield Finding("ranks", "ok", what, TOGETHER)
    if len(hosts) > 1:
        yield _check_same_versions(meeting.ranks)
    yield _check_skew(meeting.ranks)
    yield _check_sums(meeting)
    yield _check_bandwidth(meeting.backend, meeting.all_reduce)


def _check_same_versions(ranks: Sequence[RankFacts]) -> Finding:
    why = "other versions compute other numbers, and other versions of NCCL cannot talk to each other"
    differing = [
        f"{name} {', '.join(dict.fromkeys(rank.versions.get(name, '') or 'none' for rank in ranks))}"
        for name in ranks[0].versions
        if len({rank.versions.get(name) for rank in ranks}) > 1
    ]
    if differing:
        fix = "install the same constraints.txt on every node"
        return Finding("same versions", "fail", f"the nodes differ: {'; '.join(differing)}", why, fix)
    return Finding("same versions", "ok", "the same on every node", why)


def _check_skew(ranks: Sequence[RankFacts]) -> Finding:
    why = "times in logs and run folders of several nodes are compared by their clocks"
    farthest = max(ranks, key=lambda rank: abs(rank.clock_s[0]))
    ahead, uncertain = farthest.clock_s
    what = f"the ranks' clocks are at most {abs(ahead) * 1e3:.2f} ms apart (±{uncertain * 1e3:.2f} ms)"
    if abs(ahead) - uncertain > MOST_SKEW_S:
        what = f"the clock of {farthest.host} is {abs(ahead):.1f} s {'ahead' if ahead > 0 else 'behind'} of rank 0's"
        fix = "let every node keep its time by NTP (chrony, systemd-timesyncd)"
        return Finding("clock skew", "warn", what, why, fix)
    return Finding("clock skew", "ok", what, why)


def _check_sums(meeting: Meeting) -> Finding:
    why = "a step's gradients are summed over all ranks: a wrong sum trains a wrong model without an error"
    wrong = [
        f"rank {', '.join(map(str, row.wrong))} at {size_text(row.bytes)}" for row in meeting.all_reduce if row.wrong
    ]
    if wrong:
        fix = (
            "try NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1: if the sums are right then, switch off PCIe access control "
            "services (ACS) and the IOMMU; else exchange the GPU or memory"
            if meeting.backend == "nccl"
            else "test the machine's memory (memtest86+), and reinstall torch"
        )
        return Finding("all-reduce", "fail", f"wrong sums on {'; '.join(wrong)}", why, fix)
    sizes = ", ".join(size_text(row.bytes) for row in meeting.all_reduce)
    return Finding("all-reduce", "ok", f"the sums are right on every rank ({sizes})", why)


def _check_bandwidth(backend: str, rows: Sequence[AllReduce]) -> Finding:
    why = "each step waits until the gradients are summed; what that costs decides whether more devices are faster"
    small, large = rows[0], rows[-1]
    example = EXAMPLE_BYTES / large.bytes * large.seconds
    what = (
        f"{large.bus_gb_s:.2f} GB/s per rank, latency {small.seconds * 1e3:.2f} ms; the gradients of 25 million "
        f"parameters take about {example * 1e3:,.0f} ms"
    )
    least = LEAST_BUS_GB_S[backend]
    if large.bus_gb_s < least:
        fix = (
            "set NCCL_DEBUG=INFO and look which path NCCL takes; see the finding on peer access"
            if backend == "nccl"
            else "end other programs that use the cores; between nodes, choose a faster interface (GLOO_SOCKET_IFNAME)"
        )
        return Finding("bandwidth", "warn", f"{what}; {backend} should reach {least:g} GB/s", why, fix)
    return Finding("bandwidth", "ok", what, why)


def size_text(size: int) -> str:
    """``4 KiB``, ``64 MiB``."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
