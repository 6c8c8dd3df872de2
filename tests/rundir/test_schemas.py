"""Every file of a run folder matches its JSON schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from lockstep.config.load import parse_yaml
from tests.gloo import ROOT


def schema(name: str) -> Any:
    return json.loads((ROOT / "docs" / "schemas" / f"{name}.schema.json").read_text(encoding="utf-8"))


def check_folder(folder: Path) -> set[str]:
    """Validate each file of a run folder that has a schema; returns the names of these schemas."""
    seen = set()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name, text = file.name.partition(".")[0].partition("-")[0], file.suffix in {".json", ".jsonl", ".yaml"}
        if not text or not (ROOT / "docs" / "schemas" / f"{name}.schema.json").exists():
            continue
        content = file.read_text(encoding="utf-8")
        rows = map(json.loads, content.splitlines()) if file.suffix == ".jsonl" else [parse_yaml(content)]
        for row in rows:
            jsonschema.validate(row, schema(name), jsonschema.Draft202012Validator)
        seen.add(name)
    return seen


def test_other_content_does_not() -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"id": "run-1", "task": "har", "created_at": 3}, schema("run"))
