"""The check of a machine with a GPU, as a dry run on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import psutil
import pytest

import lockstep
from tests.gloo import ROOT


def check(out: Path, *arguments: str, script: str = "check.sh", minutes: str = "8") -> subprocess.CompletedProcess[str]:
    command = ["sh", str(ROOT / "scripts" / "gpu" / script), minutes, "--out", str(out), *arguments]
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_each_step_is_written_and_a_failure_does_not_end_the_check(tmp_path: Path) -> None:
    done = check(tmp_path, "--device", "gpu:7", "--quick", "--only", "devices,train_one,doctor")
    assert done.returncode == 1, done.stdout + done.stderr
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("devices", "train_one", "doctor")}
    assert {name: result["status"] for name, result in found.items()} == {
        "devices": "ok", "train_one": "failed", "doctor": "failed"
    }  # fmt: skip
    assert found["devices"]["report"]
    assert "gpu:7" in (tmp_path / "train_one.md").read_text()
    table = (tmp_path / "report.md").read_text()
    assert "| make train on gpu:7 | failed |" in table
    assert f"    {found['train_one']['command']}\n" in table
    assert found["train_one"]["command"] in done.stdout

    again = check(tmp_path, "--device", "cpu", "--quick", "--only", "devices,train_one", "--resume")
    assert again.returncode == 0, again.stdout
    assert "Detection ..." not in again.stdout
    assert "| Detection | ok |" in (tmp_path / "report.md").read_text()
    assert "samples/s" in json.loads((tmp_path / "train_one.json").read_text())["detail"]


@pytest.mark.slow
def test_a_contest_that_is_ended_has_its_rounds_so_far(tmp_path: Path) -> None:
    """Killed, as by the limit of its step, once the first round has been written."""
    file = tmp_path / "har_cnn.json"
    command = [sys.executable, "benchmarks/gpu_workloads.py", "har_cnn", "--device", "cpu", "--json", str(file)]
    command += ["--sides", "none", "--folder", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            while not file.exists() and process.poll() is None:
                time.sleep(0.1)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    report = json.loads(file.read_text())
    assert report["rounds"] >= 1
    assert report["sides"]["lockstep"]["per_s"] > 0
    assert report["machine"]
    assert "decisions" not in report, "it was not ended"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_check_that_is_ended_leaves_no_step(tmp_path: Path, number: int) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "gpu" / "check.py"), "--device", "cpu", "--quick"]
    with subprocess.Popen([*command, "--out", str(tmp_path), "--only", "devices,verify"]) as process:
        while not (tmp_path / "verify.log").exists():
            time.sleep(0.1)
        while not (steps := psutil.Process(process.pid).children(recursive=True)):
            time.sleep(0.1)
        process.send_signal(number)
    assert psutil.wait_procs(steps, timeout=60)[1] == []
    assert "| Detection | ok |" in (tmp_path / "report.md").read_text()


@pytest.mark.slow
def test_what_does_not_fit_the_time_is_named(tmp_path: Path) -> None:
    done = check(tmp_path, "--device", "cpu", "--quick", "--only", "verify,tests", minutes="0.05")
    assert done.returncode == 0
    assert (tmp_path / "report.md").read_text().count("| no time |") == 2
    assert "verify har --devices cpu,cpu" in done.stdout


@pytest.mark.parametrize("script", ["check.sh", "check_many.sh"])
def test_steps_are_listed_and_unknown_ones_refused(tmp_path: Path, script: str) -> None:
    listed = check(tmp_path, "--list", "--device", "gpu:0,gpu:1", script=script)
    assert [line.split()[0] for line in listed.stdout.splitlines()][:3] == ["ranks", "devices", "doctor"]
    refused = check(tmp_path, "--device", "cpu", "--only", "nothing", script=script)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: there is no step nothing. fix: one of ranks, devices, ")


@pytest.mark.parametrize(
    ("indices", "devices"), [((0, 1, 2), "gpu:0,gpu:1,gpu:2"), ((0,), "gpu:0,gpu:0"), ((), "gpu:0,gpu:1")]
)
def test_several_cards_are_all_that_are_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], indices: tuple[int, ...], devices: str
) -> None:
    spec = spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu" / "check.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(lockstep, "get_available_gpus", lambda: [{"index": index, "name": ""} for index in indices])
    exec(module.GPUS)
    found = capsys.readouterr().out.strip()
    monkeypatch.setattr(module, "default_devices", lambda: found)
    assert module.parse(["--many"]).device == devices


@pytest.mark.drill
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("script", ["check.sh", "check_many.sh"])
def test_all_steps(tmp_path: Path, script: str) -> None:
    done = check(tmp_path, "--device", "cpu", "--quick", script=script)
    assert done.returncode == 0, done.stdout
    assert " failed " not in (tmp_path / "report.md").read_text()


@pytest.mark.drill
@pytest.mark.timeout(900)
def test_all_workloads(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from gpu.catalogue import SPECS
    finally:
        sys.path.pop(0)
    for name in (*SPECS, "har30", "exact", "checkpoint", "forecast"):
        file = tmp_path / f"{name}.json"
        command = [
            sys.executable,
            "benchmarks/gpu_workloads.py",
            name,
            "--device",
            "cpu",
            "--quick",
            "--json",
            str(file),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert json.loads(file.read_text())["title"] in done.stdout
