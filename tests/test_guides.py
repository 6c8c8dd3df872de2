"""The guides: every command in them parses, every cause of a failure has a section, links lead somewhere."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.cli.main import VERBS, app
from tests import documents
from tests.gloo import ROOT

GENERATED = {"cli.md", "configuration.md", "errors.md", "run-folder.md"}
PAGES = (
    ROOT / "README.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.name not in GENERATED),
    ROOT / "benchmarks" / "README.md",
)
VERB = "|".join(verb for verb, *_ in VERBS)
COMMAND = re.compile(rf"(?:^|\s)(?:python -m |-m )?lockstep +((?:{VERB})\b[^#`|;\n]*)")
PLACEHOLDERS = {"…", "TASK", "..."}


def commands(document: Path) -> Iterator[list[str]]:
    """What follows ``lockstep`` in the commands of a document; without placeholders and what may be left out."""
    for command in documents.commands(document):
        for text in COMMAND.findall(re.sub(r"\s\[[^]']*\]+|\{\w+,.*", "", command.text)):
            words = [re.sub(r"^[A-Z]$", "1", word) for word in shlex.split(text) if word not in PLACEHOLDERS]
            has_no_value = command.is_mention or text.rstrip().endswith("…")
            yield words[:-1] if words[-1].startswith("--") and has_no_value else words


@pytest.mark.parametrize("document", documents.documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_is_one(document: Path) -> None:
    for words in commands(document):
        if len(words) > 1:  # else the text speaks of a verb
            words = [word if word != "local-sgd" else "ddp" for word in words]  # the guide's own strategy
            app.parse_args(words, exit_on_error=False, print_error=False)  # raises where a verb or a flag is none


def test_commands_are_found() -> None:
    assert all(len(list(commands(ROOT / page))) >= 4 for page in ("README.md", "docs/clusters.md", "docs/bench.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#:]+)\)", prose):
        assert (page.parent / target).exists(), f"{page.name} points to {target}"


def test_no_advice_ends_processes_by_name() -> None:
    for page in PAGES:
        assert not re.search(r"\bpkill\b|\bkillall\b", page.read_text(encoding="utf-8")), page.name
