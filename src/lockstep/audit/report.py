"""The report of an audit: findings, the table of steps, and limits; for a terminal, as JSON and as Markdown."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.audit.findings import SEVERITIES, Finding
from lockstep.audit.trace import RunTrace
from lockstep.errors import many
from lockstep.telemetry.console import aligned

Row = dict[str, Any]

#: Rows of the table that are printed.
_MAX_ROWS = 12


@dataclass(frozen=True)
class AuditReport:
    """Findings of a script, its steps for each number of ranks, and limits of the observation."""

    script: str
    ranks: tuple[int, ...]
    findings: tuple[Finding, ...]
    steps: Mapping[int, list[Row]]
    limits: tuple[str, ...]

    def exit_code(self, fail_on: str) -> int:
        """Return 1 if a finding is at least as severe as ``fail_on``, else 0; ``never``: 0."""
        if fail_on == "never":
            return 0
        threshold = SEVERITIES.index(fail_on)
        return int(any(SEVERITIES.index(finding.kind.severity) >= threshold for finding in self.findings))

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
        """Return the report as a Markdown page that a terminal shows, too."""
        counts = Counter(finding.kind.severity for finding in self.findings)
        texts = [many(counts[severity], severity) for severity in reversed(SEVERITIES) if counts[severity]]
        part = first_parting(self.steps)
        comparison = f"One rank and several part at step {part}." if part else "One rank and several agree to rounding."
        if part is None:
            comparison = "The global batch depends on the number of ranks: steps are not compared."
        lines = [
            f"# Audit of {self.script} on {', '.join(map(str, self.ranks))} ranks: {', '.join(texts) or 'no findings'}",
            "\n".join(f"- {finding}" for finding in self.findings),
            "\n".join(aligned([[*(f"| {cell}" for cell in row), "|"] for row in self.table()])),
            comparison,
            "\n".join(f"- not seen: {limit}" for limit in self.limits),
        ]
        return "\n\n".join(filter(None, lines)) + "\n"

    def table(self) -> list[list[str]]:
        """Return loss, gradient norm, samples and learning rate of each step and number of ranks, below a header."""
        columns = [(size, name) for size in self.ranks for name in ("loss", "grad_norm", "samples", "lr")]
        by_step = {size: {row["step"]: row for row in self.steps[size]} for size in self.ranks}
        numbers = sorted(set().union(*by_step.values()))[:_MAX_ROWS]
        values = [[by_step[size].get(number, {}).get(name) for size, name in columns] for number in numbers]
        cells = [["" if value is None else f"{value:.6g}" for value in row] for row in values]
        header = ["step", *(f"{name.replace('_', ' ')} ({size})" for size, name in columns)]
        rows = [[str(number), *row] for number, row in zip(numbers, cells, strict=True)]
        return [header, ["---"] * len(header), *rows]

    def write(self, path: Path) -> None:
        """Write JSON, or Markdown if the name ends in ``.md``. Raises :class:`StorageError`."""
        from lockstep.rundir.files import plain, write_text

        document = json.dumps(plain(self.as_dict()), indent=2) + "\n"
        write_text(path, self.as_markdown() if path.suffix == ".md" else document)


def step_rows(run: RunTrace) -> list[Row]:
    """Return a row for each step: means over ranks, and the samples of all of them; ``None`` if not recorded."""
    rows = []
    for steps in run.aligned_steps():
        first = steps[0]
        backwards = [backward for step in steps for backward in step.of("backward") if "loss" in backward]
        losses = [(b["loss"] / (b["factor"] or 1), b["count"] or 1) for b in backwards if math.isfinite(b["loss"])]
        total = sum(count for _, count in losses)
        of_ranks = [step.samples for step in steps]
        samples = None if None in of_ranks else sorted(index for of_rank in of_ranks for index in of_rank or ())
        rows.append(
            {
                "step": first.number,
                "loss": math.fsum(loss * count for loss, count in losses) / total if total else None,
                "grad_norm": math.hypot(*first.applied["norms"]) if first.applied else None,
                "samples": len(samples) if samples else None,
                "lr": (first.about["lr"] or [None])[0],
                "indices": samples or None,
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
