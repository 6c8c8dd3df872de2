"""The report of all checks, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from lockstep.doctor.finding import Finding, Status
from lockstep.doctor.ranks import Meeting, size_text
from lockstep.telemetry.tables import aligned, print_table, say


@dataclass(frozen=True)
class DoctorReport:
    """The findings of all checks. ``meeting``: what the ranks measured together, if they met."""

    devices: tuple[str, ...]
    findings: tuple[Finding, ...]
    meeting: Meeting | None = None

    @property
    def exit_code(self) -> int:
        """1 when a check fails, else 0."""
        return int(any(finding.status == "fail" for finding in self.findings))

    def verdict(self) -> str:
        counts = Counter(finding.status for finding in self.findings)
        words: dict[Status, str] = {"fail": "failed", "warn": "to look at", "ok": "ok", "skip": "skipped"}
        text = ", ".join(f"{counts[status]} {word}" for status, word in words.items() if counts[status])
        return f"{'NOT READY' if self.exit_code else 'READY'} for training on {', '.join(self.devices)}: {text}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as ``lockstep doctor --json`` prints them."""
        return {
            "fit": self.exit_code == 0,
            "verdict": self.verdict(),
            "devices": list(self.devices),
            "findings": [asdict(finding) for finding in self.findings],
            "meeting": self.meeting.model_dump() if self.meeting else None,
        }


def print_report(report: DoctorReport, stream: TextIO) -> None:
    """A line for each finding, then what to do about the bad ones, the all-reduces, and the verdict."""
    several = len({finding.node for finding in report.findings if finding.node}) > 1
    rows = [("", "check", "node", "finding")]
    rows += [(finding.status.upper(), finding.name, finding.node, finding.what) for finding in report.findings]
    columns, *cells = rows if several else [(status, name, what) for status, name, _, what in rows]
    print_table(columns, cells, stream)
    for finding in report.findings:
        if finding.status in {"warn", "fail"}:
            where = f" ({finding.node})" if several and finding.node else ""
            say(f"\n{finding.status.upper()} {finding.name}{where}: {finding.what}", stream)
            say(f"  why it matters: {finding.why}\n  fix: {finding.fix}", stream)
    if report.meeting is not None:
        say("\n".join(_bandwidth_table(report.meeting)), stream)
    say(f"\n{report.verdict()}", stream)


def _bandwidth_table(meeting: Meeting) -> Iterator[str]:
    yield f"\nall-reduce over {meeting.backend} among {len(meeting.ranks)} ranks"
    rows = [("size", "time", "GB/s", "per rank's line")]
    for row in meeting.all_reduce:
        rate = f"{row.bytes / row.seconds / 1e9:.2f}"
        rows.append((size_text(row.bytes), f"{row.seconds * 1e3:.3f} ms", rate, f"{row.bus_gb_s:.2f}"))
    yield from aligned(rows)
