"""Findings about evaluations: how the results of the ranks are joined."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from lockstep.audit.findings import Finding, finding
from lockstep.audit.trace import Pass, Record, Run

#: Relative difference of a metric that rounding does not make.
_SMALL = 1e-4
#: Calls that bring no results of the ranks together.
_DISTRIBUTING = ("broadcast", "broadcast_object_list", "barrier", "scatter")


def metric_findings(run: Run) -> Iterator[Finding]:
    """Yield findings about the evaluation passes of a run."""
    for passes in run.evaluations if run.size > 1 else ():
        if all(data_pass.records.of("eval_loss") for data_pass in passes):
            yield from _never_joined(run, passes)
            yield from _means_of_means(passes)


def _never_joined(run: Run, passes: Sequence[Pass]) -> Iterator[Finding]:
    """Find ranks that evaluate different samples and make no call that joins the results."""
    parts = [frozenset(data_pass.indices or ()) for data_pass in passes]
    size = passes[0].about["size"] or 0
    is_divided = len(set(parts)) > 1 and all(0 < len(part) < size for part in parts)
    calls = [call for data_pass in passes for call in data_pass.records.of("call") if call["name"] not in _DISTRIBUTING]
    # Lightning agrees on decisions and on numbers of batches, in integers.
    joins = [call for call in calls if call["is_float"] is not False or not run.uses_lightning]
    if is_divided and not joins:
        line = passes[0].records.of("eval_loss")[-1]["site"]
        yield finding("AUDIT_EVAL_LOCAL", line, {"counts": list(map(len, parts)), "size": size})


def _means_of_means(passes: Sequence[Pass]) -> Iterator[Finding]:
    """Find a reduction of means over unequal counts, of batches or of the samples of a rank."""
    losses = [[record["loss"] for record in data_pass.records.of("eval_loss")] for data_pass in passes]
    counts = [[record["count"] for record in data_pass.records.of("eval_loss")] for data_pass in passes]
    if not all(map(all, counts)):
        return
    means_of_batches = [np.mean(of_rank) for of_rank in losses]
    means_of_ranks = [np.average(of_rank, weights=weights) for of_rank, weights in zip(losses, counts, strict=True)]
    right = float(np.average(means_of_ranks, weights=[sum(of_rank) for of_rank in counts]))
    for means in (means_of_batches, means_of_ranks):
        reported = float(np.mean(means))
        calls = [_call_of(data_pass, mean) for data_pass, mean in zip(passes, means, strict=True)]
        if calls[0] and None not in calls and not math.isclose(reported, right, rel_tol=_SMALL):
            evidence = {"reported": reported, "right": right, "counts": counts}
            yield finding("AUDIT_EVAL_MEAN", calls[0]["site"], evidence)
            return


def _call_of(data_pass: Pass, value: float) -> Record | None:
    """Return the call to which the rank contributes ``value``."""
    calls = data_pass.records.of("call")
    return next((call for call in calls if any(math.isclose(v, value, rel_tol=2e-6) for v in call["values"])), None)
