"""Findings, and their stable codes, which `codes.toml` lists."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

Severity = Literal["note", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("note", "warning", "error")


class Kind(NamedTuple):
    """A kind of finding: ``meaning`` for the reference, ``message`` with the evidence, ``fix`` names the call."""

    severity: Severity
    meaning: str
    message: str
    fix: str


CODES = {
    code: Kind(row["severity"], row["meaning"], row["message"], row["fix"])
    for code, row in tomllib.loads(Path(__file__).with_name("codes.toml").read_text(encoding="utf-8")).items()
}


@dataclass(frozen=True)
class Finding:
    """A finding with the script's file and line, and the numbers that were measured."""

    code: str
    line: str | None
    evidence: Mapping[str, Any]

    @property
    def kind(self) -> Kind:
        return CODES[self.code]

    @property
    def message(self) -> str:
        texts = {name: _as_text(value) for name, value in self.evidence.items()}
        return self.kind.message.format_map(texts)

    @property
    def file(self) -> str | None:
        return self.line.rpartition(":")[0] if self.line else None

    @property
    def number(self) -> int | None:
        return int(self.line.rpartition(":")[2]) if self.line else None

    def __str__(self) -> str:
        """Return severity, code, file, line and message; on a second line the fix."""
        path = os.path.relpath(self.file) if self.file else ""
        location = f" {Path(path).name if path.startswith('..') else path}:{self.number}" if path else ""
        return f"{self.kind.severity} {self.code}{location}: {self.message}\n  fix: {self.kind.fix}"

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: ``code``, ``severity``, ``file``, ``line``, ``message``, ``evidence``, ``fix``."""
        return {
            "code": self.code,
            "severity": self.kind.severity,
            "file": self.file,
            "line": self.number,
            "message": self.message,
            "evidence": dict(self.evidence),
            "fix": self.kind.fix,
        }


def _as_text(value: Any) -> Any:
    """Join the first items of a list."""
    if not isinstance(value, list):
        return value
    items = [f"{item:g}" if isinstance(item, float) else str(item) for item in value[:8]]
    return ", ".join([*items, *["…"][: len(value) - 8 > 0]])
