"""Findings from what the ranks measured together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lockstep.doctor.finding import Finding
from lockstep.doctor.ranks import AllReduce, Meeting, RankFacts

#: Beyond it, logs of several nodes cannot be compared, and tickets and certificates may be refused.
MOST_SKEW_S = 1.0
#: Bus bandwidth below which something is wrong: a GPU pair without peer access, or a network of 1 Gbit/s.
LEAST_BUS_GB_S = {"nccl": 2.0, "gloo": 0.1}
#: The gradients of a model with 25 million parameters in float32: an example that people know (ResNet-50).
EXAMPLE_BYTES = 100_000_000


def check_meeting(meeting: Meeting) -> Iterator[Finding]:
    """Findings about ranks that have met."""
    hosts = list(dict.fromkeys(rank.host for rank in meeting.ranks))
    devices = ", ".join(
        f"{rank.rank} on {rank.device}{f' of {rank.host}' * (len(hosts) > 1)}" for rank in meeting.ranks
    )
    yield Finding(
        "ranks",
        "ok",
        f"{len(meeting.ranks)} ranks met over {meeting.backend}: {devices}",
        "several devices train together only if their processes reach each other",
    )
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
        return Finding(
            "clock skew", "warn", what, why, "let every node keep its time by NTP (chrony, systemd-timesyncd)"
        )
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
