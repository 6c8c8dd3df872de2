"""Every file of a run folder matches its JSON schema, whichever version wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from lockstep.config.load import parse_yaml
from tests.gloo import ROOT

SAVED = sorted((ROOT / "tests" / "e2e" / "saved_runs").iterdir())


def schema(name: str) -> Any:
    return json.loads((ROOT / "docs" / "schemas" / f"{name}.schema.json").read_text(encoding="utf-8"))


def check_folder(folder: Path, *, without: frozenset[str] = frozenset()) -> set[str]:
    """Validate each file of a run folder that has a schema, but some; returns the names of these schemas."""
    seen = set()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name, text = file.name.partition(".")[0].partition("-")[0], file.suffix in {".json", ".jsonl", ".yaml"}
        if not text or name in without or not (ROOT / "docs" / "schemas" / f"{name}.schema.json").exists():
            continue
        content = file.read_text(encoding="utf-8")
        rows = map(json.loads, content.splitlines()) if file.suffix == ".jsonl" else [parse_yaml(content)]
        for row in rows:
            jsonschema.validate(row, schema(name), jsonschema.Draft202012Validator)
        seen.add(name)
    return seen


@pytest.mark.parametrize("folder", SAVED, ids=lambda folder: folder.name)
def test_files_of_older_versions_match(folder: Path) -> None:
    # Configurations and plans are converted when they are read: their schemas are this version's.
    assert check_folder(folder, without=frozenset({"config", "plan"})) >= {"run", "metrics", "manifest"}


def test_other_content_does_not() -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"id": "run-1", "task": "har", "created_at": 3}, schema("run"))
