"""The report of an audit: findings, the table of steps, and limits; for a terminal, as JSON and as Markdown."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.audit.findings import SEVERITIES, Finding
from lockstep.audit.trace import Run
from lockstep.errors import many
from lockstep.telemetry.console import aligned

Row = dict[str, Any]

#: Rows of the table that are printed.
_MAX_ROWS = 12
_COLUMNS = ("loss", "grad_norm", "samples", "lr")


@dataclass(frozen=True)
class AuditReport:
    """Findings of a script, its steps for each number of ranks, and limits of the observation."""

    script: str
    findings: list[Finding]
    steps: Mapping[int, list[Row]]
    limits: list[str]

    def exit_code(self, fail_on: str) -> int:
        """Return 1 if a finding is at least as severe as ``fail_on``, else 0; ``never``: 0."""
        severe = SEVERITIES[SEVERITIES.index(fail_on) :] if fail_on != "never" else ()
        return int(any(finding["severity"] in severe for finding in self.findings))

    def as_dict(self) -> dict[str, Any]:
        """Return the document of ``--json``."""
        return {
            "script": self.script,
            "ranks": list(self.steps),
            "findings": self.findings,
            "steps": {str(size): rows for size, rows in self.steps.items()},
            "part_at_step": first_parting(self.steps),
            "limits": self.limits,
        }

    def as_markdown(self) -> str:
        """Return the report as a Markdown page that a terminal shows, too."""
        counts = Counter(finding["severity"] for finding in self.findings)
        texts = [many(counts[severity], severity) for severity in reversed(SEVERITIES) if counts[severity]]
        part = first_parting(self.steps)
        comparisons = {
            None: "The global batch depends on the number of ranks: steps are not compared.",
            0: "One rank and several agree to rounding.",
        }
        lines = [
            f"# Audit of {self.script} on {', '.join(map(str, self.steps))} ranks: {', '.join(texts) or 'no findings'}",
            "\n".join(map(_as_item, self.findings)),
            "\n".join(aligned([[*(f"| {cell}" for cell in row), "|"] for row in self._table()])),
            comparisons.get(part, f"One rank and several part at step {part}."),
            "\n".join(f"- not seen: {limit}" for limit in self.limits),
        ]
        return "\n\n".join(filter(None, lines)) + "\n"

    def _table(self) -> list[list[str]]:
        """Return loss, gradient norm, samples and learning rate of each step and number of ranks, below a header."""
        header = ["step", *(f"{name.replace('_', ' ')} ({size})" for size in self.steps for name in _COLUMNS)]
        table = [header, ["---"] * len(header)]
        for number, rows in enumerate(islice(zip_longest(*self.steps.values(), fillvalue={}), _MAX_ROWS), 1):
            values = [row.get(name) for row in rows for name in _COLUMNS]
            table.append([str(number), *("" if value is None else f"{value:.6g}" for value in values)])
        return table


def _as_item(finding: Finding) -> str:
    """Return severity, code, file, line and message of a finding; on a second line the fix."""
    path = os.path.relpath(finding["file"]) if finding["file"] else ""
    location = f" {Path(path).name if path.startswith('..') else path}:{finding['line']}" if path else ""
    return f"- {finding['severity']} {finding['code']}{location}: {finding['message']}\n  fix: {finding['fix']}"


def step_rows(run: Run) -> list[Row]:
    """Return a row for each step: means over ranks, and the samples of all of them; ``None`` if not recorded."""
    rows = []
    for step in run.steps:
        end = step.of("step")[0]
        backwards = step.of("backward")
        batches = [record["indices"] for record in backwards]
        indices = sorted(chain(*batches)) if batches and all(batches) else None
        finite = [record for record in backwards if math.isfinite(record.get("loss", math.nan))]
        losses = [record["loss"] / (record["factor"] or 1) for record in finite]
        counts = [record["count"] or 1 for record in finite]
        rows.append(
            {
                "step": end["step"],
                "loss": float(np.average(losses, weights=counts)) if losses else None,
                "grad_norm": math.hypot(*end["norms"]) if end["norms"] else None,
                "samples": None if indices is None else len(indices),
                "lr": end["lr"][0],
                "indices": indices,
            }
        )
    return rows


def first_parting(steps: Mapping[int, list[Row]]) -> int | None:
    """Return the first step at which one rank and several differ by more than rounding.

    0: none. ``None``: they are not comparable.
    """
    from lockstep.verification.trajectory import FACTOR, ROUNDING

    pairs = list(zip(steps.get(1, []), steps[max(steps)], strict=False))
    samples = [row["indices"] for row in pairs[0]] if pairs and len(steps) > 1 else [None, None]
    if samples[0] is None or samples[0] != samples[1]:
        return None
    for number, (single, several) in enumerate(pairs, 1):
        tolerance = FACTOR * ROUNDING * number  # rounding grows with the steps before
        values = [(single[name], several[name]) for name in ("loss", "grad_norm")]
        is_close = all(math.isclose(*pair, rel_tol=tolerance) for pair in values if None not in pair)
        if not is_close or single["indices"] != several["indices"]:
            return number
    return 0
