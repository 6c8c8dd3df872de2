"""The verbs that read: devices, runs, show, version. Real run folders, made as a run makes them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.main import main
from lockstep.config import resolve
from lockstep.events import EpochEnded, RunEnded, RunStarted, StepLogged
from lockstep.rundir.folder import RunDir
from lockstep.telemetry.sinks import RunFolderSink
from tests.conftest import RunCli

PLAN: dict[str, Any] = {
    "task": {"name": "har"},
    "epochs": 2,
    "decisions": {
        "strategy": {
            "key": "strategy",
            "title": "strategy",
            "shown": "ddp",
            "reason": "two devices " * 15 + "so it is",
        }
    },
    "notes": [],
}
PLACEMENT = {"devices": ["cpu", "cpu"], "strategy": "ddp"}


def make_run(path: Path, run_id: str, *, status: str = "completed", error: str | None = None) -> RunDir:
    config = resolve({"name": "a name", "training": {"epochs": 2}})
    run = RunDir.create(path, config, run_id=run_id, command=["lockstep", "train", "har"])
    attempt = run.begin_attempt(PLAN, PLACEMENT)
    sink = RunFolderSink(run, run.config())
    sink.emit(RunStarted(run.path, attempt, 0, 20, PLAN))
    sink.emit(StepLogged(attempt, 10, 1, 320, 0.5, 1e-3, 1.0, 100.0, 0.0, 0))
    sink.emit(EpochEnded(attempt, 1, 10, {"epoch": 1, "train_loss": 0.5, "val_accuracy": 0.75}, True))
    if status != "running":
        sink.emit(RunEnded(status, 10, {"test_accuracy": 0.5}, 1, {"val_accuracy": 0.75}, 3.0, error))
    (run.logs / "rank-0.log").write_text("…\n")
    saved = run.checkpoints / "step-00000010"
    saved.mkdir()
    (saved / "manifest.json").write_text("{}")
    (run.checkpoints / "best").symlink_to(saved.name)
    return run


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "run-0000aaaa", "run-0000aaaa")
    make_run(
        tmp_path / "runs" / "run-0000bbbb",
        "run-0000bbbb",
        status="failed",
        error="rank 1 failed first:\nValueError: no",
    )
    return tmp_path / "runs"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_runs_newest_first(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "runs").splitlines()
    assert [line.split()[0] for line in lines] == ["id", "run-0000bbbb", "run-0000aaaa"]
    cells = re.split(r"  +", lines[1])
    assert cells[:7] == ["run-0000bbbb", "a name", "har", "failed", "1/2", "0", "val_accuracy 0.7500"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", cells[7])
    assert cells[8:] == ["cpu,cpu"]


def test_runs_as_json(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest, oldest = json.loads(printed(capsys, "runs", "--json"))["runs"]
    assert (newest["id"], newest["status"], newest["error"]) == (
        "run-0000bbbb",
        "failed",
        "rank 1 failed first:\nValueError: no",
    )
    assert (oldest["best_metric"], oldest["epoch"], oldest["epochs"]) == ({"val_accuracy": 0.75}, 1, 2)
    assert oldest["path"] == str(runs / "run-0000aaaa")
    assert json.loads(printed(capsys, "runs", "--json", "--runs-dir", "elsewhere")) == {"runs": []}


def test_a_run_whose_process_is_gone_is_lost(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(runs / "run-0000cccc", "run-0000cccc", status="running")
    beat = json.loads(run.heartbeat_file.read_text())
    run.heartbeat_file.write_text(json.dumps({**beat, "pid": 2**22 + 1, "updated": 0}))
    listed = json.loads(printed(capsys, "runs", "--json"))["runs"]
    assert {item["id"]: item["status"] for item in listed}["run-0000cccc"] == "lost"


def test_a_damaged_run_does_not_hide_the_others(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "run-0000aaaa" / "metrics.json").write_text("{")
    (runs / "run-0000dddd").mkdir()
    (runs / "run-0000dddd" / "run.json").write_text("[]")
    assert main(["runs"]) == 0
    output = capsys.readouterr()
    assert "run-0000aaaa" in output.out and "run-0000bbbb" in output.out
    assert "warning: " in output.err and "run-0000dddd" in output.err


@pytest.mark.parametrize("reference", ["run-0000aaaa", "0000a", "runs/run-0000aaaa"])
def test_show(runs: Path, reference: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "show", reference)
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in text.splitlines() if "  " in line)
    assert (rows["run"], rows["status"], rows["devices"]) == ("run-0000aaaa", "completed", "cpu, cpu")
    assert (rows["best val_accuracy"], rows["test_accuracy"], rows["train_loss"]) == ("0.7500", "0.5000", "0.5000")
    assert rows["command"] == "lockstep train har"
    assert rows["checkpoint (best)"].endswith("step-00000010")
    assert rows["log"].endswith("rank-0.log")
    assert PLAN["decisions"]["strategy"]["reason"] in text, "nothing is cut in a pipe"


def test_show_the_last_run_which_failed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "show", "last").endswith("ValueError: no\n")


def test_show_as_json(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(printed(capsys, "show", "0000a", "--json"))
    assert document["plan"] == PLAN
    assert document["metrics"]["epochs"][0]["val_accuracy"] == 0.75
    (saved,) = document["checkpoints"]
    assert (saved["step"], saved["best"], saved["last"]) == (10, True, False)
    assert document["config"] == str(runs / "run-0000aaaa" / "config.yaml")


def test_show_a_run_that_never_had_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunDir.create(tmp_path / "run", resolve({}), run_id="run-0000eeee", command=["lockstep"])
    assert re.search(r"^status +pending$", printed(capsys, "show", str(tmp_path / "run")), re.M)


def test_pipes_get_neither_colours_nor_cut_lines(run_cli: RunCli, runs: Path) -> None:
    result = run_cli("show", "run-0000aaaa", env={"TERM": "xterm-256color", "COLUMNS": "20"})
    assert result.code == 0
    assert "\x1b" not in result.out and "…" not in result.out
    assert str(runs / "run-0000aaaa" / "config.yaml") in result.out


def test_devices(run_cli: RunCli) -> None:
    result = run_cli("devices")
    assert result.code == 0
    assert re.search(r"^cpu  .* GB .*32", result.out, re.M)
    listed = json.loads(run_cli("devices", "--json").out)["devices"]
    assert {"id", "kind", "name", "memory_gb", "free_gb", "users", "precisions", "supported", "note"} <= listed[
        0
    ].keys()
    assert listed[0]["id"] == "cpu"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, "version", "--json"))
    assert found["torch"].startswith("2.")
    assert {"lockstep", "python", "numpy"} <= found.keys()
    assert re.search(r"^torch +2\.", printed(capsys, "version"), re.M)
