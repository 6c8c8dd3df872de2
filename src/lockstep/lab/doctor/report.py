"""Findings of the checks, what the ranks measured together, and the report of both as text and JSON."""

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
    """The result of one check: what was found, why it matters for training, and the fix of a ``warn`` or ``fail``.

    ``fail``: training cannot work; ``warn``: it works, but badly or not always; ``skip``: not checked.
    """

    name: str
    status: Status
    what: str
    why: str
    fix: str = ""
    node: str = ""


class Check(NamedTuple):
    """Makes the findings of one check. ``fix``: for those that have no other."""

    name: str
    why: str
    fix: str = ""

    def __call__(self, status: Status, what: str, fix: str = "") -> Finding:
        return Finding(self.name, status, what, self.why, (fix or self.fix) if status in {"warn", "fail"} else "")

    def failed(self, error: BaseException, fix: str) -> Finding:
        """The finding that an error makes; ``fix``: where neither the error nor its cause has one."""
        text = first_line(error)
        if isinstance(error, LockstepError):
            fix = error.fix or fix
        elif cause := find_cause(f"{type(error).__name__}: {error}"):
            text, fix = f"{text} ({cause.title})", cause.advice
        return self("fail", text, fix)


def guarded(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The findings of ``check``; a warning when the check itself fails."""
    try:
        return list(check())
    except Exception as error:
        failed = Check(name, "the check itself failed, so its result is not known")
        fix = "check it manually, and report this line with the output of `lockstep version`"
        return [failed("warn", f"could not be checked: {first_line(error)}", fix)]


def first_line(error: BaseException) -> str:
    """An error in one line: ``RuntimeError: …``, or a :class:`LockstepError`'s text."""
    if isinstance(error, LockstepError):
        return error.what.splitlines()[0] + (f" ({error.why})" if error.why else "")
    return f"{type(error).__name__}: {error}".splitlines()[0]


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that are the same on several nodes become one, for all of them."""
    nodes: dict[Finding, list[str]] = {}
    for finding in findings:
        nodes.setdefault(dataclasses.replace(finding, node=""), []).append(finding.node)
    return [dataclasses.replace(finding, node=", ".join(dict.fromkeys(names))) for finding, names in nodes.items()]


class RankFacts(Frozen):
    """One rank. ``clock_s``: how far its clock is ahead of rank 0's, and how exactly that is known (±), seconds."""

    rank: int
    host: str
    device: str
    versions: dict[str, str]
    clock_s: tuple[float, float] = (0.0, 0.0)


class AllReduce(Frozen):
    """All-reduces of one size. ``wrong``: ranks whose sum was wrong. ``seconds``: of one, the slowest rank's median.

    ``bus_gb_s`` is 2(n−1)/n · bytes / seconds in 1e9 bytes: what travels over each rank's line in a ring, which
    compares with the line's own speed (nccl-tests, doc/PERFORMANCE.md).
    """

    bytes: int
    seconds: float
    bus_gb_s: float
    wrong: tuple[int, ...] = ()


class Meeting(Frozen):
    """What the ranks found out together."""

    backend: str
    ranks: tuple[RankFacts, ...]
    all_reduce: tuple[AllReduce, ...]


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
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
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
        say(f"\nall-reduce over {report.meeting.backend} among {len(report.meeting.ranks)} ranks", stream)
        print_table(("size", "time", "GB/s", "per rank's line"), list(map(_cells, report.meeting.all_reduce)), stream)
    say(f"\n{report.verdict()}", stream)


def _cells(row: AllReduce) -> tuple[str, ...]:
    rate = row.bytes / row.seconds / 1e9
    return size_text(row.bytes), f"{row.seconds * 1e3:.3f} ms", f"{rate:.2f}", f"{row.bus_gb_s:.2f}"


def size_text(size: int) -> str:
    """``4 KiB``, ``64 MiB``."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
