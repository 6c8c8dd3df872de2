"""Findings, and their stable codes, which `codes.toml` lists."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SEVERITIES = ("note", "warning", "error")
#: By code: ``severity``, ``meaning`` for the reference, ``message`` with the evidence, ``fix``, which names the call.
CODES: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("codes.toml").read_text(encoding="utf-8"))

#: ``code``, ``severity``, ``file``, ``line``, ``message``, ``evidence``, ``fix``, as in the JSON report.
Finding = dict[str, Any]


def finding(code: str, location: str | None, evidence: Mapping[str, Any]) -> Finding:
    """Make a finding at ``location`` (``file:line`` of the script) from the numbers that were measured."""
    kind = CODES[code]
    file, _, line = (location or "").rpartition(":")
    texts = {name: _as_text(value) for name, value in evidence.items()}
    return {
        "code": code,
        "severity": kind["severity"],
        "file": file or None,
        "line": int(line) if line else None,
        "message": kind["message"].format_map(texts),
        "evidence": dict(evidence),
        "fix": kind["fix"],
    }


def _as_text(value: Any) -> Any:
    """Join the first items of a list."""
    if not isinstance(value, list):
        return value
    items = [f"{item:g}" if isinstance(item, float) else str(item) for item in value[:8]]
    return ", ".join([*items, *["…"][: len(value) - 8 > 0]])
