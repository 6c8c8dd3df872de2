"""The labels of the hardware section, from the same plan as `lockstep plan`."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lockstep.cli.main import main
from lockstep.config import resolve
from lockstep.errors import LockstepError
from lockstep.rundir.folder import RunDir
from lockstep.studio.planner import Planner
from lockstep.tasks import BUILT_IN
from tests.gloo import ROOT
from tests.hardware.machines import gpu, machine
from tests.studio import serving
from tests.studio.serving import TOY, WAIT_S, Address, studio

OWN = ROOT / "tests" / "lightning" / "own.py"
MODULE, DATA = f"{OWN}:Classifier", f"{OWN}:Numbered"


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    folder, devices = tmp_path_factory.mktemp("plan"), [*machine(2), gpu(2, precisions=("32",))]
    with studio(folder, devices, tasks=[TOY, f"{MODULE}+{DATA}"]) as address:
        plan(address, ["cpu"])  # starts the helper process, which stays
        yield address


def plan(address: Address, devices: list[str], **settings: Any) -> Any:
    config = {"hardware": {"selected_devices": devices, **settings.pop("hardware", {})}, **settings}
    return address.post("/api/plan", {"task": TOY, "config": config})


@pytest.mark.slow
def test_two_gpus(two_gpus: Address) -> None:
    answer = plan(two_gpus, ["gpu:0", "gpu:1"], training={"batch_size": 32})
    labels = answer["labels"]
    assert labels["effective_batch"] == "Effective batch size: 64 (32 × 2 GPUs)"
    assert labels["effective_batch_shown"]
    assert labels["multi_gpu"] == "Multi-GPU (DDP) will be used automatically."
    assert labels["cpu_ignored"] is None
    assert answer["run"] == {"enabled": True, "reason": None}
    assert any(note["key"] == "lr_not_scaled" for note in answer["notes"])
    assert "0.01" in labels["learning_rate"]


def test_accumulation_is_a_third_factor(two_gpus: Address) -> None:
    answer = plan(two_gpus, ["gpu:0", "gpu:1"], training={"batch_size": 8, "accumulate": 3})
    assert answer["labels"]["effective_batch"] == "Effective batch size: 48 (8 × 2 GPUs × 3 micro-batches)"


def test_one_gpu_and_one_beside_the_cpu(two_gpus: Address) -> None:
    alone = plan(two_gpus, ["gpu:0"])["labels"]
    assert not alone["effective_batch_shown"]
    assert alone["multi_gpu"] is None
    beside = plan(two_gpus, ["cpu", "gpu:1"])
    assert "CPU is ignored" in beside["labels"]["cpu_ignored"]
    assert beside["plan"]["placement"]["devices"] == ["gpu:1"]


def test_the_cpu_and_a_rehearsal(two_gpus: Address) -> None:
    assert plan(two_gpus, ["cpu"])["labels"]["multi_gpu"] is None
    three = plan(two_gpus, ["cpu"] * 3, training={"batch_size": 16}, data={"num_workers": 2})["labels"]
    assert three["effective_batch"] == "Effective batch size: 48 (16 × 3 CPU ranks)"
    assert three["workers"] == "Loader workers: 2 per rank, 6 in all"


def test_nothing_ticked_says_why_run_is_off(two_gpus: Address) -> None:
    answer = plan(two_gpus, [])
    assert answer["run"] == {"enabled": False, "reason": "no device is selected"}
    assert answer["plan"] is None
    assert answer["problem"]["code"] == "GPU_NOT_AVAILABLE"


def test_an_absent_gpu_is_named_with_what_is_here(two_gpus: Address) -> None:
    answer = plan(two_gpus, ["gpu:7"])
    assert not answer["run"]["enabled"]
    assert "gpu:7" in answer["run"]["reason"]
    assert "gpu:1" in answer["problem"]["fix"]
    assert answer["problem"]["settings"] == {"hardware.selected_devices": answer["run"]["reason"]}


def test_precisions_that_a_device_lacks_are_off_with_the_reason(two_gpus: Address) -> None:
    answer = plan(two_gpus, ["gpu:0", "gpu:2"])
    found = {row["value"]: row for row in answer["precisions"]}
    assert found["32"] == {"value": "32", "supported": True, "reason": None}
    for name in ("16-mixed", "bf16-mixed"):
        assert not found[name]["supported"]
        assert "gpu:2" in found[name]["reason"]
    refused = plan(two_gpus, ["gpu:2"], hardware={"precision": "bf16-mixed"})
    assert not refused["run"]["enabled"]
    assert refused["problem"]["settings"] == {"hardware.precision": refused["run"]["reason"]}
    assert all(row["supported"] for row in plan(two_gpus, ["gpu:0", "gpu:1"])["precisions"])


@pytest.mark.slow
def test_a_module_has_the_data_module_that_was_named_at_the_start(two_gpus: Address) -> None:
    hardware = {"hardware": {"selected_devices": ["cpu"]}}
    answer = two_gpus.post("/api/plan", {"task": MODULE, "config": hardware})
    assert answer["run"]["enabled"], answer["problem"]
    assert f"task.datamodule={DATA}" in answer["preview"]["argv"]
    saved = two_gpus.call("PUT", "/api/configs/module", json={"task": MODULE, "config": hardware})
    assert two_gpus.post("/api/preview", {"task": MODULE, "config": saved["config"]})["yaml"] == saved["yaml"]
    other = {"task": {"datamodule": f"{OWN}:Other"}}
    assert two_gpus.post("/api/plan", {"task": MODULE, "config": other}, 422)["code"] == "SETTING_NOT_ALLOWED"
    own = {"task": {"datamodule": DATA}}
    assert two_gpus.post("/api/plan", {"task": TOY, "config": own}, 422)["code"] == "SETTING_NOT_ALLOWED"
    two_gpus.call("DELETE", "/api/configs/module")


def test_two_runs_on_one_gpu_are_warned_about(two_gpus: Address) -> None:
    folder = Path(two_gpus.get("/api/studio")["runs_dir"]) / "busy"
    run = RunDir.create(folder, resolve(), run_id="run-00000006", command=["lockstep"])
    run.begin_attempt({"epochs": 2}, {"devices": ["gpu:0"], "strategy": "single"})
    run.update(status="running")
    answer = plan(two_gpus, ["gpu:0"])
    assert answer["run"]["enabled"]
    assert len(answer["warnings"]) == 1
    assert "gpu:0 is used by run-00000006" in answer["warnings"][0]
    assert plan(two_gpus, ["gpu:1"])["warnings"] == []
    shutil.rmtree(folder)


def test_a_copy_of_a_run_is_that_run(two_gpus: Address) -> None:
    """Also where it had a general default that its task has not, and a number that a browser would round."""
    runs, seed = Path(two_gpus.get("/api/studio")["runs_dir"]), 2**60 + 1
    source = RunDir.create(runs / "source", resolve(), run_id="run-00000007", command=["lockstep"])
    source.update(status="completed")
    had = {
        "name": "first",
        "init_from": str(runs / "source"),
        "task": {"name": TOY},
        "hardware": {"selected_devices": ["cpu"]},
        "training": {"epochs": 20, "batch_size": 16, "seed": seed},
        "optimizer": {"lr": 1e-3},
        "launch": {"nodes": "1:2", "rdzv": "elsewhere"},
    }
    RunDir.create(runs / "copied", resolve(had), run_id="run-00000008", command=["lockstep"])
    copy = two_gpus.post("/api/runs/copied/duplicate")
    assert (copy.pop("name"), copy.pop("left_out")) == ("first copy", ["launch.nodes", "launch.rdzv"])
    assert copy["config"] == {
        "init_from": "source",
        "hardware": {"selected_devices": ["cpu"]},
        "training": {"epochs": 20, "seed": str(seed)},
        "optimizer": {"lr": 1e-3},
    }
    answer = two_gpus.post("/api/plan", {**copy, "name": "a new name"})
    assert answer["plan"]["epochs"] == 20
    assert "0.001" in answer["labels"]["learning_rate"]
    said = {("--seed", str(seed)), ("--init-from", str(runs / "source")), ("--set", "name=a new name")}
    assert said <= set(itertools.pairwise(answer["preview"]["argv"]))

    # The numbers in the YAML that the page shows are numbers.
    assert f"seed: {seed}\n" in answer["preview"]["yaml"]
    saved = two_gpus.call("PUT", "/api/configs/copied", json=copy)
    assert (saved["config"], saved["yaml"]) == (copy["config"], two_gpus.post("/api/preview", copy)["yaml"])
    two_gpus.call("DELETE", "/api/configs/copied")
    two_gpus.call("DELETE", "/api/runs/source")
    assert two_gpus.post("/api/preview", copy, 422)["code"] == "SETTING_NOT_ALLOWED"
    assert two_gpus.post("/api/runs/copied/duplicate")["left_out"][-1] == f"init_from={runs / 'source'}"
    shutil.rmtree(runs / "copied")


def test_bad_settings_are_an_answer_and_forbidden_ones_a_refusal(two_gpus: Address) -> None:
    wrong = plan(two_gpus, ["cpu"], training={"epoch": 3})
    assert wrong["problem"]["code"] == "INVALID_CONFIG"
    assert "training.epochs" in wrong["problem"]["fix"]
    assert wrong["problem"]["settings"] == {}
    wrong = plan(two_gpus, ["cpu"], task={"samples": "many"})
    assert wrong["problem"]["code"] == "INVALID_CONFIG"
    assert wrong["problem"]["settings"].keys() == {"task.samples"}
    assert wrong["problem"]["message"] == f"task.samples: {wrong['problem']['settings']['task.samples']}"
    wrong = plan(two_gpus, ["cpu"], training={"epochs": 0, "batch_size": 0})
    at_least_one = "input should be greater than or equal to 1 (given: 0)"
    assert wrong["problem"]["settings"] == dict.fromkeys(("training.epochs", "training.batch_size"), at_least_one)
    wrong = plan(two_gpus, ["cpu"] * 99)
    assert wrong["problem"]["settings"] == {"hardware.selected_devices": "99 ranks on the CPU are too many"}
    for config in ({"save_dir": "elsewhere"}, {"storage": {"mirror": "s3://x"}}, {"task": {"name": "os:system"}}):
        refused = two_gpus.post("/api/plan", {"task": TOY, "config": config}, 422)
        assert refused["code"] == "SETTING_NOT_ALLOWED"
    for task in ("os:system", "../evil.py:Task", "har; rm -rf /", ""):
        assert two_gpus.post("/api/plan", {"task": task}, 422)["code"] == "TASK_NOT_USABLE"


def test_the_preview_is_a_command_that_plans_the_same(
    two_gpus: Address, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def planned_by(*words: str) -> Any:
        assert main(["plan", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    config = {
        "hardware": {"selected_devices": ["cpu", "cpu"]},
        "training": {"batch_size": 24, "max_grad_norm": None},
        "optimizer": {"betas": [0.8, 0.99], "lr": 2e-5},
        "task": {"dataset": "plain", "dropout": 0.25, "batchnorm": True},
        "name": "it's 5; $(touch x) & 1e3",
    }
    answer = two_gpus.post("/api/plan", {"task": TOY, "config": config})
    words = answer["preview"]["argv"]
    assert words[:3] == ["lockstep", "train", TOY]
    planned = planned_by(*words[2:])
    # The command detects this machine's devices, so the reasons differ; what would run does not.
    for key in ("batch", "schedule", "total_steps", "task", "effective_batch", "loader"):
        assert planned[key] == answer["plan"][key], key
    (tmp_path / "form.yaml").write_text(answer["preview"]["yaml"])
    assert planned_by("--config", str(tmp_path / "form.yaml")) == planned


def test_long_answers_are_compressed(two_gpus: Address) -> None:
    headers = {"Authorization": f"Bearer {two_gpus.token}", "Accept-Encoding": "gzip"}
    answer = httpx.get(f"{two_gpus.base}/api/schema", headers=headers, trust_env=False)
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.json()["data"] == two_gpus.get("/api/schema")


def test_tasks_and_schema(two_gpus: Address) -> None:
    tasks = {task["name"]: task for task in two_gpus.get("/api/tasks")["tasks"]}
    assert set(BUILT_IN) < set(tasks)
    assert tasks[TOY]["schema"]["properties"]["dropout"]["default"] == 0.0
    assert tasks[TOY]["defaults"]["training"]["epochs"] == 2
    schema = two_gpus.get("/api/schema")
    assert schema["defaults"]["training"]["batch_size"] == 32
    assert "description" in schema["schema"]["$defs"]["TrainingConfig"]["properties"]["epochs"]


@pytest.mark.slow
def test_a_task_file_of_the_folder_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    (here / "runs" / "run-1").mkdir(parents=True)
    derived = 'class Documented(Toy):\n    """A toy."""\n\n\nclass Plain(Documented):\n    pass\n'
    source = (ROOT / "tests" / "toys.py").read_text() + "\n\n" + derived
    for file in (here / "mine.py", here / "runs" / "run-1" / "evil.py", tmp_path / "outside.py"):
        file.write_text(source)
    (here / "link.py").symlink_to(tmp_path / "outside.py")
    (here / "copied").mkdir()
    (here / "copied" / "run.json").write_text("{}")
    (here / "copied" / "evil.py").write_text(source)
    (here / "none.py").write_text("class Helper: pass\n")
    monkeypatch.chdir(here)
    with studio(here, machine(1)) as address:
        assert "mine.py:Toy" in address.get("/api/tasks/files")["files"]
        assert not [path for path in address.get("/api/tasks/files")["files"] if "mine.py" not in path]
        for path in (
            "../outside.py",
            "link.py",
            "runs/run-1/evil.py:Toy",
            "copied/evil.py",
            "none.py",
            "/etc/passwd",
            "x" * 400,
        ):
            assert address.post("/api/tasks", {"path": path}, 422)["code"] == "TASK_NOT_USABLE"
        answer = address.post("/api/tasks", {"path": "mine.py:Toy"})
        name = f"{here / 'mine.py'}:Toy"
        assert answer["added"] == name
        [task] = [task for task in address.get("/api/tasks")["tasks"] if task["name"] == name]
        assert task["error"] is None
        for derived in ("Documented", "Plain"):
            address.post("/api/tasks", {"path": f"mine.py:{derived}"})
        documented, plain = address.get("/api/tasks")["tasks"][-2:]
        assert documented["title"] == "A toy"
        assert plain["title"] == plain["name"], "the docstring of its base is not its own"
        plan = address.post("/api/plan", {"task": name, "config": {"hardware": {"selected_devices": ["gpu:0"]}}})
        assert plan["run"]["enabled"], plan


def test_default_devices(tmp_path: Path, two_gpus: Address) -> None:
    assert two_gpus.get("/api/devices")["default"] == ["gpu:0"]
    with serving.studio(tmp_path, machine(0)) as none:
        found = none.get("/api/devices")
        assert found["default"] == ["cpu"]
        assert [device["id"] for device in found["devices"]] == ["cpu"]


def test_saved_configurations(two_gpus: Address) -> None:
    body = {"task": TOY, "config": {"training": {"epochs": 3}}}
    saved = two_gpus.call("PUT", "/api/configs/two ranks", json=body)
    assert saved["config"] == {"training": {"epochs": 3}}
    assert [kept["name"] for kept in two_gpus.get("/api/configs")["configs"]] == ["two ranks"]
    two_gpus.call("DELETE", "/api/configs/two ranks")
    assert two_gpus.call("GET", "/api/configs/two ranks", 404)["code"] == "CONFIG_NOT_FOUND"


@pytest.mark.slow
def test_the_planner_is_closed_in_the_middle_of_an_answer(tmp_path: Path) -> None:
    """And nobody who waits for his turn starts another helper."""
    file, trace = tmp_path / "endless.py", tmp_path / "begun"
    file.write_text(f"import pathlib, time\npathlib.Path({str(trace)!r}).touch()\ntime.sleep(3600)\n")
    planner, refused = Planner(timeout_s=3600), []

    def ask() -> None:
        try:
            planner.tasks([f"{file}:Task"])
        except LockstepError as error:
            refused.append(error.code)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + WAIT_S
    while not trace.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    planner.close()
    for thread in threads:
        thread.join()
    assert refused == ["PLANNER_FAILED"] * 3
