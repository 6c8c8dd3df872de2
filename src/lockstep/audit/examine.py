"""Run a script on each number of ranks, and judge its records."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lockstep.audit.checks.data import data_findings
from lockstep.audit.checks.metrics import metric_findings
from lockstep.audit.checks.ranks import PARTING, file_findings, rank_findings, unmatched_calls
from lockstep.audit.checks.steps import rate_findings, step_findings
from lockstep.audit.findings import SEVERITIES, Finding
from lockstep.audit.launcher import Outcome, Script, read_records, run_ranks, script_failure
from lockstep.audit.report import AuditReport, step_rows
from lockstep.audit.trace import RankTrace, RunTrace
from lockstep.cli.output import progress
from lockstep.errors import UnsupportedError, many

#: Of the output of a rank that fails because another one has ended.
_VICTIM = re.compile(
    r"Connection closed by peer|[Cc]onnection reset|Timed? ?out|Broken pipe|DistNetworkError|recvBytes"
)


def audit(script: Script, sizes: Sequence[int], *, steps: int, timeout_s: float) -> AuditReport:
    """Run ``script`` on each number of ranks in ``sizes`` and judge what its processes did.

    Raises:
        TaskError: the script fails, or does not end in time. UnsupportedError: it starts its ranks itself, or takes
        no optimizer step.
    """
    runs: dict[int, RunTrace] = {}
    findings: list[Finding] = []
    for size in sizes:
        progress(f"{script.name} on {many(size, 'rank')}", doing="running")
        with tempfile.TemporaryDirectory(prefix="lockstep-audit-") as name:
            folder = Path(name)
            outcome = run_ranks(script, size, folder, steps=steps, timeout_s=timeout_s)
            ranks = range(size)
            run = RunTrace([RankTrace(*(read_records(folder, kind, r) for kind in ("rank", "worker"))) for r in ranks])
        # A signal after the script's end: a process group that was not destroyed, for example.
        codes = [
            0 if code < 0 and rank.has_ended else code for rank, code in zip(run.ranks, outcome.codes, strict=True)
        ]
        outcome = replace(outcome, codes=tuple(codes))
        _refuse_spawn(run)
        unmatched = unmatched_calls(run, has_failed=outcome.is_stuck or any(outcome.codes)) if size > 1 else None
        if _is_fault_of_script(outcome, unmatched):
            raise script_failure(script, size, outcome)
        if not run.first.steps and unmatched is None:
            raise UnsupportedError(
                f"{script.name} has taken no step of a torch.optim.Optimizer",
                why="only steps, gradients and samples of a training loop can be judged",
                fix="pass it arguments with which it trains",
            )
        runs[size] = run
        findings += [*_findings(run), *filter(None, [unmatched])]
    largest = max(runs)
    if 1 in runs and largest > 1:
        findings += rate_findings(runs[1], runs[largest])
    unique = {(finding.code, finding.line): finding for finding in findings}
    ordered = sorted(unique.values(), key=lambda finding: -SEVERITIES.index(finding.kind.severity))
    rows = {size: step_rows(run) for size, run in runs.items()}
    return AuditReport(script.name, tuple(runs), tuple(ordered), rows, tuple(dict.fromkeys(limits(runs, steps))))


def _findings(run: RunTrace) -> Iterator[Finding]:
    """Yield the findings of a run: of each code and phase the first one."""
    reported: dict[tuple[str, object], Finding] = {}
    for check in (data_findings, rank_findings, step_findings, metric_findings, file_findings):
        causes = {code for code, _ in reported}
        for finding in check(run):
            if check is not step_findings or not _is_consequence(finding.code, causes):
                reported.setdefault((finding.code, finding.evidence.get("phase")), finding)
    yield from reported.values()


def _is_consequence(code: str, causes: set[str]) -> bool:
    """Whether ranks that part, or read the same samples, explain the finding of a step: one cause is enough."""
    is_apart = bool(causes & PARTING)
    return code not in ("AUDIT_ZERO_GRAD", "AUDIT_CLIP_SCALED") if is_apart else "AUDIT_NO_SAMPLER" in causes


def _refuse_spawn(run: RunTrace) -> None:
    for record in run.first.of("spawn"):
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


def limits(runs: dict[int, RunTrace], steps: int) -> Iterator[str]:
    """Yield sentences about everything that was not seen."""
    for size, run in runs.items():
        first = run.first
        yield from (
            f"{record['text']}: not everything was observed" for rank in run.ranks for record in rank.of("limit")
        )
        training = [walk for walk in first.passes if walk.trains]
        unjudged = [walk for walk in first.passes if not walk.trains and walk.batches and not walk.of("eval_loss")]
        unread = sorted({b["graph"] for b in first.of("backward") if b.get("graph") and b["count"] is None})
        is_ended = any(record.get("is_script") for record in first.of("cut"))
        has_other_data = any(walk.about["size"] is None for walk in training)
        is_cut = not all(walk.is_whole for walk in training)
        conditions = {
            "the script reads no torch DataLoader: samples and random numbers are not seen": not first.passes,
            "the training data set is not a map-style Dataset: its samples cannot be counted": has_other_data,
            f"an epoch was ended after {steps} steps: samples dropped or repeated later are not seen": is_cut,
            "the script was ended in its third epoch: its end is not seen": is_ended,
            "shards, or calls within groups of ranks: weights and gradients are not compared": run.is_sharded,
            "an evaluation calls no loss of torch.nn.functional: its metrics are not judged": unjudged,
            "several optimizers: denominators and learning rates are not judged": not run.has_one_optimizer,
            f"the loss is not one mean or sum ({', '.join(unread)}): its denominator is not judged": (
                unread and size == max(runs)
            ),
        }
        yield from (text for text, applies in conditions.items() if applies)
    if 1 not in runs:
        yield "no run on one rank: learning rates are not compared"
    if max(runs) == 1:
        yield "no run on several ranks: only faults of one rank can be found"
