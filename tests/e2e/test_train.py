"""Training as a user does it: from the command line, in real processes."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from lockstep.checkpoint.store import CheckpointStore
from lockstep.rundir.folder import RunDir
from tests import commands
from tests.gloo import ROOT, clean_environment

#: The same global batch for any number of ranks; one rank takes it in one micro-batch, so BatchNorm sees the same.
SAME = ("--global-batch-size", "32", "--batch-size", "32", "--set", "task.batchnorm=true")
#: The toy is small enough for one all-reduce a step (engine/strategies/ddp.py); this trains it by DDP's reducer.
REDUCER = ("--set", "distributed.bucket_cap_mb=1")
TOY = f"{ROOT / 'tests' / 'toys.py'}:Toy"


def start(
    *arguments: str,
    module: tuple[str, ...] = ("lockstep",),
    cwd: Path,
    env: Mapping[str, str] | None = None,
    **how: bool,
) -> subprocess.Popen[str]:
    command = (*(("-m",) if module else ()), *module, *arguments)
    environ = clean_environment(PYTHONPATH=f"{ROOT / 'src'}:{ROOT}", **(env or {}))
    return commands.start(*command, cwd=cwd, env=environ, merged=True, **how)


def finish(process: subprocess.Popen[str], code: int = 0, timeout_s: float = 90.0) -> str:
    output, _ = process.communicate(timeout=timeout_s)
    assert process.returncode == code, output
    return output


def train(cwd: Path, *arguments: str, code: int = 0) -> str:
    return finish(start("train", TOY, "--save-dir", "run", *arguments, cwd=cwd), code)


def losses(folder: Path) -> list[dict[str, Any]]:
    return RunDir.open(folder).epochs()


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if json.loads((folder / "heartbeat.json").read_text())["step"] >= step:
                return
        except (OSError, ValueError, KeyError):
            pass
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached: {process.communicate(timeout=30)[0]}")


def weights(folder: Path) -> dict[str, Any]:
    store = CheckpointStore(folder / "checkpoints")
    return store.load(store.step_of("last") or 0).model


def assert_close(left: Path, right: Path, tolerance: float = 1e-5) -> None:
    a, b = weights(left), weights(right)
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].double() - b[name].double()).abs().max() < tolerance, name


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs in one process with a global batch of 32."""
    folder = tmp_path_factory.mktemp("reference")
    train(folder, "--devices", "cpu", *SAME)
    return folder / "run"


def test_one_device_writes_a_complete_run_folder(reference: Path) -> None:
    run = RunDir.open(reference)
    record = run.read()
    assert record.status == "completed"
    assert record.final_metrics.keys() >= {"val_loss", "val_accuracy", "test_loss", "test_accuracy"}
    assert [row["epoch"] for row in run.epochs()] == [1, 2]
    assert run.plan()["total_steps"] == 14
    for name in ("config.yaml", "heartbeat.json", "plan.json", "metrics.json", "steps.jsonl", "training_results.json"):
        assert (reference / name).is_file(), name
    assert (reference / "checkpoints" / "best" / "manifest.json").is_file()
    assert list((reference / "logs").glob("events.out.tfevents*"))


@pytest.mark.slow
def test_two_ranks_compute_what_one_computes(reference: Path, tmp_path: Path) -> None:
    output = train(tmp_path, "--devices", "cpu,cpu", *SAME)
    assert output.count("summary") == 1, "rank 0 alone speaks"
    for ours, theirs in zip(losses(tmp_path / "run"), losses(reference), strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-5)
        assert ours["val_loss"] == pytest.approx(theirs["val_loss"], rel=1e-5)
        assert ours["val_accuracy"] == theirs["val_accuracy"]
        assert ours["lr"] == theirs["lr"]
    assert_close(tmp_path / "run", reference)
    assert (tmp_path / "run" / "logs" / "rank-1.log").is_file()


@pytest.mark.parametrize(
    "module",
    [
        ("torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "lockstep"),
        pytest.param(
            ("torch.distributed.launch", "--nproc_per_node=2", "--master_port=FREE", "-m", "lockstep"),
            marks=pytest.mark.drill,
        ),
    ],
    ids=["torchrun", "torch.distributed.launch"],
)
def test_ranks_that_somebody_else_started(reference: Path, tmp_path: Path, module: tuple[str, ...]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    module = tuple(part.replace("FREE", port) for part in module)
    finish(start("train", TOY, "--save-dir", "run", *SAME, *REDUCER, module=module, cwd=tmp_path))
    assert RunDir.open(tmp_path / "run").read().status == "completed"
    assert_close(tmp_path / "run", reference)


@pytest.mark.drill
def test_a_conflicting_selection_under_torchrun_is_an_error(tmp_path: Path) -> None:
    module = ("torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "lockstep")
    process = start("train", TOY, "--devices", "cpu,cpu,cpu", module=module, cwd=tmp_path)
    output = finish(process, code=1)
    assert "fix:" in output
    assert not list(tmp_path.iterdir())


def test_stop_and_go_on_with_another_number_of_ranks(reference: Path, tmp_path: Path) -> None:
    """SIGINT in mid-epoch on two ranks, on with one: every sample of each epoch is used once."""
    common = (*SAME, "--set", "telemetry.record_samples=true")
    process = start(
        "train", TOY, "--save-dir", "run", "--devices", "cpu,cpu", "--set", "task.pause_s=0.25", *common, cwd=tmp_path
    )
    wait_for_step(tmp_path / "run", 3, process)
    process.send_signal(signal.SIGINT)
    finish(process, code=130)
    run = RunDir.open(tmp_path / "run")
    stopped_at = run.progress().step
    assert run.read().status == "stopped"
    assert 3 <= stopped_at < 14
    finish(start("resume", "run", "--devices", "cpu", cwd=tmp_path))
    assert run.read().status == "completed"
    used: dict[int, list[int]] = {1: [], 2: []}
    for file in (tmp_path / "run").glob("samples-rank*.jsonl"):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            used[row["epoch"]] += row["indices"]
    assert sorted(used[1]) == sorted(used[2]) == list(range(200))
    assert used[1] != used[2]
    assert_close(tmp_path / "run", reference)


def test_a_killed_rank_is_reported_once_and_the_run_goes_on(reference: Path, tmp_path: Path) -> None:
    kill = ("--set", "task.fail_at=10", "--set", "task.kill=true")
    output = train(tmp_path, "--devices", "cpu,cpu", *SAME, *REDUCER, *kill, code=1)
    assert "rank 1" in output
    assert "SIGKILL" in output
    assert "Traceback" not in output
    assert RunDir.open(tmp_path / "run").status() == "failed"
    for config in (tmp_path / "run").glob("**/config.yaml"):  # of the run, and of its attempt
        settings = config.read_text().replace("fail_at: 10", "fail_at: null").replace("kill: true", "kill: false")
        config.write_text(settings)
    finish(start("resume", "run", "--devices", "cpu,cpu", cwd=tmp_path))
    assert_close(tmp_path / "run", reference)


@pytest.mark.slow
def test_a_step_without_a_finite_gradient_is_skipped_by_all_ranks(tmp_path: Path) -> None:
    output = train(tmp_path, "--devices", "cpu,cpu", "--set", "task.nan_at=2", "--log-interval", "1")
    assert output.count("warning: 1 step ") == 1
    rows = RunDir.open(tmp_path / "run").steps()
    assert rows[0]["skipped_steps"] == 0
    assert rows[-1]["skipped_steps"] == 1
    assert rows[-1]["samples_seen"] == 400, "a skipped step still advances the samples"


@pytest.mark.slow
def test_own_optimizer_hooks_and_state_survive_a_resume(tmp_path: Path) -> None:
    task = TOY.replace(":Toy", ":TwoGroups")
    scaled = ("--lr-scaling", "linear", "--set", "optimizer.base_batch_size=8", "--set", "scheduler.name=constant")
    command = ("train", task, "--save-dir", "run", "--devices", "cpu", "--log-interval", "1", "--resume", *scaled)
    finish(start(*command, "--max-steps", "5", cwd=tmp_path))
    finish(start(*command, "--set", "training.max_steps=9", cwd=tmp_path))
    rows = RunDir.open(tmp_path / "run").steps()
    assert [row["step"] for row in rows] == list(range(1, 10))
    assert rows[-1]["scalars"] == {"seen": 9.0}
    plan = RunDir.open(tmp_path / "run").plan()
    rate = plan["decisions"]["lr"]
    assert (rate["value"], "the task's optimizer" in rate["reason"]) == (0.2, True)
    assert rows[-1]["lr"] == pytest.approx(0.2), "the first group's, warmed up"
    assert any("optimizer.lr " in note["text"] for note in plan["notes"])


@pytest.mark.drill
@pytest.mark.parametrize("dataset", ["plain", "augmented"])
def test_workers_change_nothing(tmp_path: Path, dataset: str) -> None:
    folders = []
    for workers in ("0", "2"):
        folder = tmp_path / workers
        folder.mkdir()
        train(folder, "--devices", "cpu", "--num-workers", workers, "--epochs", "1", "--set", f"task.dataset={dataset}")
        folders.append(folder / "run")
    assert_close(*folders, tolerance=1e-12)


@pytest.mark.slow
def test_init_from_starts_anew_with_the_weights_of_another_run(reference: Path, tmp_path: Path) -> None:
    train(
        tmp_path, "--devices", "cpu", "--init-from", str(reference), "--set", "task.batchnorm=true", "--fast-dev-run",
        "--lr", "1e-12",
    )  # fmt: skip
    best = load_file(reference / "checkpoints" / "best" / "model.safetensors")
    ours = weights(tmp_path / "run")
    assert (ours["0.weight"] - best["0.weight"]).abs().max() < 1e-6


@pytest.mark.slow
def test_a_time_limit_and_early_stopping_end_a_run_in_order(tmp_path: Path) -> None:
    train(
        tmp_path, "--devices", "cpu", "--set", "training.max_time_s=0.5", "--set", "task.pause_s=0.1", "--epochs", "50"
    )
    assert RunDir.open(tmp_path / "run").read().status == "stopped"
    train(tmp_path / "..", "--devices", "cpu", "--early-stopping-patience", "1", "--lr", "1e-9", "--epochs", "30")
    record = RunDir.open(tmp_path / ".." / "run").read()
    assert record.status == "completed"
    assert len(losses(tmp_path / ".." / "run")) < 10


@pytest.mark.slow
def test_a_resume_keeps_the_runs_own_settings_and_an_early_stop_stays(tmp_path: Path) -> None:
    train(tmp_path, "--devices", "cpu", "--set", "task.dropout=0.5", "--max-steps", "5")
    train(tmp_path, "--resume", "--set", "training.max_steps=8", "--early-stopping-patience", "1", "--lr", "1e-9")
    run = RunDir.open(tmp_path / "run")
    assert run.config().task.settings["dropout"] == 0.5
    assert run.progress().step == 8
    output = train(tmp_path, "--resume", "--set", "task.dropout=0.1", code=2)
    assert re.search(r"^error: .*\btask\b", output, re.MULTILINE)


@pytest.mark.slow
def test_a_rescaled_run_ends_where_its_epochs_end(tmp_path: Path) -> None:
    train(tmp_path, "--devices", "cpu", "--batch-size", "32", "--max-steps", "5")
    change = ("--set", "training.max_steps=9", "--set", "training.batch_size=8")
    finish(start("resume", "run", "--rescale-batch", *change, cwd=tmp_path))
    finish(start("resume", "run", "--set", "training.max_steps=null", cwd=tmp_path))
    run = RunDir.open(tmp_path / "run")
    assert run.read().status == "completed"
    rows = {row["step"]: row["samples_seen"] for row in run.steps()}
    assert max(rows.values()) == 400
