"""The run folder: made whole, read with suspicion."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import dump, resolve
from lockstep.errors import ConfigError, RunFolderError
from lockstep.rundir import folder as rundir
from lockstep.rundir.files import read_json, write_json
from lockstep.rundir.folder import RunDir, new_run_id
from lockstep.rundir.summary import compare, read_runs
from tests.disks import make_read_only, small_disk
from tests.rundir.runs import JSON_VALUES, ON_TMP_PATH, everything_in, make_run

load = import_module("lockstep.config.load")
#: Classes of the largest ImageNet.
IMAGENET_21K = 21_841

# Making one.


def test_a_new_run_is_pending_and_says_what_the_design_lists(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "a", name="first try")
    content = json.loads((run.path / "run.json").read_text())
    assert list(content) == [
        "format_version", "id", "name", "task", "status", "created_at", "started_at", "completed_at", "pid", "host",
        "command", "versions", "git", "placement", "attempt", "restarts", "best_epoch", "best_metric",
        "final_metrics", "error", "tags",
    ]  # fmt: skip
    record = run.read()
    assert (record.id, record.name, record.task, record.status) == ("run-00000001", "first try", "har", "pending")
    assert record.pid == os.getpid() and record.command == ["lockstep", "train", "har"] and record.attempt == 0
    assert {"python", "lockstep", "torch", "numpy"} <= record.versions.keys()
    assert run.status() == "pending" and run.epochs() == run.steps() == []
    assert run.checkpoints.is_dir() and run.logs.is_dir()


def test_a_run_has_the_commit_that_it_was_started_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert make_run(tmp_path / "runs" / "outside").read().git is None
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    (tmp_path / "task.py").write_text("lr = 1\n")
    for words in (["init", "-q"], ["add", "task.py"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    clean = make_run(tmp_path / "runs" / "clean")
    assert json.loads(clean.run_file.read_text())["git"] == {"commit": commit, "clean": True}
    (tmp_path / "task.py").write_text("lr = 2\n")
    changed = make_run(tmp_path / "runs" / "changed")
    assert json.loads(changed.run_file.read_text())["git"] == {"commit": commit, "clean": False}
    assert compare([clean, changed]).results["git commit"] == [commit[:10], f"{commit[:10]} + changes"]


def test_the_configuration_comes_back_as_it_was(tmp_path: Path) -> None:
    settings_given = {"optimizer": {"lr": 3e-4}, "task": {"name": "har", "mode": "é"}}
    config = resolve(settings_given)
    run = RunDir.create(tmp_path / "a", config, run_id=new_run_id(), command=[])
    assert run.config() == config == RunDir.open(tmp_path / "a").config()


@pytest.mark.parametrize("count", [500, pytest.param(IMAGENET_21K, marks=pytest.mark.drill)])
def test_a_task_may_name_code_and_hold_long_lists(tmp_path: Path, count: int) -> None:
    (tmp_path / "nets.py").write_text("")
    (tmp_path / "linked.py").symlink_to("nets.py")
    classes = [f"n{number:08}" for number in range(count)]
    per_class = len(dump(resolve({"task": {"name": "har", "of": classes}}))) / count
    assert per_class * IMAGENET_21K < load.MAX_CONFIG_BYTES
    task = {"name": "har", "backbone": "nets/resnet.py:ResNet", "head": f"{tmp_path}/linked.py:Head", "of": classes}
    run = make_run(tmp_path / "a", task=task)
    assert run.config().task.settings == {key: value for key, value in task.items() if key != "name"}


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ({"text": "x" * 30_000}, "20,000"),
        ({"name": "mine.py:Task"}, "absolute"),
        ({"datamodule": "mine.py:Data"}, "absolute"),
    ],
)
def test_a_configuration_that_could_not_be_read_again_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: dict[str, object], why: str
) -> None:
    monkeypatch.setattr(rundir, "MAX_CONFIG_BYTES", 20_000)
    with pytest.raises(ConfigError) as caught:
        make_run(tmp_path / "a", task=task)
    assert why in caught.value.why and caught.value.fix and everything_in(tmp_path) == []
    run = make_run(tmp_path / "a", name="as it was")
    with pytest.raises(ConfigError):
        run.keep_config(resolve({"task": task}))
    assert run.config().name == "as it was"
    run.keep_config(resolve({"name": "changed"}))
    assert run.config().name == "changed"


def test_ids_have_the_documented_form() -> None:
    assert re.fullmatch(r"run-[0-9a-f]{8}", new_run_id()) and new_run_id() != new_run_id()


def test_an_empty_folder_becomes_the_run(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert make_run(tmp_path / "mine").read().status == "pending"
    assert everything_in(tmp_path) == [
        "mine", "mine/attempts", "mine/checkpoints", "mine/config.yaml", "mine/heartbeat.json", "mine/logs",
        "mine/run.json",
    ]  # fmt: skip


def test_the_empty_target_of_a_link_becomes_the_run(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    assert make_run(tmp_path / "link").read().status == "pending"
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target" / "run.json").is_file()


def test_an_empty_mounted_volume_becomes_the_run(tmp_path: Path) -> None:
    with small_disk(tmp_path / "volume", "1m") as volume:
        assert make_run(volume).status() == "pending"
        assert everything_in(tmp_path)[0] == "volume", "nothing is left beside it"


def test_an_unfinished_run_is_not_overwritten(tmp_path: Path) -> None:
    make_run(tmp_path / "a").update(status="failed")
    with pytest.raises(RunFolderError, match="run-00000001") as caught:
        make_run(tmp_path / "a", "run-00000002")
    assert "--resume" in caught.value.fix and RunDir.open(tmp_path / "a").read().id == "run-00000001"


def test_a_run_that_is_on_is_not_overwritten(tmp_path: Path) -> None:
    make_run(tmp_path / "a").update(status="running")
    with pytest.raises(RunFolderError, match="run-00000001") as caught:
        make_run(tmp_path / "a", "run-00000002")
    assert str(os.getpid()) in caught.value.why and "lockstep stop" in caught.value.fix


def test_a_finished_run_is_not_overwritten(tmp_path: Path) -> None:
    make_run(tmp_path / "a").update(status="completed")
    with pytest.raises(RunFolderError, match="run-00000001") as caught:
        make_run(tmp_path / "a", "run-00000002")
    assert "another --save-dir" in caught.value.fix


def test_foreign_files_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(RunFolderError) as caught:
        make_run(tmp_path)
    assert "thesis.tex" in caught.value.why and everything_in(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("name", ["file", "file/below", "\0", "x" * 300], ids=["file", "below", "null", "long"])
def test_impossible_folders_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError) as caught:
        make_run(tmp_path / name)
    assert caught.value.fix and caught.value.exit_code == 2 and everything_in(tmp_path) == ["file"]


def test_of_two_creators_one_wins(tmp_path: Path) -> None:
    outcomes: list[str] = []

    def create(run_id: str) -> None:
        try:
            outcomes.append(make_run(tmp_path / "a", run_id).read().id)
        except RunFolderError:
            outcomes.append("refused")

    threads = [threading.Thread(target=create, args=(f"run-0000000{n}",)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("refused") == 5
    assert RunDir.open(tmp_path / "a").read().id in outcomes and everything_in(tmp_path)[0] == "a"


def test_a_read_only_folder_is_refused_with_nothing_left(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        make_read_only(disk)
        with pytest.raises(RunFolderError) as caught:
            make_run(disk / "a")
        assert caught.value.exit_code == 2 and "--save-dir" in caught.value.fix and everything_in(disk) == []


@pytest.mark.parametrize("mounted_itself", [False, True])
def test_a_full_disk_leaves_nothing_half_made(tmp_path: Path, mounted_itself: bool) -> None:
    with small_disk(tmp_path / "disk", "8k") as disk:
        target = disk if mounted_itself else disk / "a"
        with pytest.raises(RunFolderError):
            make_run(target)
        assert everything_in(disk) == []


# Reading and changing it.


def test_updates_replace_fields_and_keep_the_rest(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    run.update(status="running", best_metric={"val_loss": math.nan, "val_acc": 0.5})
    record = RunDir.open(run.path).update(tags=["kept"])
    assert record.status == "running" and record.tags == ["kept"] and record.best_metric["val_acc"] == 0.5
    assert math.isnan(record.best_metric["val_loss"])
    assert '"val_loss": null' in run.run_file.read_text(), "JSON has no NaN"


def test_an_unknown_field_is_a_programming_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="stauts"):
        make_run(tmp_path / "a").update(stauts="running")


def test_readers_never_see_half_an_update(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    done = threading.Event()
    seen: set[int] = set()
    broken: list[Exception] = []

    def read() -> None:
        while not done.is_set():
            try:
                record = RunDir.open(run.path).read()
                seen.add(len(record.tags))
                assert all(tag == f"{len(record.tags)}" * 500 for tag in record.tags)
            except Exception as error:
                broken.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for n in [1, 9, 2, 7, 3] * 8:
        run.update(tags=[f"{n}" * 500] * n)
    done.set()
    for reader in readers:
        reader.join()
    assert not broken and seen <= {0, 1, 2, 3, 7, 9}


def test_a_writer_killed_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    script = (
        "import sys; from pathlib import Path; from lockstep.rundir.folder import RunDir\n"
        "run = RunDir.open(Path(sys.argv[1]))\n"
        "print('go', flush=True)\n"
        "while True:\n"
        "    n = run.read().attempt + 1\n"
        "    run.update(attempt=n, tags=[str(n)] * 2000); run.append_step({'step': n, 'pad': 'x' * 5000})\n"
    )
    for delay_s in (0.0, 0.01, 0.05):
        process = subprocess.Popen([sys.executable, "-c", script, run.path], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "go\n"
        time.sleep(delay_s)
        process.kill()
        process.communicate()
        record = run.read()
        assert record.tags == [str(record.attempt)] * (2000 if record.attempt else 0)
        assert [row["step"] for row in run.steps()] == sorted({row["step"] for row in run.steps()})
    run.begin_attempt({}, {})
    assert not [name for name in everything_in(run.path) if ".tmp-" in name], "leftovers go when an attempt begins"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", " damaged"),
        (b"{", " damaged"),
        (b"\xff\xfe\x00", " damaged"),
        (b"[" * 100_000, " damaged"),
        (b"[]", "not a run folder"),
        (b"7", "not a run folder"),
        (b'{"epochs": []}', "not a run folder"),
        (b'{"format_version": true}', "not a run folder"),
        (b'{"format_version": 1}', " damaged"),
        (b'{"format_version": 1, "id": "\\ud800"}', " damaged"),
        (b'{"format_version": 1, "pid": ' + b"9" * 5000 + b"}", " damaged"),
        (b" " * (5 << 20), "large"),
    ],
)
def test_a_damaged_run_file_is_one_error(tmp_path: Path, content: bytes, says: str) -> None:
    run = make_run(tmp_path / "a")
    run.run_file.write_bytes(content)
    with pytest.raises(RunFolderError, match=says) as caught:
        RunDir.open(run.path)
    assert caught.value.fix
    heard: list[str] = []
    assert read_runs(tmp_path, heard.append) == [] and len(heard) == 1


def test_a_newer_format_asks_for_an_upgrade(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    write_json(run.run_file, {**read_json(run.run_file), "format_version": rundir.FORMAT_VERSION + 1})
    with pytest.raises(RunFolderError, match=r"pip install --upgrade lockstep-train") as caught:
        RunDir.open(run.path)
    assert "upgrade" in caught.value.fix
    with pytest.raises(RunFolderError, match=r"pip install --upgrade lockstep-train"):
        make_run(run.path)


@pytest.mark.parametrize("name", ["run.json", "metrics.json", "steps.jsonl", "config.yaml", "heartbeat.json"])
def test_a_named_pipe_in_place_of_a_file_does_not_hang_anyone(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path / "a")
    (run.path / name).unlink(missing_ok=True)
    os.mkfifo(run.path / name)
    for read in (run.read, run.epochs, run.steps, run.config, run.status):
        try:
            read()
        except RunFolderError as error:
            assert name in error.what


ROWS = st.dictionaries(st.sampled_from(["attempt", "step", "epoch", "loss"]), JSON_VALUES)


@pytest.mark.slow
@ON_TMP_PATH
@given(
    st.sampled_from(
        ["run.json", "metrics.json", "steps.jsonl", "heartbeat.json", "config.yaml", "attempts/1/placement.json"]
    ),
    st.binary(max_size=60)
    | JSON_VALUES.map(lambda value: json.dumps(value).encode())
    | st.lists(ROWS, max_size=3).map(lambda rows: json.dumps({"epochs": rows}).encode())
    | ROWS.map(lambda row: json.dumps({"resumed_from_step": row, **row}).encode())
    | st.lists(ROWS, max_size=3).map(lambda rows: "\n".join(map(json.dumps, rows)).encode() + b"\n"),
)
def test_whatever_a_file_holds_readers_give_a_value_or_one_error(tmp_path: Path, name: str, content: bytes) -> None:
    run = RunDir(tmp_path / "a")
    if not run.path.exists():
        make_run(run.path).begin_attempt({}, {})
        run.append_step({"attempt": 1, "step": 1})
        run.write_epochs([{"attempt": 1, "step": 1, "epoch": 1}])
    file = run.path / name
    good = file.read_bytes()
    file.write_bytes(content)
    for read in (run.read, run.status, run.epochs, run.steps, run.config, run.progress):
        try:
            read()
        except RunFolderError as error:
            assert error.what and error.fix
    file.write_bytes(good)


def test_a_configuration_that_would_grow_without_bound_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)]
    run.config_file.write_text("\n".join(lines))
    with pytest.raises(RunFolderError, match=r"config\.yaml"):
        run.config()


def test_no_setting_may_name_code_in_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "a", task={"name": "har", "backbone": "nets.py:Net"})
    assert run.config().task.settings == {"backbone": "nets.py:Net"}
    monkeypatch.chdir(run.path)
    with pytest.raises(RunFolderError, match=r"config\.yaml") as caught:
        run.config()
    assert "code" in caught.value.why


def test_a_configuration_cannot_run_code(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    run.config_file.write_text(f"name: !!python/object/apply:os.mkdir ['{tmp_path / 'owned'}']")
    with pytest.raises(RunFolderError):
        run.config()
    assert not (tmp_path / "owned").exists()
