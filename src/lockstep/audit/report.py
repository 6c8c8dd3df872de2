"""The report of an audit: findings, the table of steps, and limits; for a terminal, as JSON and as Markdown."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from lockstep.audit.findings import CODES, SEVERITIES, Finding
from lockstep.audit.trace import RunTrace
from lockstep.errors import many
from lockstep.telemetry.console import print_table, say

Row = dict[str, Any]

#: Rows of the table that are printed.
_MOST_ROWS = 12


@dataclass(frozen=True)
class AuditReport:
    """Findings of a script, its steps for each number of ranks, and limits of the observation."""

    script: str
    ranks: tuple[int, ...]
    findings: tuple[Finding, ...]
    steps: Mapping[int, list[Row]]
    limits: tuple[str, ...]

    def exit_code(self, fail_on: str) -> int:
        """1 where a finding is at threshold as severe as ``fail_on``; ``never``: 0."""
        if fail_on == "never":
            return 0
        threshold = SEVERITIES.index(fail_on)
        return int(any(SEVERITIES.index(finding.severity) >= threshold for finding in self.findings))

    def as_dict(self) -> dict[str, Any]:
        """The document of ``--json``."""
        return {
            "script": self.script,
            "ranks": list(self.ranks),
            "findings": [finding.as_dict() for finding in self.findings],
            "steps": {str(size): rows for size, rows in self.steps.items()},
            "part_at_step": first_parting(self.steps),
            "limits": list(self.limits),
        }

    def as_markdown(self) -> str:
        """Return the report as a Markdown page."""
        lines = [f"# Audit of {self.script} on {', '.join(map(str, self.ranks))} ranks", "", self.summary(), ""]
        for finding in self.findings:
            title, message, fix = finding_texts(finding)
            lines += [f"- **{title}**: {message}", f"  Fix: {fix}."]
        header, rows = self.table()
        table = [header, ["---"] * len(header), *rows]
        lines += ["", *(f"| {' | '.join(row)} |" for row in table), "", self.comparison()]
        lines += ["", *(f"- not seen: {limit}" for limit in self.limits)] if self.limits else []
        return "\n".join(lines) + "\n"

    def summary(self) -> str:
        """Return the number of findings of each severity."""
        counts = Counter(finding.severity for finding in self.findings)
        texts = [many(counts[severity], severity) for severity in reversed(SEVERITIES) if counts[severity]]
        return ", ".join(texts) or "no findings"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return header and rows: loss, gradient norm, samples and learning rate of each step and number of ranks."""
        columns = [(size, name) for size in self.ranks for name in ("loss", "grad_norm", "samples", "lr")]
        header = ["step", *(f"{name.replace('_', ' ')} ({size})" for size, name in columns)]
        by_step = {size: {row["step"]: row for row in self.steps[size]} for size in self.ranks}
        numbers = sorted(set().union(*by_step.values()))[:_MOST_ROWS]
        values = [[by_step[size].get(number, {}).get(name) for size, name in columns] for number in numbers]
        cells = [["" if value is None else f"{value:.6g}" for value in row] for row in values]
        return header, [[str(number), *row] for number, row in zip(numbers, cells, strict=True)]

    def comparison(self) -> str:
        """Return whether the steps on one rank and on several agree, if they have the same samples."""
        part = first_parting(self.steps)
        if part is None:
            return "The global batch depends on the number of ranks: steps are not compared."
        return f"One rank and several part at step {part}." if part else "One rank and several agree to rounding."


def step_rows(run: RunTrace) -> list[Row]:
    """Return a row for each step: means over ranks, and the samples of all of them; ``None`` if not recorded."""
    rows = []
    for steps in run.aligned_steps():
        first = steps[0]
        backwards = [backward for step in steps for backward, _ in step.micro_batches if "loss" in backward]
        losses = [(b["loss"] / (b["factor"] or 1), b["count"] or 1) for b in backwards if math.isfinite(b["loss"])]
        total = sum(count for _, count in losses)
        samples = None
        if all(step.samples is not None for step in steps):
            samples = sorted(index for step in steps for index in step.samples or ()) or None
        rows.append(
            {
                "step": first.number,
                "loss": math.fsum(loss * count for loss, count in losses) / total if total else None,
                "grad_norm": math.hypot(*first.look["gradients"]) if first.look else None,
                "samples": len(samples) if samples else None,
                "lr": (first.record["lr"] or [None])[0],
                "indices": samples,
            }
        )
    return rows


def first_parting(steps: Mapping[int, list[Row]]) -> int | None:
    """Return the first step at which one rank and several differ by more than rounding.

    0: none. ``None``: they are not comparable.
    """
    from lockstep.verification.trajectory import FACTOR, ROUNDING

    if len(steps) < 2 or 1 not in steps:
        return None
    pairs = list(zip(steps[1], steps[max(steps)], strict=False))
    if not pairs or pairs[0][0]["indices"] is None or pairs[0][0]["indices"] != pairs[0][1]["indices"]:
        return None
    for single, several in pairs:
        number: int = single["step"]
        # Rounding grows with the steps before.
        tolerance = FACTOR * ROUNDING * number
        values = [(single[name], several[name]) for name in ("loss", "grad_norm")]
        is_far = any(not math.isclose(a, b, rel_tol=tolerance) for a, b in values if a is not None and b is not None)
        if is_far or single["indices"] != several["indices"]:
            return number
    return 0


def print_report(report: AuditReport, stream: TextIO) -> None:
    """Print the findings, the table and the limits."""
    for finding in report.findings:
        title, message, fix = finding_texts(finding)
        say(f"{title}{':' if finding.line else ''} {message}", stream)
        say(f"  fix: {fix}", stream)
    header, rows = report.table()
    print_table(header, rows, stream)
    say(report.comparison(), stream)
    for limit in report.limits:
        say(f"not seen: {limit}", stream)
    say(report.summary(), stream)


def finding_texts(finding: Finding) -> tuple[str, str, str]:
    """Return title (severity, code, file and line), message and fix."""
    title = f"{finding.severity} {finding.code}"
    if finding.line:
        path, _, number = finding.line.rpartition(":")
        shown = os.path.relpath(path)
        title += f" {Path(path).name if shown.startswith('..') else shown}:{number}"
    return title, finding.message, CODES[finding.code].fix
