"""What the ranks of the checks do together: meet, compare clocks, sum numbers.

The same for ranks that Lockstep's launcher started (:func:`meet`) and for those of ``torchrun``
or ``srun`` (:mod:`lockstep.doctor.outside`).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.distributed.staging import finish
from lockstep.engine.process.runtime import rank_device
from lockstep.hardware.resolve import Placement
from lockstep.hardware.world import World
from lockstep.launch.local.worker import Rank
from lockstep.telemetry.records import versions

#: How long a rank waits for the others.
TIMEOUT_S = 60.0
#: Bytes: the latency; a small bucket; enough to fill the line (DDP sends buckets of 25 MiB).
SIZES = (4 << 10, 1 << 20, 64 << 20)
WARM_UP, REPEATS, CLOCK_ROUNDS = 2, 10, 8


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RankFacts(_Frozen):
    """One rank. ``clock_s``: how far its clock is ahead of rank 0's, and how exactly that is known (±), seconds."""

    rank: int
    host: str
    device: str
    versions: dict[str, str]
    clock_s: tuple[float, float] = (0.0, 0.0)


class AllReduce(_Frozen):
    """All-reduces of one size. ``wrong``: ranks whose sum was wrong. ``seconds``: of one, the slowest rank's median.

    ``bus_gb_s`` is 2(n−1)/n · bytes / seconds in 1e9 bytes: what travels over each rank's line in a ring, which
    compares with the line's own speed (nccl-tests, doc/PERFORMANCE.md).
    """

    bytes: int
    seconds: float
    bus_gb_s: float
    wrong: tuple[int, ...] = ()


class Meeting(_Frozen):
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
    facts = RankFacts(rank=world.rank, host=socket.gethostname(), device=name, versions=_versions(), clock_s=clock)
    backend = placement.backend or "gloo"
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=TIMEOUT_S))
    sums = tuple(_all_reduce(collectives, group, device, size) for size in SIZES)
    return Meeting(backend=backend, ranks=tuple(collectives.all_gather(facts)), all_reduce=sums)


def _versions() -> dict[str, str]:
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else ""
    known = versions()
    return {"nccl": nccl, **{name: known[name] for name in ("lockstep", "python", "torch")}}


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
    times = []
    for _ in range(WARM_UP + REPEATS):
        tensor.zero_()
        finish(device)
        collectives.barrier()
        started = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        finish(device)
        times.append(time.perf_counter() - started)
    outcomes = collectives.all_gather((right, median(times[WARM_UP:])))
    seconds = max(taken for _, taken in outcomes)
    wrong = tuple(rank for rank, (right, _) in enumerate(outcomes) if not right)
    bus = 2 * (ranks - 1) / ranks * size / seconds / 1e9
    return AllReduce(bytes=size, seconds=seconds, bus_gb_s=bus, wrong=wrong)
