"""Findings about ranks: weights that part, gradients that are not reduced, calls that do not match, files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from lockstep.audit.findings import Finding
from lockstep.audit.trace import Record, RunTrace, Step

#: Relative difference of norms above which tensors of two ranks are not the same.
_TOLERANCE = 1e-5


#: Findings about ranks that part, of which there is at most one.
PARTING = frozenset(
    f"AUDIT_{name}" for name in ("INITIAL_WEIGHTS", "RANKS_PART", "NO_SYNC", "BARE_MODULE", "NOT_REDUCED")
)


def parting(run: RunTrace) -> Iterator[Finding]:
    """Yield the first step at which weights or gradients of the ranks differ, and why."""
    if run.size == 1 or run.is_sharded:
        return
    names: list[str] = []
    for position, steps in enumerate(run.aligned_steps()):
        looks = [step.look for step in steps if step.look is not None]
        if len(looks) < run.size:
            continue
        names = looks[0]["names"] or names
        for content in ("weights", "gradients"):
            norms = [look[content] for look in looks]
            differing = _first_difference(norms)
            if differing is None:
                continue
            name = names[differing] if differing < len(names) else f"parameter {differing}"
            number = steps[0].number
            evidence = {"step": number, "parameter": name, "norms": [of_rank[differing] for of_rank in norms]}
            if content == "gradients":
                text = f"at step {number} the gradient of {name} differs between ranks"
                yield _unreduced(steps, text, evidence)
            elif position == 0:
                sites = [record["site"] for record in run.first.of("optimizer")]
                message = f"before the first step, {name} differs between ranks"
                yield Finding("AUDIT_INITIAL_WEIGHTS", sites[0] if sites else None, message, evidence)
            else:
                evidence["lr"] = [step.record["lr"] for step in steps]
                message = f"{name} differs between ranks before step {number}"
                yield Finding("AUDIT_RANKS_PART", steps[0].record["site"], message, evidence)
            return


def _first_difference(rows: Sequence[Sequence[float]]) -> int | None:
    """Return the first position at which the rows differ by more than rounding; ``None``: there is none."""
    for position, values in enumerate(zip(*rows, strict=False)):
        is_finite = all(map(math.isfinite, values))
        if is_finite and max(values) - min(values) > _TOLERANCE * max(map(abs, values)):
            return position
    return None


def _unreduced(steps: list[Step], text: str, evidence: dict[str, Any]) -> Finding:
    forwards = steps[0].forwards
    bare = [record for step in steps for record in step.bare]
    if forwards and not forwards[-1]["sync"]:
        message = f"{text}: the last forward is under no_sync"
        return Finding("AUDIT_NO_SYNC", forwards[-1]["site"], message, evidence)
    if bare:
        message = f"{text}: the forward skips DistributedDataParallel"
        return Finding("AUDIT_BARE_MODULE", bare[0]["site"], message, evidence)
    return Finding("AUDIT_NOT_REDUCED", steps[0].record["site"], text, evidence)


def module_notes(run: RunTrace) -> Iterator[Finding]:
    """Yield notes about `DistributedDataParallel`: BatchNorm, reductions that could be left out."""
    if run.size == 1:
        return
    for record in run.first.of("ddp"):
        if record["batchnorm"]:
            evidence = {"layers": record["batchnorm"], "ranks": run.size}
            message = f"{record['batchnorm']} BatchNorm layers use the statistics of one rank's samples"
            yield Finding("AUDIT_BATCHNORM", record["site"], message, evidence)
    for step in run.first.steps:
        synced = sum(forward["sync"] for forward in step.forwards)
        if len(step.micro_batches) > 1 and synced == len(step.forwards) == len(step.micro_batches):
            evidence = {"step": step.number, "reductions": synced}
            message = f"step {step.number} reduces its gradients {synced} times, after each micro-batch"
            yield Finding("AUDIT_SYNC_EACH", step.forwards[0]["site"], message, evidence)


def unmatched_calls(run: RunTrace, *, has_failed: bool) -> Finding | None:
    """Return a rank that ends early, or the first collective call that another rank does not make."""
    if has_failed and (early := _ends_early(run)):
        return early
    if not has_failed and not all(rank.has_ended for rank in run.ranks):
        return None
    calls = [[call for call in rank.of("call") if not call.get("group")] for rank in run.ranks]
    for number, of_ranks in enumerate(zip_longest(*calls, fillvalue=_NO_CALL), 1):
        if len({(call["kind"], call["kind"] in _SIZED and call.get("numel")) for call in of_ranks}) == 1:
            continue
        described = "; ".join(f"rank {rank}: {_described(call)}" for rank, call in enumerate(of_ranks))
        sites = [call["site"] for call in of_ranks]
        message = f"collective call {number} differs between ranks: {described}"
        evidence = {"position": number, "sites": sites}
        return Finding("AUDIT_COLLECTIVE", next(filter(None, sites), None), message, evidence)
    return None


#: Stands for the next call of a rank that makes no more.
_NO_CALL: Record = {"kind": None, "site": None}
#: Calls for which all ranks have a tensor of one size.
_SIZED = ("all_reduce", "reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")


def _described(call: Record) -> str:
    if call["kind"] is None:
        return "no call"
    line = (call["site"] or "?").rpartition(":")[2]
    size = f" of {call['numel']} elements" if "numel" in call else ""
    return f"{call['kind']}{size} in line {line}"


def _ends_early(run: RunTrace) -> Finding | None:
    for group in run.passes(training=True):
        lengths = [len(walk.batches) for walk in group]
        shortest = lengths.index(min(lengths))
        if len(set(lengths)) > 1 and group[shortest].is_whole:
            message = f"rank {shortest} has {min(lengths)} batches in an epoch, others have {max(lengths)} or more"
            return Finding("AUDIT_ENDS_EARLY", group[shortest].about["site"], message, {"batches": lengths})
    return None


def file_findings(run: RunTrace) -> Iterator[Finding]:
    """Yield findings about files that several ranks write, and checkpoints that lack a part."""
    writers: dict[str, dict[int, Any]] = {}
    for number, rank in enumerate(run.ranks):
        for record in (*rank.of("save"), *rank.of("write")):
            if record["path"] and record["site"]:
                writers.setdefault(record["path"], {})[number] = record
    for path, by_rank in writers.items():
        if len(by_rank) > 1:
            message = f"ranks {', '.join(map(str, by_rank))} write {path}"
            evidence = {"path": path, "ranks": sorted(by_rank)}
            yield Finding("AUDIT_FILE_RACE", by_rank[min(by_rank)]["site"], message, evidence)
    saves = [(record, set(record["parts"])) for rank in run.ranks for record in rank.of("save") if record["frames"]]
    has_complete = any({"model", "optimizer"} <= parts for _, parts in saves)
    for record, parts in saves:
        if "optimizer" in parts:
            needed = {"scheduler": bool(run.first.of("scheduler")), "scaler": bool(run.first.of("scaled"))}
        else:
            needed = {"optimizer": "counter" in parts and not has_complete}
        missing = [part for part, is_needed in needed.items() if is_needed and part not in parts]
        if missing and "model" in parts:
            message = f"the checkpoint has {', '.join(sorted(parts))}, but not the state of: {', '.join(missing)}"
            yield Finding("AUDIT_CHECKPOINT", record["site"], message, {"missing": missing, "path": record["path"]})
