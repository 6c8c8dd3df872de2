"""The report of an audit: findings, the table of steps, and limits; for a terminal, as JSON and as Markdown."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
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
    """Findings of a script, its steps for each number of ranks, and what was not seen."""

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
        """The report as a Markdown page."""
        lines = [f"# Audit of {self.script} on {', '.join(map(str, self.ranks))} ranks", "", self.summary(), ""]
        for finding in self.findings:
            location = f" ({_location(finding.line)})" if finding.line else ""
            lines += [
                f"- **{finding.severity} {finding.code}**{location}: {finding.message}",
                f"  Fix: {CODES[finding.code].fix}.",
            ]
        header, rows = self.table()
        lines += ["", f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}"]
        lines += [f"| {' | '.join(row)} |" for row in rows]
        lines += [
            "",
            self.comparison(),
            *([""] if self.limits else []),
            *(f"- not seen: {limit}" for limit in self.limits),
        ]
        return "\n".join(lines) + "\n"

    def summary(self) -> str:
        counts = [
            many(number, severity)
            for severity in reversed(SEVERITIES)
            if (number := sum(finding.severity == severity for finding in self.findings))
        ]
        return ", ".join(counts) if counts else "no findings"

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Loss, gradient norm, samples and learning rate of each step, for each number of ranks."""
        header = (
            "step",
            *(f"{name} ({size})" for size in self.ranks for name in ("loss", "grad norm", "samples", "lr")),
        )
        by_step = [{row["step"]: row for row in self.steps[size]} for size in self.ranks]
        numbers = sorted(set().union(*by_step))
        rows = []
        for number in numbers[:_MOST_ROWS]:
            cells = [str(number)]
            for of_size in by_step:
                row = of_size.get(number, {})
                cells += [_number(row.get(name)) for name in ("loss", "grad_norm", "samples", "lr")]
            rows.append(tuple(cells))
        return header, rows

    def comparison(self) -> str:
        """Whether the steps on one rank and on several agree, where they have the same samples."""
        part = first_parting(self.steps)
        if part is None:
            return "The global batch depends on the number of ranks: steps are not compared."
        return f"One rank and several part at step {part}." if part else "One rank and several agree to rounding."


def step_rows(run: RunTrace) -> list[Row]:
    """A row for each step: means over ranks, and the samples of all of them; ``None`` where it was not looked at."""
    rows = []
    for steps in run.aligned_steps():
        backwards = [backward for step in steps for backward, _ in step.micro_batches if "loss" in backward]
        losses = [(b["loss"] / (b["factor"] or 1), b["count"] or 1) for b in backwards if math.isfinite(b["loss"])]
        total = sum(count for _, count in losses)
        look = steps[0].look
        samples = [index for step in steps for index in step.samples or ()]
        is_known = bool(samples) and all(step.samples is not None for step in steps)
        rows.append(
            {
                "step": steps[0].number,
                "loss": math.fsum(loss * count for loss, count in losses) / total if total else None,
                "grad_norm": math.sqrt(math.fsum(g * g for g in look["gradients"])) if look else None,
                "samples": len(samples) if is_known else None,
                "lr": (steps[0].record["lr"] or [None])[0],
                "indices": sorted(samples) if is_known else None,
            }
        )
    return rows


def first_parting(steps: Mapping[int, list[Row]]) -> int | None:
    """The first step at which one rank and several differ by more than rounding; 0: none; ``None``: not comparable."""
    from lockstep.verification.trajectory import FACTOR, ROUNDING

    if len(steps) < 2 or 1 not in steps:
        return None
    pairs = list(zip(steps[1], steps[max(steps)], strict=False))
    if not pairs or any(
        single["indices"] is None or single["indices"] != several["indices"] for single, several in pairs[:1]
    ):
        return None
    for single, several in pairs:
        if single["indices"] != several["indices"]:
            return int(single["step"])
        for name in ("loss", "grad_norm"):
            if single[name] is not None and several[name] is not None:
                scale = max(abs(single[name]), abs(several[name]))
                # Rounding grows with the steps before.
                if abs(single[name] - several[name]) > FACTOR * ROUNDING * scale * single["step"]:
                    return int(single["step"])
    return 0


def print_report(report: AuditReport, stream: TextIO) -> None:
    """Print the findings, the table and the limits."""
    for line in _lines(report):
        say(line, stream)
    header, rows = report.table()
    print_table(header, rows, stream)
    say(report.comparison(), stream)
    for limit in report.limits:
        say(f"not seen: {limit}", stream)
    say(report.summary(), stream)


def _lines(report: AuditReport) -> Iterator[str]:
    for finding in report.findings:
        location = f" {_location(finding.line)}:" if finding.line else ""
        yield f"{finding.severity} {finding.code}{location} {finding.message}"
        yield f"  fix: {CODES[finding.code].fix}"


def _location(line: str | None) -> str:
    path, _, number = (line or "").rpartition(":")
    try:
        shown = os.path.relpath(path)
    except ValueError:
        shown = path
    return f"{shown if not shown.startswith('..') else Path(path).name}:{number}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
