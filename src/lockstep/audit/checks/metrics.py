"""Findings about evaluations: parts and means from which results of ranks are joined."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lockstep.audit.findings import Finding
from lockstep.audit.trace import Pass, Record, RunTrace

_SMALL = 1e-4


def metric_findings(run: RunTrace) -> Iterator[Finding]:
    """Yield findings about the evaluation passes of a run."""
    if run.size == 1:
        return
    groups = [group for group in run.passes(training=False) if all(walk.batches for walk in group)]
    for group in groups:
        yield from filter(None, (_never_joined(group), _mean_of_means(group)))


def _never_joined(group: list[Pass]) -> Finding | None:
    """Ranks that evaluate different samples, without a call that brings the results together."""
    parts = [frozenset(walk.indices or ()) for walk in group]
    sizes = [walk.about["size"] for walk in group]
    is_divided = all(part and size and len(part) < size for part, size in zip(parts, sizes, strict=True))
    if not is_divided or len(set(parts)) == 1 or not all(walk.is_whole for walk in group):
        return None
    if not all(walk.losses for walk in group) or any(_joins(walk, call) for walk in group for call in walk.calls):
        return None
    counts = [len(part) for part in parts]
    message = f"the ranks evaluate {', '.join(map(str, counts))} of {sizes[0]} samples and do not join the results"
    return Finding("AUDIT_EVAL_LOCAL", group[0].losses[-1]["site"], message, {"samples": counts, "size": sizes[0]})


def _joins(walk: Pass, call: Record) -> bool:
    """Whether ``call`` may bring results of the ranks together."""
    if call["kind"] in ("broadcast", "broadcast_object_list", "barrier", "scatter"):
        return False
    # Lightning agrees on decisions and on numbers of batches, in integers.
    is_decision = call.get("dtype") in ("bool", "uint8", "int32", "int64") and "lightning" in walk.about["through"]
    return "object" in call["kind"] or not is_decision


def _mean_of_means(group: list[Pass]) -> Finding | None:
    losses = [[record["loss"] for record in walk.losses] for walk in group]
    counts = [[record["count"] for record in walk.losses] for walk in group]
    if not all(losses) or not all(all(of_rank) for of_rank in counts):
        return None
    total = sum(map(sum, counts))
    sums = [math.fsum(v * n for v, n in zip(*pair, strict=True)) for pair in zip(losses, counts, strict=True)]
    right = sum(sums) / total
    batches = sum(map(len, losses))
    of_batches = [math.fsum(values) / len(values) for values in losses]
    of_ranks = [value / sum(number) for value, number in zip(sums, counts, strict=True)]
    candidates = (
        ("means of batches", of_batches, sum(of_batches) / len(group)),
        ("sums of means of batches", [math.fsum(values) for values in losses], sum(map(math.fsum, losses)) / batches),
        ("means of ranks", of_ranks, sum(of_ranks) / len(group)),
        ("means of batches", [values[-1] for values in losses], sum(map(math.fsum, losses)) / batches),
    )
    for name, values, reported in candidates:
        if abs(reported - right) <= _SMALL * abs(right):
            continue
        if all(_is_contributed(walk, value) for walk, value in zip(group, values, strict=True)):
            sizes = [len(walk.indices or ()) for walk in group]
            message = f"the ranks reduce {name} of unequal sizes: {reported:.6g}; over all samples it is {right:.6g}"
            evidence = {"reported": reported, "right": right, "counts": counts, "samples": sizes}
            site = next((call["site"] for call in group[0].calls if _has(call, values[0])), None)
            return Finding("AUDIT_EVAL_MEAN", site or group[0].about["site"], message, evidence)
    return None


def _has(call: Record, value: float) -> bool:
    return any(math.isclose(number, value, rel_tol=2e-6) for number in call.get("values", ()))


def _is_contributed(walk: Pass, value: float) -> bool:
    return any(_has(call, value) for call in walk.calls)
