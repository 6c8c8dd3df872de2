"""Run a script on each number of ranks, and judge its records."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lockstep.audit.checks.data import data_findings
from lockstep.audit.checks.metrics import metric_findings
from lockstep.audit.checks.ranks import file_findings, rank_findings, unmatched_calls
from lockstep.audit.checks.steps import rate_findings, step_findings
from lockstep.audit.findings import SEVERITIES, Finding
from lockstep.audit.launcher import Outcome, Script, read_records, run_ranks, script_failure
from lockstep.audit.report import AuditReport, step_rows
from lockstep.audit.trace import Run
from lockstep.cli.output import progress
from lockstep.errors import UnsupportedError, many

#: Output of a rank that fails because another one has ended.
_VICTIM = re.compile(
    r"Connection closed by peer|[Cc]onnection reset|Timed? ?out|Broken pipe|DistNetworkError|recvBytes"
)


def audit(script: Script, sizes: Sequence[int], *, steps: int, timeout_s: float) -> AuditReport:
    """Run ``script`` on each number of ranks in ``sizes`` and judge what its processes did.

    Raises:
        TaskError: the script fails, or does not end in time. UnsupportedError: it starts its ranks itself, or takes
        no optimizer step.
    """
    runs: dict[int, Run] = {}
    findings: list[Finding] = []
    for size in sizes:
        progress(f"{script.name} on {many(size, 'rank')}", doing="running")
        with tempfile.TemporaryDirectory(prefix="lockstep-audit-") as folder:
            outcome = run_ranks(script, size, Path(folder), steps=steps, timeout_s=timeout_s)
            runs[size] = Run(size, read_records(Path(folder)))
        findings += [*_end_of(script, runs[size], outcome), *_findings(runs[size])]
    if 1 in runs:
        findings += rate_findings(runs[1], runs[max(runs)])
    unique = {(finding["code"], finding["file"], finding["line"]): finding for finding in findings}
    ordered = sorted(unique.values(), key=lambda finding: -SEVERITIES.index(finding["severity"]))
    return AuditReport(script.name, ordered, {size: step_rows(run) for size, run in runs.items()}, _limits(runs, steps))


def _findings(run: Run) -> list[Finding]:
    """Return the findings of a run: of each code and phase the first one."""
    findings: dict[tuple[str, object], Finding] = {}
    for check in (data_findings, rank_findings, step_findings, metric_findings, file_findings):
        for finding in check(run):
            findings.setdefault((finding["code"], finding["evidence"].get("phase")), finding)
    return list(findings.values())


def _end_of(script: Script, run: Run, outcome: Outcome) -> list[Finding]:
    """Return the finding about calls that do not match, which may have ended the script.

    Raises:
        TaskError, UnsupportedError: see :func:`audit`.
    """
    for record in run.records.of("spawn"):
        raise UnsupportedError(
            "the script starts its ranks itself, with torch.multiprocessing",
            why=f"{record['site']}: `lockstep audit` starts the ranks, as torchrun does",
            fix="call the function of a rank directly, with RANK and WORLD_SIZE of the environment",
        )
    # A signal may come after the script's end, if a process group was not destroyed, for example.
    ended = [bool(rank.of("end")) for rank in run.ranks]
    failed = [rank for rank, code in enumerate(outcome.codes) if code > 0 or (code < 0 and not ended[rank])]
    unmatched = unmatched_calls(run, has_failed=bool(failed))
    are_victims = outcome.is_stuck or all(_VICTIM.search(outcome.outputs[rank]) for rank in failed)
    if failed and not (unmatched and are_victims):
        raise script_failure(script, outcome, failed[0])
    if not run.records.of("step") and unmatched is None:
        raise UnsupportedError(
            f"{script.name} has taken no step of a torch.optim.Optimizer",
            why="only steps, gradients and samples of a training loop can be judged",
            fix="pass it arguments with which it trains",
        )
    return [] if unmatched is None else [unmatched]


def _limits(runs: dict[int, Run], steps: int) -> list[str]:
    """Return sentences about everything that was not seen."""
    run = runs[max(runs)]
    passes = run.passes[0]
    cuts = [record["is_script"] for record in run.ranks[0].of("cut")]
    unread = sorted({b["graph"] for b in run.ranks[0].of("backward") if "graph" in b and b["count"] is None})
    conditions = {
        "the script reads no torch DataLoader: samples and random numbers are not seen": not passes,
        "the training data set is not a map-style Dataset: its samples cannot be counted": any(
            data_pass.about["size"] is None for data_pass in passes if data_pass.trains
        ),
        f"an epoch was ended after {steps} steps: samples dropped or repeated later are not seen": False in cuts,
        "the script was ended in its third epoch: its end is not seen": True in cuts,
        "shards, or calls within groups of ranks: weights and gradients are not compared": run.is_sharded,
        "an evaluation calls no loss of torch.nn.functional: its metrics are not judged": not all(
            data_pass.trains or data_pass.records.of("eval_loss") for data_pass in passes if data_pass.batches
        ),
        "several optimizers: denominators and learning rates are not judged": not run.has_one_optimizer,
        f"the loss is not one mean or sum ({', '.join(unread)}): its denominator is not judged": bool(unread),
        "no run on one rank: learning rates are not compared": 1 not in runs,
        "no run on several ranks: only faults of one rank can be found": max(runs) == 1,
    }
    unobserved = {f"{record['text']}: not everything was observed": True for record in run.records.of("limit")}
    return [text for text, applies in (unobserved | conditions).items() if applies]
