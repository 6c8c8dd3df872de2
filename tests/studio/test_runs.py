"""Runs that are started, stopped and resumed from the page: real commands, which outlive the studio."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.config import load, resolve
from lockstep.rundir.folder import RunDir
from tests.e2e.test_train import finish, start, wait_for_step
from tests.hardware.machines import machine
from tests.studio.serving import TOY, WAIT_S, Address, start_studio, studio


@pytest.fixture
def address(tmp_path: Path) -> Iterator[Address]:
    with studio(tmp_path, machine(0), tasks=[TOY]) as found:
        yield found


def body(devices: list[str], pause_s: float = 0.0, **more: Any) -> dict[str, Any]:
    """A run of the toy; its 200 samples take ``pause_s`` each."""
    config = {
        "hardware": {"selected_devices": devices},
        "telemetry": {"log_interval": 1},
        "data": {"num_workers": 0},
        "task": {"dataset": "plain", "pause_s": pause_s},
        **more.pop("config", {}),
    }
    return {"task": TOY, "config": config, **more}


def gone(summary: Any) -> bool:
    return not psutil.pid_exists(summary["pid"]) or psutil.Process(summary["pid"]).status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_start_stop_resume_on_one_rank_and_the_rest(address: Address, tmp_path: Path) -> None:
    asked = body(["cpu", "cpu"], 0.05, name="first try", tags=["a", "b"], id="run-00000001")
    started = address.post("/api/runs", asked, 202)
    assert started["id"] == "run-00000001"
    assert started["status"] == "pending"
    assert started["starting"]
    assert (started["name"], started["tags"]) == ("first try", ["a", "b"])
    again = address.post("/api/runs", asked, 409)
    assert again["code"] == "TRAINING_IN_PROGRESS"

    address.wait_for_step("run-00000001", 2)
    assert address.get("/api/devices")["runs"] == {"cpu": ["run-00000001"]}
    for call in (("POST", "resume", {}), ("DELETE", "", None)):
        answer = address.call(call[0], f"/api/runs/run-00000001/{call[1]}".rstrip("/"), 409, json=call[2])
        assert answer["code"] == "TRAINING_IN_PROGRESS"
    renamed = address.call("PATCH", "/api/runs/run-00000001", json={"name": "second  thoughts"})
    assert (renamed["name"], renamed["tags"]) == ("second thoughts", ["a", "b"])

    stopping = address.post("/api/runs/run-00000001/stop", None, 202)
    assert stopping == {"id": "run-00000001", "stopping": True, "kill_after_s": 60.0}
    stopped = address.wait_for("run-00000001", "stopped", "failed", "lost")
    assert stopped["status"] == "stopped", stopped
    saved = stopped["checkpoints"][-1]["step"]
    assert 2 <= saved < 26
    deadline = time.monotonic() + WAIT_S
    while address.get("/api/runs/run-00000001")["step"] != saved:  # the last beat follows the record
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert stopped["command"].startswith(f"lockstep train {TOY} --devices cpu,cpu")
    assert stopped["resumable"]
    assert address.post("/api/runs/run-00000001/stop", None, 409)["code"] == "NOT_RUNNING"

    assert address.post("/api/runs/run-00000001/resume", {"devices": ["gpu:0"]}, 422)["code"] == "GPU_NOT_AVAILABLE"
    address.post("/api/runs/run-00000001/resume", {"devices": ["cpu"]}, 202)
    done = address.wait_for("run-00000001", "completed", "failed", "lost")
    assert done["status"] == "completed", done["start_output"]
    assert done["attempt"] == 2
    assert done["devices"] == ["cpu"]
    assert done["final_metrics"]["test_accuracy"] > 0
    run = RunDir.open(tmp_path / "runs" / "run-00000001")
    started = json.loads((tmp_path / "runs/.studio/starts/run-00000001/start.json").read_text())
    assert started["arguments"] == ["resume", str(run.path), "--devices", "cpu"]
    assert "summary" in "\n".join(address.get("/api/runs/run-00000001/log?name=output.log")["lines"])
    # The labels are in the run's own record as soon as it has no other writer.
    address.get("/api/runs")
    deadline = time.monotonic() + WAIT_S
    while run.read().name != "second thoughts" and time.monotonic() < deadline:
        address.get("/api/runs")
        time.sleep(0.1)
    assert (run.read().name, run.read().tags) == ("second thoughts", ["a", "b"])

    copy = address.post("/api/runs/run-00000001/duplicate")
    assert copy["config"]["task"]["pause_s"] == asked["config"]["task"]["pause_s"]
    assert copy["config"]["telemetry"] == {"log_interval": 1}
    assert address.post("/api/preview", {"task": copy["task"], "config": copy["config"]})["command"]


@pytest.mark.drill
def test_kill_9_of_the_studio_changes_nothing_for_a_run(tmp_path: Path) -> None:
    with start_studio(tmp_path, "--task", TOY) as first:
        port = first.address.port
        first.address.post("/api/runs", body(["cpu"], 0.05, id="run-00000002"), 202)
        first.address.wait_for_step("run-00000002", 1)
        first.kill()
    with start_studio(tmp_path, "--task", TOY, port=port) as second:
        assert second.address.token == first.address.token, "an open page goes on"
        found = second.address.get("/api/runs/run-00000002")
        assert found["status"] == "running"
        done = second.address.wait_for("run-00000002", "completed", "failed", "lost")
        assert done["status"] == "completed"
        rows = RunDir.open(tmp_path / "runs" / "run-00000002").epochs()
        assert [row["epoch"] for row in rows] == [1, 2]
        assert second.end(signal.SIGINT) == 130


def test_runs_from_a_terminal_are_found_and_stopped(address: Address, tmp_path: Path) -> None:
    process = start(
        "train", TOY, "--devices", "cpu", "--save-dir", "runs/by hand", "--set", "task.pause_s=0.02", "--set",
        "task.dataset=plain", "--num-workers", "0", cwd=tmp_path,
    )  # fmt: skip
    try:
        wait_for_step(tmp_path / "runs" / "by hand", 1, process)
        found = next(run for run in address.get("/api/runs")["runs"] if run["location"] == "by hand")
        assert found["status"] == "running"
        assert found["id"] == RunDir.open(tmp_path / "runs" / "by hand").read().id
        address.post(f"/api/runs/{found['id']}/stop", None, 202)
        finish(process, code=143)
    finally:
        process.kill()
        process.communicate()
    assert address.wait_for("by hand", "stopped")["status"] == "stopped"
    log = address.get("/api/runs/by hand/log")
    assert log["names"][0] == log["name"] == "run.log"
    assert any("stopped" in line for line in log["lines"][-5:]), log["lines"]


@pytest.mark.drill
def test_a_run_that_does_not_end_is_killed_after_the_stated_time(tmp_path: Path) -> None:
    with studio(tmp_path, machine(0), tasks=[TOY], kill_after_s=1.0) as address:
        address.post("/api/runs", body(["cpu"], 0.02, id="run-00000003"), 202)
        address.wait_for_step("run-00000003", 1)
        pid = address.get("/api/runs/run-00000003")["pid"]
        os.kill(pid, signal.SIGSTOP)  # it cannot even hear the SIGTERM
        assert address.post("/api/runs/run-00000003/stop", None, 202)["kill_after_s"] == 1.0
        lost = address.wait_for("run-00000003", "lost", "stopped", "failed")
        assert lost["status"] == "lost"
        assert gone(lost)


def test_another_process_with_the_runs_number_is_never_signalled(address: Address, tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "runs" / "run-00000004", resolve(), run_id="run-00000004", command=["lockstep"])
    run.update(status="running")
    bystander = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        beat = run.progress()
        assert beat is not None
        stale = beat.model_copy(update={"pid": bystander.pid, "created": beat.created - 5000, "updated": time.time()})
        run.heartbeat_file.write_text(stale.model_dump_json())
        answer = address.post("/api/runs/run-00000004/stop", None, 409)
        assert answer["code"] in {"RUN_NOT_USABLE", "NOT_RUNNING"}
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_process_that_is_not_the_runs_is_never_signalled(address: Address, tmp_path: Path) -> None:
    """A run folder from elsewhere may name any process, with its true creation time."""
    run = RunDir.create(tmp_path / "runs" / "run-0000000e", resolve(), run_id="run-0000000e", command=["sleep", "60"])
    run.update(status="running")
    bystander = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        forged = {"pid": bystander.pid, "created": psutil.Process(bystander.pid).create_time(), "updated": time.time()}
        beat = run.progress()
        assert beat is not None
        run.heartbeat_file.write_text(beat.model_copy(update=forged).model_dump_json())
        (run.logs / "launcher.json").write_text(json.dumps({**forged, "host": beat.host}))
        assert address.get("/api/runs/run-0000000e")["status"] == "running"
        assert address.post("/api/runs/run-0000000e/stop", None, 409)["code"] == "RUN_NOT_USABLE"
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.slow
def test_a_start_that_fails_says_why(address: Address, tmp_path: Path) -> None:
    """Its settings reach the command in a file, whatever they contain."""
    given = {"data_dir": "/nowhere: # {at}"}
    config = {"hardware": {"selected_devices": ["cpu"]}, "data": given}
    name = "n=1 #: {x}\n- !!python/name:os.system"
    address.post("/api/runs", {"task": "har", "id": "run-00000005", "name": name, "config": config}, 202)
    runs = tmp_path / "runs"
    started = json.loads((runs / ".studio/starts/run-00000005/start.json").read_text())
    file = started["arguments"][-1]
    assert started["arguments"] == ["train", "har", "--save-dir", str(runs / "run-00000005"), "--config", file]
    assert load([Path(file)])["data"] == given
    failed = address.wait_for("run-00000005", "failed")
    assert "/nowhere: # {at}" in failed["error"]
    assert "fix:" in failed["error"]
    assert address.call("DELETE", "/api/runs/run-00000005") == {"deleted": "run-00000005"}
    assert address.get("/api/runs")["runs"] == []
    refused = address.post("/api/runs", body([]), 422)
    assert refused["code"] == "GPU_NOT_AVAILABLE"


def test_a_run_from_elsewhere_is_not_resumed(address: Address, tmp_path: Path) -> None:
    evil, trace = tmp_path / "evil.py", tmp_path / "it ran"
    evil.write_text(f"open({str(trace)!r}, 'w')")
    config = resolve({"task": {"name": f"{evil}:Task"}})
    run = RunDir.create(tmp_path / "runs" / "run-0000000c", config, run_id="run-0000000c", command=["lockstep"])
    run.begin_attempt({"epochs": 1}, {"devices": ["cpu"], "strategy": "single"})
    run.update(status="stopped")
    refused = address.post("/api/runs/run-0000000c/resume", {"devices": ["cpu"]}, 422)
    assert f"task.name {evil}:Task" in refused["message"]
    assert "lockstep resume" in refused["fix"]
    assert address.get("/api/runs/run-0000000c")["resume_error"] is None, "nothing was started"
    assert not trace.exists()
    assert address.post("/api/runs/run-0000000c/duplicate", None, 422)["code"] == "TASK_NOT_USABLE"


@pytest.mark.drill
def test_a_failed_run_goes_on_with_one_rank(address: Address) -> None:
    asked = body(["cpu", "cpu"], id="run-00000009")
    asked["config"]["task"] |= {"fail_at": 9}  # rank 1 raises, and one rank alone does not
    address.post("/api/runs", asked, 202)
    # Rank 0 is the first to say that it failed; the launcher then says which rank was.
    failed = address.wait_until("run-00000009", "failed for rank 1", lambda run: "rank 1 of 2" in (run["error"] or ""))
    assert failed["status"] == "failed"
    assert "the toy broke" in failed["error"]
    address.wait_until("run-00000009", "over", lambda run: "rank 1 of 2 failed" in (run["start_output"] or ""))
    address.post("/api/runs/run-00000009/resume", {"devices": ["cpu"]}, 202)
    done = address.wait_for("run-00000009", "completed", "lost")
    assert (done["attempt"], done["devices"], done["error"]) == (2, ["cpu"], None)


@pytest.mark.drill
def test_two_trained_runs_are_compared(address: Address, tmp_path: Path) -> None:
    for number, rate in ((7, "0.01"), (8, "0.02")):
        finish(start("train", TOY, "--devices", "cpu", "--save-dir", f"runs/run-0000000{number}", "--lr", rate,
                     "--fast-dev-run", cwd=tmp_path))  # fmt: skip
    compared = address.get("/api/compare?run=run-00000007&run=run-00000008")
    assert {"key": "optimizer.lr", "values": [0.01, 0.02]} in compared["config"]
    assert all(row["key"] != "training.epochs" for row in compared["config"])
