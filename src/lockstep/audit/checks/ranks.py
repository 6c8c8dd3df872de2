"""Findings about ranks: weights that part, gradients that are not reduced, calls that do not match, files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from lockstep.audit.findings import Finding
from lockstep.audit.trace import Record, RunTrace, Step

#: Relative difference of norms above which tensors of two ranks are not the same.
_TOLERANCE = 1e-5
#: Findings about ranks that part, of which there is at most one.
PARTING = frozenset(
    f"AUDIT_{name}" for name in ("INITIAL_WEIGHTS", "RANKS_PART", "NO_SYNC", "BARE_MODULE", "NOT_REDUCED")
)
#: Calls for which all ranks have a tensor of one size.
_SIZED = ("all_reduce", "reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")
#: Stands for the next call of a rank that makes no more.
_NO_CALL: Record = {"name": "no call", "site": None, "numel": None}


def rank_findings(run: RunTrace) -> Iterator[Finding]:
    """Yield the first step at which the ranks differ, and notes about `DistributedDataParallel`."""
    if run.size == 1 or run.is_sharded:
        return
    for steps in run.aligned_steps():
        applied = [step.applied for step in steps if step.applied is not None]
        for content in ("weights", "norms") if len(applied) == run.size else ():
            norms = [record[content] for record in applied]
            position = _first_difference(norms)
            if position is not None:
                code, line = _parting(run, steps, is_weight=content == "weights")
                evidence = {"step": steps[0].number, "parameter": applied[0]["names"][position]}
                numbers = {"norms": [of_rank[position] for of_rank in norms], "lr": [s.about["lr"][0] for s in steps]}
                yield Finding(code, line, {**evidence, **numbers})
                return
    for record in run.first.of("ddp"):
        if record["batchnorm"]:
            yield Finding("AUDIT_BATCHNORM", record["site"], {"layers": record["batchnorm"], "ranks": run.size})
    for step in run.first.steps:
        forwards = step.of("forward")
        reductions = sum(forward["syncs"] for forward in forwards)
        if reductions > 1 and reductions == len(forwards) == len(step.of("backward")):
            yield Finding("AUDIT_SYNC_EACH", forwards[0]["site"], {"step": step.number, "reductions": reductions})


def _first_difference(rows: Sequence[Sequence[float]]) -> int | None:
    """Return the first position at which norms differ by more than rounding; ``None``: there is none."""
    pairs = enumerate(zip(*rows, strict=False))
    return next((i for i, norms in pairs if max(norms) < math.inf and min(norms) < (1 - _TOLERANCE) * max(norms)), None)


def _parting(run: RunTrace, steps: list[Step], *, is_weight: bool) -> tuple[str, str | None]:
    """Return the code and the line of the reason for which weights, or gradients, differ between ranks."""
    if is_weight and steps[0] is run.first.steps[0]:
        return "AUDIT_INITIAL_WEIGHTS", next((record["site"] for record in run.first.of("optimizer")), None)
    if is_weight:
        return "AUDIT_RANKS_PART", steps[0].about["site"]
    forwards = steps[0].of("forward")
    bare = [record for step in steps for record in step.of("bare")]
    if forwards and not forwards[-1]["syncs"]:
        return "AUDIT_NO_SYNC", forwards[-1]["site"]
    return ("AUDIT_BARE_MODULE", bare[0]["site"]) if bare else ("AUDIT_NOT_REDUCED", steps[0].about["site"])


def unmatched_calls(run: RunTrace, *, has_failed: bool) -> Finding | None:
    """Return a rank that ends early, or the first collective call that another rank does not make."""
    for group in run.passes(training=True) if has_failed else ():
        lengths = [len(walk.batches) for walk in group]
        shortest = group[lengths.index(min(lengths))]
        if len(set(lengths)) > 1 and shortest.is_whole:
            return Finding("AUDIT_ENDS_EARLY", shortest.about["site"], {"batches": lengths})
    if not has_failed and not all(rank.has_ended for rank in run.ranks):
        return None
    calls = [[call for call in rank.of("call") if not call["in_group"]] for rank in run.ranks]
    for number, of_ranks in enumerate(zip_longest(*calls, fillvalue=_NO_CALL), 1):
        if len({(call["name"], call["name"] in _SIZED and call["numel"]) for call in of_ranks}) > 1:
            described = [
                f"{call['name']} of {call['numel']} elements at {call['site']}" if call["site"] else call["name"]
                for call in of_ranks
            ]
            line = next((call["site"] for call in of_ranks if call["site"]), None)
            return Finding("AUDIT_COLLECTIVE", line, {"number": number, "calls": described})
    return None


def file_findings(run: RunTrace) -> Iterator[Finding]:
    """Yield findings about files that several ranks write, and checkpoints that lack a part."""
    saves = [(number, record) for number, rank in enumerate(run.ranks) for record in rank.of("save")]
    for path in dict.fromkeys(record["path"] for _, record in saves if record["path"]):
        writers = {number: record["site"] for number, record in saves if record["path"] == path}
        if len(writers) > 1:
            yield Finding("AUDIT_FILE_RACE", next(iter(writers.values())), {"path": path, "ranks": list(writers)})
    has_complete = any({"model", "optimizer"} <= set(record["parts"]) for _, record in saves)
    for _, record in saves if not run.uses_lightning else ():  # Lightning writes the parts that its user selects
        parts = record["parts"]
        if "optimizer" in parts:
            needed = {"scheduler": bool(run.first.of("scheduler")), "scaler": bool(run.first.of("scaled"))}
        else:
            needed = {"optimizer": "counter" in parts and not has_complete}
        missing = [part for part, is_needed in needed.items() if is_needed and part not in parts]
        if missing and "model" in parts:
            yield Finding("AUDIT_CHECKPOINT", record["site"], {"parts": parts, "missing": missing})
