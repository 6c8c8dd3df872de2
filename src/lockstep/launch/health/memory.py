"""Memory of the ranks: what each of them used when one ran out of it, and a batch that needs less.

Three sources, since a killed rank records nothing: what a failing rank records about itself, what the launcher measures
of its processes, and the run's rows (``ranks.jsonl``).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import psutil

from lockstep.hardware.host import oom_kills, usable_memory
from lockstep.planning.batch import BatchPlan
from lockstep.telemetry.files import FileContent

#: How often the launcher measures its processes.
INTERVAL_S = 1.0
_GB = 1e9


class RankMemory(FileContent):
    """Bytes; 0: not known.

    ``resident``, ``peak_resident``, ``children`` (its loader workers) are the host's, ``limit`` is RLIMIT_AS;
    ``allocated``, ``reserved``, ``peak`` and ``total`` are the GPU's, by torch's allocator.
    """

    resident: int = 0
    peak_resident: int = 0
    children: int = 0
    limit: int = 0
    allocated: int = 0
    reserved: int = 0
    peak: int = 0
    total: int = 0

    def over(self, other: RankMemory) -> RankMemory:
        """This, and where it knows nothing what ``other`` knows."""
        known = {name: value for name, value in self.model_dump().items() if value}
        return other.model_copy(update=known)

    def line(self) -> str:
        parts = []
        if self.peak or self.allocated:
            gpu = f"GPU: {_gb(self.allocated)} allocated, {_gb(self.reserved)} reserved, {_gb(self.peak)} at most"
            unused = 1 - self.allocated / self.reserved if self.reserved else 0.0
            fragmented = f" (fragmented: {unused:.0%} of what is reserved is not allocated)" if unused > 0.1 else ""
            parts.append(gpu + (f", of {_gb(self.total)}" if self.total else "") + fragmented)
        if self.resident:
            host = f"{_gb(self.resident)} resident, {_gb(max(self.resident, self.peak_resident))} at most"
            host += f", {_gb(self.children)} in its workers" if self.children else ""
            parts.append(f"host: {host}" + (f", limit {_gb(self.limit)} (ulimit -v)" if self.limit else ""))
        return "; ".join(parts) or "not known"


class MachineMemory(FileContent):
    """Bytes that this machine, or its control group, has in all and has free; processes killed for lack of it."""

    total: int = 0
    free: int = 0
    kills: int = 0


def own_memory() -> RankMemory:
    """This process's memory. Loads nothing: a process that has not used a GPU has no GPU memory."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    known: dict[str, int] = {
        "resident": int(psutil.Process().memory_info().rss),
        "peak_resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # getrusage(2)
        "limit": 0 if limit == resource.RLIM_INFINITY else limit,
    }
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        known |= {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "peak": torch.cuda.max_memory_allocated(),
            "total": torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory,
        }
    return RankMemory(**known)


class MemoryWatch:
    """The ranks' memory as the launcher measures it: the newest and the highest.

    Args:
        pids: of the processes, by rank.
    """

    def __init__(self, pids: Mapping[int, int], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._pids = dict(pids)
        self._clock = clock
        self._due = clock()
        self._kills_before = oom_kills()
        self._free = 0
        self.ranks: dict[int, RankMemory] = {}

    def look(self, alive: Collection[int]) -> None:
        """Measure, if it is due."""
        if self._clock() < self._due:
            return
        self._due = self._clock() + INTERVAL_S
        self._free = usable_memory()[1]
        for rank in alive:
            try:
                process = psutil.Process(self._pids[rank])
                resident = process.memory_info().rss
                children = sum(child.memory_info().rss for child in process.children(recursive=True))
            except psutil.Error:
                continue
            before = self.ranks.get(rank, RankMemory())
            peak = max(resident, before.peak_resident)
            self.ranks[rank] = RankMemory(resident=resident, peak_resident=peak, children=children)

    def machine(self) -> MachineMemory:
        return MachineMemory(total=usable_memory()[0], free=self._free, kills=oom_kills() - self._kills_before)


def machine_now() -> MachineMemory:
    """This machine's memory as it is now."""
    total, free = usable_memory()
    return MachineMemory(total=total, free=free)


def table(ranks: Mapping[int, RankMemory], machine: MachineMemory) -> str:
    """A line for each rank and one for the machine."""
    lines = ["memory of each rank:"]
    lines += [f"  rank {rank}: {memory.line()}" for rank, memory in sorted(ranks.items())]
    if machine.total:
        lines.append(f"  this machine: {_gb(machine.total)}, {_gb(machine.free)} of it free when last measured")
    return "\n".join(lines)


def from_rows(rows: Collection[Mapping[str, Any]], on_gpu: bool) -> dict[int, RankMemory]:
    """The memory of each rank in the newest row of ``ranks.jsonl``."""
    found: dict[int, RankMemory] = {}
    for state in list(rows)[-1].get("ranks", ()) if rows else ():
        values = {name: int((state.get(key) or 0) * _GB) for name, key in (_GPU_KEYS if on_gpu else _HOST_KEYS).items()}
        found[int(state.get("rank", 0))] = RankMemory(**values)
    return found


_GPU_KEYS = {"allocated": "memory_gb", "reserved": "reserved_gb", "peak": "peak_gb"}
_HOST_KEYS = {"resident": "memory_gb", "peak_resident": "peak_gb"}


def smaller_batch(batch: BatchPlan) -> tuple[int, int] | None:
    """``(batch size, accumulation)`` that halve a micro-batch and keep the global batch; ``None``: it is 1 already.

    The arithmetic is that of :func:`lockstep.planning.batch.resolve_batch` for a global batch that is held.
    """
    if batch.lanes is not None or batch.batch_size <= 1:
        return None
    share = -(-batch.global_batch // (batch.ranks * batch.devices_per_rank))
    accumulate = -(-share // (batch.batch_size // 2))
    return -(-share // accumulate), accumulate


def advice(batch: BatchPlan, run: str) -> str:
    """The command that resumes ``run`` with the same global batch and needs less memory."""
    smaller = smaller_batch(batch)
    if smaller is None:
        reason = "a micro-batch is one lane" if batch.lanes else "a micro-batch is one sample"
        return f"{reason}, so only more devices, a smaller model or fewer loader workers (--num-workers) need less"
    size, accumulate = smaller
    return (
        f"the same global batch of {batch.global_batch} as batch size {size} × {accumulate} micro-batches per device: "
        f"lockstep resume {run} --set training.batch_size={size} --set training.accumulate=1 "
        f"--set training.global_batch_size={batch.global_batch}"
    )


def evaluation_advice(batch_size: int, run: str) -> str:
    """The command that resumes ``run`` and evaluates with less memory than ``batch_size`` samples take."""
    if batch_size <= 1:
        return "an evaluation takes one sample at a time, so only a smaller model or metrics that keep less need less"
    return (
        f"evaluations with {batch_size // 2} samples at a time, which changes no result: "
        f"lockstep resume {run} --set validation.batch_size={batch_size // 2}"
    )


def _gb(value: int) -> str:
    return f"{value / _GB:.2f} GB"
