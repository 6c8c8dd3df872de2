"""Findings about ranks: weights that part, gradients that are not reduced, calls that do not match, files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from lockstep.audit.findings import Finding
from lockstep.audit.trace import RunTrace, Step

#: Relative difference of norms above which tensors of two ranks are not the same.
_TOLERANCE = 1e-5


def first_difference(rows: Sequence[Sequence[float]]) -> int | None:
    """Return the first position at which the rows differ by more than rounding; ``None``: there is none."""
    for position, values in enumerate(zip(*rows, strict=False)):
        largest = max(map(abs, values))
        if not all(map(math.isfinite, values)):
            continue
        if max(values) - min(values) > _TOLERANCE * largest:
            return position
    return None


def parting(run: RunTrace) -> Finding | None:
    """The first step at which weights or gradients of the ranks differ, and why."""
    if run.size == 1 or run.is_sharded:
        return None
    names: list[str] = []
    unreduced: Finding | None = None
    for position, steps in enumerate(run.aligned_steps()):
        looks = [step.look for step in steps if step.look is not None]
        if len(looks) < run.size:
            continue
        names = looks[0]["names"] or names
        number = steps[0].number
        differing = first_difference([look["weights"] for look in looks])
        if differing is not None:
            name = _name(names, differing)
            evidence = {"step": number, "parameter": name, "norms": [look["weights"][differing] for look in looks]}
            if position == 0:
                message = f"before the first step, {name} differs between ranks"
                return Finding("AUDIT_INITIAL_WEIGHTS", _optimizer_line(run), message, evidence)
            rates = [step.record["lr"] for step in steps]
            if any(rate != rates[0] for rate in rates):
                evidence["lr"] = rates
            message = f"{name} differs between ranks before step {number}"
            return Finding("AUDIT_RANKS_PART", steps[0].record["site"], message, evidence)
        differing = first_difference([look["gradients"] for look in looks])
        if differing is not None:
            unreduced = _not_reduced(steps, _name(names, differing), differing)
            break
    return unreduced


def _name(names: Sequence[str], position: int) -> str:
    return names[position] if position < len(names) else f"parameter {position}"


def _optimizer_line(run: RunTrace) -> str | None:
    made = run.first.of("optimizer")
    return made[0]["site"] if made else None


def _not_reduced(steps: list[Step], name: str, position: int) -> Finding:
    step = steps[0]
    norms = [of_rank.look["gradients"][position] for of_rank in steps if of_rank.look]
    evidence = {"step": step.number, "parameter": name, "norms": norms}
    text = f"at step {step.number} the gradient of {name} differs between ranks"
    if step.forwards and not step.forwards[-1]["sync"]:
        return Finding(
            "AUDIT_NO_SYNC", step.forwards[-1]["site"], f"{text}: the last forward is under no_sync", evidence
        )
    bare = next((of_rank.bare[0] for of_rank in steps if of_rank.bare), None)
    if bare is not None:
        return Finding(
            "AUDIT_BARE_MODULE", bare["site"], f"{text}: the forward skips DistributedDataParallel", evidence
        )
    return Finding("AUDIT_NOT_REDUCED", step.record["site"], text, evidence)


def module_notes(run: RunTrace) -> Iterator[Finding]:
    """Notes about `DistributedDataParallel`: BatchNorm, reductions that could be left out."""
    if run.size == 1:
        return
    for record in run.first.of("ddp"):
        if record["batchnorm"]:
            evidence = {"layers": record["batchnorm"], "ranks": run.size}
            message = f"{record['batchnorm']} BatchNorm layers use the statistics of one rank's samples"
            yield Finding("AUDIT_BATCHNORM", record["site"], message, evidence)
            break
    for step in run.first.steps:
        synced = sum(forward["sync"] for forward in step.forwards)
        if len(step.micro_batches) > 1 and synced == len(step.forwards) == len(step.micro_batches):
            evidence = {"step": step.number, "reductions": synced}
            message = f"step {step.number} reduces its gradients {synced} times, after each micro-batch"
            yield Finding("AUDIT_SYNC_EACH", step.forwards[0]["site"], message, evidence)
            break


def unmatched_calls(run: RunTrace, *, has_failed: bool) -> Finding | None:
    """A rank that ends early, or the first collective call that another rank does not make."""
    if has_failed and (early := _ends_early(run)):
        return early
    if not has_failed and not all(rank.has_ended for rank in run.ranks):
        return None
    calls = [[call for call in rank.of("call") if not call.get("group")] for rank in run.ranks]
    for position, of_ranks in enumerate(zip_longest(*calls)):
        forms = {_form(call) for call in of_ranks}
        if len(forms) == 1:
            continue
        shown = next(call for call in of_ranks if call is not None)
        sites = [call and call["site"] for call in of_ranks]
        described = "; ".join(
            f"rank {rank}: " + ("no call" if call is None else _described(call)) for rank, call in enumerate(of_ranks)
        )
        message = f"collective call {position + 1} differs between ranks: {described}"
        return Finding("AUDIT_COLLECTIVE", shown["site"], message, {"position": position + 1, "sites": sites})
    return None


def _form(call: Any) -> tuple[Any, ...] | None:
    if call is None:
        return None
    has_size = call["kind"] in ("all_reduce", "reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")
    return (call["kind"], call.get("numel")) if has_size else (call["kind"],)


def _described(call: Any) -> str:
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
    """Files that several ranks write; checkpoints that lack a part."""
    writers: dict[str, dict[int, Any]] = {}
    for number, rank in enumerate(run.ranks):
        for record in (*rank.of("save"), *rank.of("write")):
            if record["path"] and record["site"]:
                writers.setdefault(record["path"], {})[number] = record
    for path, by_rank in writers.items():
        if len(by_rank) > 1:
            message = f"ranks {', '.join(map(str, by_rank))} write {path}"
            yield Finding(
                "AUDIT_FILE_RACE", by_rank[min(by_rank)]["site"], message, {"path": path, "ranks": sorted(by_rank)}
            )
            break
    saves = [(record, set(record["parts"])) for rank in run.ranks for record in rank.of("save") if record["frames"]]
    has_complete = any({"model", "optimizer"} <= parts for _, parts in saves)
    for record, parts in saves:
        missing = []
        if "optimizer" not in parts and "counter" in parts and not has_complete:
            missing.append("optimizer")
        if "optimizer" in parts:
            missing += ["scheduler"] if run.first.of("scheduler") and "scheduler" not in parts else []
            missing += ["scaler"] if run.first.of("scaled") and "scaler" not in parts else []
        if missing and "model" in parts:
            message = f"the checkpoint has {', '.join(sorted(parts))}, but not the state of: {', '.join(missing)}"
            yield Finding("AUDIT_CHECKPOINT", record["site"], message, {"missing": missing, "path": record["path"]})
            break
