"""Run a script on each number of ranks, and judge its records."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lockstep.audit.checks.data import data_findings
from lockstep.audit.checks.metrics import metric_findings
from lockstep.audit.checks.ranks import PARTING, file_findings, module_notes, parting, unmatched_calls
from lockstep.audit.checks.steps import rate_findings, step_findings
from lockstep.audit.findings import SEVERITIES, Finding
from lockstep.audit.launcher import Outcome, Script, read_records, run_ranks, script_failure
from lockstep.audit.report import AuditReport, step_rows
from lockstep.audit.trace import RunTrace, read_rank
from lockstep.errors import LockstepError, UnsupportedError

#: Of the output of a rank that fails because another one has ended.
_VICTIM = re.compile(
    r"Connection closed by peer|[Cc]onnection reset|Timed? ?out|Broken pipe|DistNetworkError|recvBytes"
)


def audit(
    script: Script, sizes: Sequence[int], *, steps: int, timeout_s: float, say: Callable[[str], None]
) -> AuditReport:
    """Run ``script`` on each number of ranks in ``sizes`` and judge what its processes did.

    Raises:
        TaskError: the script fails, or does not end in time. UnsupportedError: it starts its ranks itself, or takes
        no optimizer step.
    """
    runs: dict[int, RunTrace] = {}
    findings: list[Finding] = []
    for size in sizes:
        say(f"{script.name} on {size} rank{'s' * (size > 1)}")
        with tempfile.TemporaryDirectory(prefix="lockstep-audit-") as name:
            folder = Path(name)
            outcome = run_ranks(script, size, folder, steps=steps, timeout_s=timeout_s)
            run = RunTrace(
                [read_rank(read_records(folder, "rank", r), read_records(folder, "worker", r)) for r in range(size)]
            )
        run.aborted = [rank for rank, code in enumerate(outcome.codes) if code < 0 and run.ranks[rank].has_ended]
        codes = [0 if rank in run.aborted else code for rank, code in enumerate(outcome.codes)]
        outcome = replace(outcome, codes=tuple(codes))
        _refuse_spawn(run)
        unmatched = unmatched_calls(run, has_failed=outcome.is_stuck or any(outcome.codes)) if size > 1 else None
        if _is_fault_of_script(outcome, unmatched):
            raise script_failure(script, size, outcome)
        if not run.first.steps and unmatched is None:
            raise _no_step(script)
        runs[size] = run
        findings += [*_findings(run), *filter(None, [unmatched])]
    largest = max(runs)
    if 1 in runs and largest > 1:
        findings += rate_findings(runs[1], runs[largest])
    unique = {(finding.code, finding.line): finding for finding in findings}
    ordered = sorted(unique.values(), key=lambda finding: -SEVERITIES.index(finding.severity))
    rows = {size: step_rows(run) for size, run in runs.items()}
    return AuditReport(script.name, tuple(runs), tuple(ordered), rows, tuple(dict.fromkeys(limits(runs, steps))))


def _findings(run: RunTrace) -> Iterator[Finding]:
    """Yield the findings of a run: of each code and phase the first one."""
    found_codes: set[tuple[str, object]] = set()
    for check in (data_findings, parting, step_findings, metric_findings, module_notes, file_findings):
        for finding in check(run):
            if check is step_findings and _is_consequence(finding.code, {code for code, _ in found_codes}):
                continue
            key = finding.code, finding.evidence.get("phase")
            if key not in found_codes:
                found_codes.add(key)
                yield finding


def _is_consequence(code: str, causes: set[str]) -> bool:
    """Whether ranks that part, or read the same samples, explain the finding of a step: one cause is enough."""
    is_apart = bool(causes & PARTING)
    return code not in ("AUDIT_ZERO_GRAD", "AUDIT_CLIP_SCALED") if is_apart else "AUDIT_NO_SAMPLER" in causes


def _refuse_spawn(run: RunTrace) -> None:
    for rank in run.ranks:
        for record in rank.of("spawn"):
            raise UnsupportedError(
                "the script starts its ranks itself, with torch.multiprocessing",
                why=f"{record['site']}: `lockstep audit` starts the ranks, as torchrun does",
                fix="call the function of a rank directly, with RANK and WORLD_SIZE of the environment",
            )


def _is_fault_of_script(outcome: Outcome, unmatched: Finding | None) -> bool:
    """Whether the script failed for a reason that is not the other ranks."""
    failed = [output for code, output in zip(outcome.codes, outcome.outputs, strict=True) if code]
    if unmatched is None:
        return bool(failed) or outcome.is_late
    return not outcome.is_stuck and not all(_VICTIM.search(output) for output in failed)


def _no_step(script: Script) -> LockstepError:
    return UnsupportedError(
        f"{script.name} has taken no step of a torch.optim.Optimizer",
        why="only steps, gradients and samples of a training loop can be judged",
        fix="pass it arguments with which it trains",
    )


def limits(runs: dict[int, RunTrace], steps: int) -> Iterator[str]:
    """Yield sentences about everything that was not seen."""
    for size, run in runs.items():
        yield from _limits_of(run, steps, is_largest=size == max(runs))
    if 1 not in runs:
        yield "no run on one rank: learning rates are not compared"
    if max(runs) == 1:
        yield "no run on several ranks: only faults of one rank can be found"


def _limits_of(run: RunTrace, steps: int, *, is_largest: bool) -> Iterator[str]:
    first = run.first
    for rank in run.ranks:
        yield from (f"{record['text']}: not everything was observed" for record in rank.of("limit"))
    yield from (
        f"rank {rank} of {run.size} was aborted while its interpreter ended, after the script" for rank in run.aborted
    )
    training = [walk for walk in first.passes if walk.trains]
    has_unjudged_evaluation = any(walk.evaluates and not walk.losses for walk in first.passes)
    has_other_data = any(walk.about["size"] is None for walk in training)
    is_cut = not all(walk.is_whole for walk in training)
    backwards = [backward for step in first.steps for backward, _ in step.micro_batches]
    unread = sorted({b["graph"] for b in backwards if b.get("graph") and b["count"] is None})
    terms = ", ".join(unread)
    conditions = (
        (has_other_data, "the training data set is not a map-style Dataset: its samples cannot be counted"),
        (is_cut, f"an epoch was ended after {steps} steps: samples dropped or repeated later are not seen"),
        (
            not first.passes,
            "the script reads no torch DataLoader: samples, their order and random numbers are not seen",
        ),
        (first.of("ended"), "the script was ended in its third epoch: its end is not seen"),
        (run.has_groups, "calls within groups of ranks: weights and gradients of the ranks are not compared"),
        (has_unjudged_evaluation, "an evaluation calls no loss of torch.nn.functional: its metrics are not judged"),
        (not run.has_one_optimizer, "several optimizers: denominators and learning rates are not judged"),
        (unread and is_largest, f"the loss is not one mean or sum ({terms}): its denominator is not judged"),
    )
    yield from (text for applies, text in conditions if applies)


def write_report(report: AuditReport, path: Path) -> None:
    """Write the report as JSON, or as Markdown if the name ends in ``.md``. Raises :class:`StorageError`."""
    from lockstep.rundir.files import plain, write_text

    document = plain(report.as_dict())
    text = report.as_markdown() if path.suffix == ".md" else json.dumps(document, indent=2) + "\n"
    write_text(path, text)
