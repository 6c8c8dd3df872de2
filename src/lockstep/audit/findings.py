"""Findings, and their stable codes, which `codes.toml` lists."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

Severity = Literal["note", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("note", "warning", "error")


class Kind(NamedTuple):
    """A kind of finding: ``meaning`` for the reference, ``fix`` names the call."""

    severity: Severity
    meaning: str
    fix: str


def _codes() -> dict[str, Kind]:
    text = Path(__file__).with_name("codes.toml").read_text(encoding="utf-8")
    return {code: Kind(**row) for code, row in tomllib.loads(text).items()}


CODES = _codes()


@dataclass(frozen=True)
class Finding:
    """A finding with the script's file and line, a sentence with numbers, and the numbers as ``evidence``."""

    code: str
    line: str | None
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def severity(self) -> Severity:
        return CODES[self.code].severity

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: ``code``, ``severity``, ``file``, ``line``, ``message``, ``evidence``, ``fix``."""
        file, _, number = (self.line or "").rpartition(":")
        return {
            "code": self.code,
            "severity": self.severity,
            "file": file or None,
            "line": int(number) if number else None,
            "message": self.message,
            "evidence": dict(self.evidence),
            "fix": CODES[self.code].fix,
        }
