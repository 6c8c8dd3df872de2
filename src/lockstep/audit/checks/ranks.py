"""Findings about ranks: weights that part, gradients that are not reduced, calls that do not match, files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from lockstep.audit.findings import Finding, finding
from lockstep.audit.trace import Record, Records, Run

#: Relative difference of norms above which tensors of two ranks are not the same.
_TOLERANCE = 1e-5
#: Calls for which all ranks have a tensor of one size.
_SIZED = ("all_reduce", "reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")
#: Stands for the next call of a rank that makes no more.
_NO_CALL: Record = {"name": "no call", "site": None, "numel": None}


def rank_findings(run: Run) -> Iterator[Finding]:
    """Yield the first step at which the ranks differ, and notes about `DistributedDataParallel`."""
    if run.size == 1 or run.is_sharded:
        return
    parting = next(filter(None, (_parting(run, step) for step in run.steps)), None)
    if parting is not None:
        yield parting
        return
    for record in run.ranks[0].of("ddp"):
        if record["batchnorm"]:
            yield finding("AUDIT_BATCHNORM", record["site"], {"layers": record["batchnorm"], "ranks": run.size})
    for step in run.steps:
        forwards = step.of("forward")
        reductions = len(forwards) // run.size
        if reductions > 1 and all(f["syncs"] for f in forwards) and len(forwards) == len(step.of("backward")):
            evidence = {"step": forwards[0]["step"], "reductions": reductions}
            yield finding("AUDIT_SYNC_EACH", forwards[0]["site"], evidence)


def _parting(run: Run, step: Records) -> Finding | None:
    """Find the weight, else the gradient, that differs between ranks at a step, and the reason."""
    applied = step.of("applied")
    for content in ("weights", "norms") if len(applied) == run.size else ():
        position = first_difference(applied, content)
        if position is not None:
            code, line = _cause(run, step, content)
            evidence = {
                "step": applied[0]["step"],
                "parameter": applied[0]["names"][position],
                "norms": [record[content][position] for record in applied],
                "lr": [rate for end in step.of("step") for rate in end["lr"][:1]],
            }
            return finding(code, line, evidence)
    return None


def _cause(run: Run, step: Records, content: str) -> tuple[str, str | None]:
    """Return code and line of a difference in the ``weights``, or in the ``norms`` of gradients."""
    line = step.of("step")[0]["site"]
    if content == "weights" and step is not run.steps[0]:
        return "AUDIT_RANKS_PART", line
    if content == "weights":
        return "AUDIT_INITIAL_WEIGHTS", next((record["site"] for record in run.ranks[0].of("optimizer")), None)
    forwards = [record for record in step.of("forward") if record["rank"] == 0]
    if forwards and not forwards[-1]["syncs"]:
        return "AUDIT_NO_SYNC", forwards[-1]["site"]
    for record in step.of("bare"):
        return "AUDIT_BARE_MODULE", record["site"]
    return "AUDIT_NOT_REDUCED", line


def first_difference(records: Sequence[Record], content: str) -> int | None:
    """Return the first position at which norms of the ranks differ by more than rounding; ``None``: there is none."""
    for position, norms in enumerate(zip(*(record[content] for record in records), strict=False)):
        if max(norms) < math.inf and min(norms) < (1 - _TOLERANCE) * max(norms):
            return position
    return None


def unmatched_calls(run: Run, *, has_failed: bool) -> Finding | None:
    """Return a rank that ends early, or the first collective call that another rank does not make."""
    for passes in run.training if has_failed else ():
        lengths = [len(data_pass.batches) for data_pass in passes]
        shortest = passes[lengths.index(min(lengths))]
        if len(set(lengths)) > 1 and shortest.is_whole:
            return finding("AUDIT_ENDS_EARLY", shortest.about["site"], {"batches": lengths})
    if not has_failed and not all(rank.of("end") for rank in run.ranks):
        return None
    calls = [[call for call in rank.of("call") if not call["in_group"]] for rank in run.ranks]
    for number, of_ranks in enumerate(zip_longest(*calls, fillvalue=_NO_CALL), 1):
        if len({(call["name"], call["name"] in _SIZED and call["numel"]) for call in of_ranks}) > 1:
            described = [
                f"{call['name']} of {call['numel']} elements at {call['site']}" if call["site"] else call["name"]
                for call in of_ranks
            ]
            line = next((call["site"] for call in of_ranks if call["site"]), None)
            return finding("AUDIT_COLLECTIVE", line, {"number": number, "calls": described})
    return None


def file_findings(run: Run) -> Iterator[Finding]:
    """Yield findings about files that several ranks write, and checkpoints that lack a part."""
    saves = run.records.of("save")
    for path, of_path in saves.by("path").items():
        writers = list(of_path.by("rank"))
        if path and len(writers) > 1:
            yield finding("AUDIT_FILE_RACE", of_path[0]["site"], {"path": path, "ranks": writers})
    has_complete = any({"model", "optimizer"} <= set(save["parts"]) for save in saves)
    for save in saves if not run.uses_lightning else ():  # Lightning writes the parts that its user selects
        parts = save["parts"]
        if "optimizer" in parts:
            needed = {"scheduler": bool(run.records.of("scheduler")), "scaler": bool(run.records.of("scaled"))}
        else:
            needed = {"optimizer": "counter" in parts and not has_complete}
        missing = [part for part, is_needed in needed.items() if is_needed and part not in parts]
        if missing and "model" in parts:
            yield finding("AUDIT_CHECKPOINT", save["site"], {"parts": parts, "missing": missing})
