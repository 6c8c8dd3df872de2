"""Findings about ranks: weights that part, gradients that are not reduced, calls that do not match, files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from lockstep.audit.findings import Finding, finding
from lockstep.audit.trace import Record, Records, Run

#: Relative difference of norms above which tensors of two ranks are not the same.
_TOLERANCE = 1e-5
#: Calls for which all ranks have a tensor of one size.
_SIZED = ("all_reduce", "reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")
#: Stands for the next call of a rank that makes no more.
_NO_CALL: Record = {"name": "no call", "site": None, "numel": 0}


def rank_findings(run: Run) -> Iterator[Finding]:
    """Yield the first step at which the ranks differ, and notes about `DistributedDataParallel`."""
    if run.size == 1 or run.is_sharded:
        return
    for step in run.steps:
        parting = _parting(run, step)
        if parting is not None:
            yield parting
            return
        forwards = step.of("forward")
        reductions = len(forwards) // run.size
        if reductions > 1 and all(f["syncs"] for f in forwards) and len(forwards) == len(step.of("backward")):
            evidence = {"step": forwards[0]["step"], "reductions": reductions}
            yield finding("AUDIT_SYNC_EACH", forwards[0]["site"], evidence)
    for record in run.ranks[0].of("ddp"):
        if record["batchnorm"]:
            yield finding("AUDIT_BATCHNORM", record["site"], {"layers": record["batchnorm"], "ranks": run.size})


def _parting(run: Run, step: Records) -> Finding | None:
    """Find the weight, else the gradient, that differs between ranks at a step, and the reason."""
    ends = step.of("step")
    if any(end["names"] != ends[0]["names"] for end in ends):
        return None  # an optimizer of a part of the parameters, as of ZeroRedundancyOptimizer
    for content in ("weights", "norms"):
        position = first_difference(ends, content)
        if position is not None:
            code, line = _cause(run, step, content)
            evidence = {
                "step": ends[0]["step"],
                "parameter": ends[0]["names"][position],
                "norms": [end[content][position] for end in ends],
                "lr": [end["lr"][0] for end in ends],
            }
            return finding(code, line, evidence)
    return None


def _cause(run: Run, step: Records, content: str) -> tuple[str, str | None]:
    """Return code and line of a difference in the ``weights``, or in the ``norms`` of gradients."""
    line = step.of("step")[0]["site"]
    if content == "weights":
        is_first = step is run.steps[0]
        made = run.ranks[0].of("optimizer")[0]["site"]
        return ("AUDIT_INITIAL_WEIGHTS", made) if is_first else ("AUDIT_RANKS_PART", line)
    for forward in step.of("forward")[-1:]:
        if forward["is_bare"]:
            return "AUDIT_BARE_MODULE", forward["site"]
        if not forward["syncs"]:
            return "AUDIT_NO_SYNC", forward["site"]
    return "AUDIT_NOT_REDUCED", line


def first_difference(records: Sequence[Record], content: str) -> int | None:
    """Return the first position at which norms of the ranks differ by more than rounding; ``None``: there is none."""
    for position, norms in enumerate(zip(*(record[content] for record in records), strict=False)):
        if min(norms) < (1 - _TOLERANCE) * max(norms):
            return position
    return None


def unmatched_calls(run: Run, *, has_failed: bool) -> Finding | None:
    """Return a rank that ends early, or the first collective call that another rank does not make."""
    for passes in run.training if has_failed else ():
        lengths = [len(data_pass.batches) for data_pass in passes]
        shortest = passes[lengths.index(min(lengths))]
        if len(set(lengths)) > 1 and shortest.is_whole:
            return finding("AUDIT_ENDS_EARLY", shortest.about["site"], {"batches": lengths})
    calls = [[call for call in rank.of("call") if not call["in_group"]] for rank in run.ranks]
    for number, of_ranks in enumerate(zip_longest(*calls, fillvalue=_NO_CALL), 1):
        if len({(call["name"], call["name"] in _SIZED and call["numel"]) for call in of_ranks}) > 1:
            lines = [call["site"] for call in of_ranks]
            evidence = {"number": number, "calls": [call["name"] for call in of_ranks]}
            evidence |= {"elements": [call["numel"] for call in of_ranks], "lines": lines}
            return finding("AUDIT_COLLECTIVE", next(filter(None, lines)), evidence)
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
        parts = set(save["parts"])
        needed = {"optimizer"} if "counter" in parts and not has_complete else set()
        if "optimizer" in parts:
            needed = {part for part in ("scheduler", "scaler") if run.records.of(part)}
        missing = sorted(needed - parts)
        if missing and "model" in parts:
            yield finding("AUDIT_CHECKPOINT", save["site"], {"parts": sorted(parts), "missing": missing})
