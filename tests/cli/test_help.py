"""Help: quick, complete, and the same as the documentation."""

import dataclasses
import importlib.util
import re
from types import ModuleType
from typing import Any

import pytest

from lockstep.cli.main import VERBS, main
from lockstep.cli.training import SubmitFlags
from lockstep.config import RunConfig
from lockstep.config.load import all_keys
from tests.conftest import RunCli
from tests.gloo import ROOT

NAMES = [name for name, _, _ in VERBS]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
#: What `train` does beyond what `plan` shows.
TRAIN_ONLY = {
    "--accept-data",
    "--resume",
    *(f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(SubmitFlags)),
}


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def documented(verb: str) -> set[str]:
    """Flags in the tables of one verb's section of docs/cli.md."""
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    section = re.search(rf"^## lockstep {verb}$(.*?)(?=^## |\Z)", page, re.M | re.S)
    assert section, f"docs/cli.md has no section on {verb}"
    cells = [line.split("|")[1] for line in section[1].splitlines() if line.startswith("| `-")]
    return set(FLAG.findall(" ".join(cells)))


def listed(help_page: str) -> set[str]:
    """Flags that a help page lists, those mentioned in the explanations left out."""
    entries = re.findall(r"^│ (?:\*  )?(-.*?)(?:  |$)", help_page, re.M)
    return set(FLAG.findall(" ".join(entries)))


def test_the_help_lists_every_verb(run_cli: RunCli) -> None:
    result = run_cli("--help")
    assert (result.code, result.err) == (0, "")
    assert [name for name in NAMES if not re.search(rf"^│ {name}  ", result.out, re.M)] == []
    assert run_cli().out == result.out, "no command at all shows the help"


@pytest.mark.parametrize("verb", NAMES)
def test_the_documentation_has_the_flags_of_the_help(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main([verb, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: lockstep {verb}")
    assert verb != "train" or "lockstep train har --devices cpu,cpu" in out
    shown = listed(out)
    in_documentation = documented(verb) | (documented("train") - TRAIN_ONLY if verb == "plan" else set())
    assert shown == in_documentation
    own = {"lightning": "LightningCLI lists them", "bench": "its subcommands have them", "run": "beside the script's"}
    assert shown or verb in own


def test_the_reference_is_what_the_code_says() -> None:
    pages = load_generator().PAGES
    old = [page for page, render in pages.items() if (ROOT / "docs" / page).read_text(encoding="utf-8") != render()]
    assert old == [], "run: python docs/generate.py"
    assert {f"schemas/{file.name}" for file in (ROOT / "docs" / "schemas").iterdir()} == pages.keys() - {
        "cli.md",
        "configuration.md",
        "errors.md",
        "run-folder.md",
    }


@pytest.mark.long
def test_messages_are_listed_by_code() -> None:
    listed = load_generator().error_messages()
    sections = dict(part.split("\n", 1) for part in listed.split("\n### ")[1:])
    assert all("\n| `" in rows for rows in sections.values())
    assert listed.count("\n| `") > 400
    rows = {
        "WRONG_USAGE": "| `… is not a condition` |",
        "INVALID_CONFIG": "| `the configuration could not be read back from the run folder` | give absolute paths",
    }
    found = {row: [code for code, text in sections.items() if row in text] for row in rows.values()}
    assert found == {row: [code] for code, row in rows.items()}


def test_the_configuration_page_has_every_key_with_a_meaning() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    keys = {re.findall(r"`([^`]+)`", row)[0]: row for row in rows}
    assert set(all_keys(RunConfig)) <= keys.keys()
    assert {key.partition(".")[0] for key in keys.keys() - set(all_keys(RunConfig))} == {"task"}
    assert {"task.mode", "task.model"} <= keys.keys()
    assert [key for key, row in keys.items() if row.endswith("|  |")] == []


def test_the_version(run_cli: RunCli) -> None:
    from importlib import metadata

    assert run_cli("--version").out.strip() == metadata.version("lockstep-train")
