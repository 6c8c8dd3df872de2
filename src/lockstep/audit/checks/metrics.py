"""Findings about evaluations: parts and means from which results of ranks are joined."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from lockstep.audit.findings import Finding, finding
from lockstep.audit.trace import Pass, Record, Run

#: Relative difference of a metric that rounding does not make.
_SMALL = 1e-4
#: Calls that bring no results of the ranks together.
_DISTRIBUTING = ("broadcast", "broadcast_object_list", "barrier", "scatter")


def metric_findings(run: Run) -> Iterator[Finding]:
    """Yield findings about the evaluation passes of a run."""
    for group in run.evaluations if run.size > 1 else ():
        if all(walk.records.of("eval_loss") for walk in group):
            yield from _never_joined(run, group)
            yield from _means_of_means(group)


def _never_joined(run: Run, group: Sequence[Pass]) -> Iterator[Finding]:
    """Yield that the ranks evaluate different samples, without a call that joins the results."""
    parts = [frozenset(walk.indices or ()) for walk in group]
    size = group[0].about["size"]
    is_divided = all(part and len(part) < (size or 0) for part in parts) and len(set(parts)) > 1
    calls = [call for walk in group for call in walk.records.of("call") if call["name"] not in _DISTRIBUTING]
    # Lightning agrees on decisions and on numbers of batches, in integers.
    joins = [call for call in calls if call["is_float"] is not False or not run.uses_lightning]
    if is_divided and all(walk.is_whole for walk in group) and not joins:
        line = group[0].records.of("eval_loss")[-1]["site"]
        yield finding("AUDIT_EVAL_LOCAL", line, {"counts": list(map(len, parts)), "size": size})


def _means_of_means(group: Sequence[Pass]) -> Iterator[Finding]:
    """Yield that the ranks reduce means, of batches or of their samples, which have unequal counts."""
    losses = [[record["loss"] for record in walk.records.of("eval_loss")] for walk in group]
    counts = [[record["count"] for record in walk.records.of("eval_loss")] for walk in group]
    if not all(map(all, counts)):
        return
    sums = [math.fsum(v * n for v, n in zip(*of_rank, strict=True)) for of_rank in zip(losses, counts, strict=True)]
    right = sum(sums) / sum(map(sum, counts))
    of_batches = [math.fsum(values) / len(values) for values in losses]
    of_ranks = [value / sum(of_rank) for value, of_rank in zip(sums, counts, strict=True)]
    for means in (of_batches, of_ranks):
        reported = sum(means) / len(group)
        calls = [_call_of(walk, mean) for walk, mean in zip(group, means, strict=True)]
        if abs(reported - right) > _SMALL * abs(right) and all(calls):
            line = (calls[0] or {})["site"] or group[0].about["site"]
            yield finding("AUDIT_EVAL_MEAN", line, {"reported": reported, "right": right, "counts": counts})
            return


def _call_of(walk: Pass, value: float) -> Record | None:
    """Return the call to which the rank contributes ``value``."""
    calls = walk.records.of("call")
    return next((call for call in calls if any(math.isclose(v, value, rel_tol=2e-6) for v in call["values"])), None)
