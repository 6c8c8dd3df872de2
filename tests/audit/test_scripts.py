"""`lockstep audit` on small scripts of five kinds: some have one fault, in the line that ends with ``# fault``.

The first line of a script names the code of its fault, or of all notes about it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.conftest import RunCli

SCRIPTS = sorted(path for path in Path(__file__).with_name("scripts").glob("*.py") if path.stem != "common")
#: One fault of each kind and three right ones; the others are drills.
SLOW = (
    *("ddp_no_set_epoch", "ddp_same_noise", "ddp_token_means", "ddp_right_accumulation"),
    *("ddp_clip_local", "ddp_no_sync_last", "ddp_eval_mean", "ddp_file_race", "ddp_ends_early"),
    *("ddp_right_eval", "ddp_right_tokens"),
)
#: Scripts whose fault shows only beside a run on one rank.
COMPARED = ("ddp_schedule", "accelerate_schedule", "accelerate_right_schedule", "ddp_right", "ddp_notes")


def cases() -> list[object]:
    marks = dict.fromkeys(SLOW, pytest.mark.slow)
    return [pytest.param(path, id=path.stem, marks=marks.get(path.stem, pytest.mark.drill)) for path in SCRIPTS]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", cases())
def test_script(path: Path, run_cli: RunCli, tmp_path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    expected = re.match(r"# expect: (\w+)", source)
    notes = re.match(r"# notes: (.+)", source)
    ranks = "1,2" if path.stem in COMPARED else "2"
    result = run_cli("audit", "--ranks", ranks, "--json", tmp_path / "report.json", path, fresh=True, timeout_s=280)
    assert result.code == (1 if expected else 0), result.out + result.err
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    alarms = [
        (finding["code"], Path(finding["file"]), finding["line"])
        for finding in report["findings"]
        if finding["severity"] != "note"
    ]
    if notes:
        assert sorted({finding["code"] for finding in report["findings"]}) == notes[1].split(), result.out
    assert not [limit for limit in report["limits"] if "not everything was observed" in limit]
    lines = [number for number, line in enumerate(source.splitlines(), 1) if line.endswith("# fault")]
    assert alarms == ([(expected[1], path, lines[0])] if expected else []), result.out


def test_scripts_are_of_five_kinds() -> None:
    faulty = [path for path in SCRIPTS if path.read_text(encoding="utf-8").startswith("# expect: ")]
    assert (len(faulty), len(SCRIPTS) - len(faulty)) == (33, 21)
    assert {path.stem.split("_")[0] for path in SCRIPTS} == {"ddp", "accelerate", "fabric", "lightning", "hf"}
