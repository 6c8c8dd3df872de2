"""Findings of the checks, measurements of the ranks, and their report as text and JSON."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TextIO

from lockstep.errors import LockstepError
from lockstep.launch.failure.causes import find_cause
from lockstep.planning.decision import Frozen
from lockstep.telemetry.console import print_table, say

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        status: ``fail``: training cannot work; ``warn``: it works, but badly or not always; ``skip``: not checked.
        what: the result, for users.
        why: its relevance for training.
        fix: the fix of a ``warn`` or ``fail``.
        node: host name.
    """

    name: str
    status: Status
    what: str
    why: str
    fix: str = ""
    node: str = ""


class Check(NamedTuple):
    """Makes the findings of one check; ``fix``: their default fix."""

    name: str
    why: str
    fix: str = ""

    def __call__(self, status: Status, text: str, fix: str = "") -> Finding:
        return Finding(self.name, status, text, self.why, (fix or self.fix) if status in {"warn", "fail"} else "")

    def failed(self, error: BaseException, fix: str) -> Finding:
        """Make the finding of an error; ``fix``: used if neither the error nor its cause has one."""
        text = first_line(error)
        if isinstance(error, LockstepError):
            fix = error.fix or fix
        elif cause := find_cause(f"{type(error).__name__}: {error}"):
            text = f"{text} ({cause.title})"
            fix = cause.advice
        return self("fail", text, fix)


def guarded(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Return the findings of ``check``, or a warning if the check itself raises."""
    try:
        return list(check())
    except Exception as error:
        failed = Check(name, "the check itself failed, so its result is not known")
        fix = "check it manually, and report this line with the output of `lockstep version`"
        return [failed("warn", f"could not be checked: {first_line(error)}", fix)]


def first_line(error: BaseException) -> str:
    """Convert an error to one line: ``RuntimeError: …``, or a :class:`LockstepError`'s text."""
    if isinstance(error, LockstepError):
        return error.what.splitlines()[0] + (f" ({error.why})" if error.why else "")
    return f"{type(error).__name__}: {error}".splitlines()[0]


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Merge findings that are the same on several nodes."""
    nodes: dict[Finding, list[str]] = {}
    for finding in findings:
        nodes.setdefault(dataclasses.replace(finding, node=""), []).append(finding.node)
    return [dataclasses.replace(finding, node=", ".join(dict.fromkeys(names))) for finding, names in nodes.items()]


class RankFacts(Frozen):
    """One rank and its device."""

    rank: int
    host: str
    device: str


class AllReduce(Frozen):
    """All-reduces of one size. ``wrong``: ranks whose sum was wrong. ``seconds``: median of the slowest rank.

    ``bus_gb_s`` is 2(n−1)/n · bytes / seconds in 1e9 bytes: the traffic over each rank's line in a ring, comparable
    with the speed of the line (nccl-tests, doc/PERFORMANCE.md).
    """

    bytes: int
    seconds: float
    bus_gb_s: float
    wrong: tuple[int, ...] = ()


class Meeting(Frozen):
    """Collective measurements of all ranks."""

    backend: str
    ranks: tuple[RankFacts, ...]
    all_reduce: tuple[AllReduce, ...]


@dataclass(frozen=True)
class DoctorReport:
    """The findings of all checks. ``meeting``: measurements of the ranks; ``None`` if they did not meet."""

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
        """Return plain values, the output of ``lockstep doctor --json``."""
        return {
            "fit": self.exit_code == 0,
            "verdict": self.verdict(),
            "devices": list(self.devices),
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "meeting": self.meeting.model_dump() if self.meeting else None,
        }


def print_report(report: DoctorReport, stream: TextIO) -> None:
    """Print a line for each finding, then the fixes, the all-reduces, and the verdict."""
    has_several_nodes = len({finding.node for finding in report.findings if finding.node}) > 1
    rows = [("", "check", "node", "finding")]
    rows += [(finding.status.upper(), finding.name, finding.node, finding.what) for finding in report.findings]
    columns, *cells = rows if has_several_nodes else [(status, name, text) for status, name, _, text in rows]
    print_table(columns, cells, stream)
    for finding in report.findings:
        if finding.status in {"warn", "fail"}:
            node = f" ({finding.node})" if has_several_nodes and finding.node else ""
            say(f"\n{finding.status.upper()} {finding.name}{node}: {finding.what}", stream)
            say(f"  why it matters: {finding.why}\n  fix: {finding.fix}", stream)
    say(f"\n{report.verdict()}", stream)


def size_text(size: int) -> str:
    """Format bytes as ``4 KiB``, ``64 MiB``."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
