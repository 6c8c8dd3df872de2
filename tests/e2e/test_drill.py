"""The drill: runs are killed at random moments, and go on with other numbers of ranks as if nothing had been.

A seed decides who is killed and when; what the victims are doing just then, the machine decides. A test's name
ends with its seed, so that one which failed can be repeated.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import lockstep
from lockstep.checkpoint.store import CheckpointStore
from lockstep.errors import RunFolderError
from lockstep.rundir.files import read_json, read_jsonl
from lockstep.rundir.folder import RunDir
from tests import s3
from tests.e2e.test_exact import fingerprint
from tests.e2e.test_train import TOY, finish, start
from tests.samples import audit_samples

EPOCHS, SAMPLES, LAST_KILL = 4, 91, 26
#: 4 × 8 steps, the last one of an epoch short; saves fall between and on the ends of epochs, where it evaluates.
FAST: dict[str, Any] = {
    "task": {"samples": SAMPLES, "batchnorm": True, "dropout": 0.3, "pause_s": 0.06},
    "training": {"epochs": EPOCHS, "global_batch_size": 12},
    "checkpoint": {"every_steps": 3},
    "telemetry": {"record_samples": True, "tensorboard": "off"},
}
EXACT = {
    **FAST,
    "task": {**FAST["task"], "pause_s": 0.006},  # a lane, and there are eight
    "training": {**FAST["training"], "reproducibility": "exact"},
}
ENDED = {"lost", "failed", "stopped"}


def long_form(first: int, last: int) -> list[Any]:
    return [pytest.param(seed, marks=pytest.mark.drill) for seed in range(first, last + 1)]


# Who is killed.


def everything(command: psutil.Process, run: Path, chance: random.Random) -> list[psutil.Process]:
    """As when the machine is lost."""
    return [command, *command.children(recursive=True)]


def a_rank(command: psutil.Process, run: Path, chance: random.Random) -> list[psutil.Process]:
    return [psutil.Process(chance.choice([*launcher(run)["pids"].values()]))]


def the_launcher(command: psutil.Process, run: Path, chance: random.Random) -> list[psutil.Process]:
    return [psutil.Process(launcher(run)["pid"])]


def the_command(command: psutil.Process, run: Path, chance: random.Random) -> list[psutil.Process]:
    """What the user started; its launcher then ends the run in good order."""
    return [command]


Choice = Callable[[psutil.Process, Path, random.Random], list[psutil.Process]]
VICTIMS: tuple[Choice, ...] = (everything, a_rank, the_launcher, the_command)


def launcher(run: Path) -> Any:
    return read_json(run / "logs" / "launcher.json")


def kill(process: subprocess.Popen[str], run: Path, choose: Choice, chance: random.Random) -> None:
    """SIGKILL; returns when everything that the run had started is gone."""
    command = psutil.Process(process.pid)
    family = everything(command, run, chance)
    for victim in choose(command, run, chance):
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    process.communicate(timeout=60)
    assert psutil.wait_procs(family, timeout=20)[1] == []


# When.


def wait_until(process: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(RunFolderError):  # a file that is not there yet
            if reached():
                return
        time.sleep(0.01)
    raise AssertionError(f"too late to kill it: {process.communicate(timeout=30)[0]}")


def has_begun(run: RunDir, attempt: int, step: int) -> bool:
    """Whether rank 0 works on ``step`` of ``attempt``, or on a later one (the heartbeat would tell it later)."""
    rows = read_jsonl(run.samples_file(0))
    return bool(rows) and rows[-1]["attempt"] == attempt and rows[-1]["step"] >= step


def kill_in_training(process: subprocess.Popen[str], run: RunDir, attempt: int, ranks: int, seed: int) -> None:
    chance = random.Random(seed * 10 + attempt)
    saved = max([0, *CheckpointStore(run.checkpoints).steps()])
    step = min(saved + chance.randint(2, 8), LAST_KILL)
    choose = chance.choice(VICTIMS) if ranks > 1 else everything
    wait_until(process, lambda: has_begun(run, attempt, step))
    time.sleep(chance.uniform(0.0, 0.15))
    kill(process, run.path, choose, chance)
    left = CheckpointStore(run.checkpoints).steps()
    print(f"seed {seed}, {ranks} ranks: {choose.__name__} killed in or after step {step}; checkpoints {left}")


def kill_while_starting(process: subprocess.Popen[str], run: RunDir, attempt: int, ranks: int, seed: int) -> None:
    chance = random.Random(seed * 10 + attempt)
    wait_until(process, lambda: run.read().attempt == attempt)
    delay_s = chance.uniform(0.0, 1.5 if ranks > 1 else 0.5)  # later, four ranks may be done
    time.sleep(delay_s)
    kill(process, run.path, everything, chance)
    print(f"seed {seed}, {ranks} ranks: killed {delay_s:.2f} s after the attempt had begun")


Kill = Callable[[subprocess.Popen[str], RunDir, int, int, int], None]


def drill(folder: Path, settings: dict[str, Any], worlds: tuple[int, ...], kill: Kill, seed: int) -> RunDir:
    """Train on the first number of ranks, kill, go on with the next, and so on; the last one may finish."""
    (folder / "drill.yaml").write_text(json.dumps(settings))  # JSON is YAML
    command: tuple[str, ...] = ("train", TOY, "--save-dir", "run", "--config", "drill.yaml")
    run = RunDir(folder / "run")
    for attempt, ranks in enumerate(worlds, 1):
        process = start(*command, "--devices", ",".join(["cpu"] * ranks), cwd=folder)
        if attempt == len(worlds):
            finish(process)
            break
        kill(process, run, attempt, ranks, seed)
        wait_until_ended(run)
        command = ("resume", "run")
    assert run.status() == "completed"
    assert run.read().attempt == len(worlds)
    found = [(epoch.epoch, epoch.used, epoch.repeated, epoch.unused) for epoch in audit_samples(run)]
    assert found == [(epoch, SAMPLES, (), ()) for epoch in range(1, EPOCHS + 1)]
    return run


def wait_until_ended(run: RunDir) -> None:
    """A run that dies before its first step counts as pending for some more seconds."""
    deadline = time.monotonic() + 20
    while run.status() not in ENDED and time.monotonic() < deadline:
        time.sleep(0.1)
    assert run.status() in ENDED


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the weights of an exact run that nobody killed."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    settings = {**EXACT, "task": {**EXACT["task"], "pause_s": 0.0}}
    lockstep.train(TOY, {**settings, "save_dir": folder})
    return fingerprint(folder)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [5, *long_form(100, 119)])
def test_no_sample_counts_twice_or_never(tmp_path: Path, seed: int) -> None:
    drill(tmp_path, FAST, (2, 1, 3), kill_in_training, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *long_form(200, 219)])
def test_exact_weights_are_those_of_a_run_that_nobody_killed(tmp_path: Path, seed: int, undisturbed: str) -> None:
    run = drill(tmp_path, EXACT, (2, 1, 4), kill_in_training, seed)
    assert fingerprint(run.path) == undisturbed


@pytest.mark.parametrize("seed", long_form(300, 309))
def test_a_kill_while_the_ranks_start_or_restore(tmp_path: Path, seed: int, undisturbed: str) -> None:
    run = drill(tmp_path, EXACT, (2, 1, 4, 2), kill_while_starting, seed)
    assert fingerprint(run.path) == undisturbed


# From the mirror alone.


def kill_and_lose(
    process: subprocess.Popen[str], folder: Path, attempt: int, storage: s3.Storage, chance: random.Random
) -> None:
    """Kill everything at a random step, while the storage refuses, cuts and delays requests; remove the run folder."""
    wait_until(process, lambda: storage.has(f"attempts/{attempt}/mirror.json") and storage.has("run.json"))
    run = RunDir(next(folder.glob("runs/*" if attempt == 2 else "run")))
    saved = max([0, *CheckpointStore(run.checkpoints).steps()])
    storage.status = chance.choice([0, 0, 503])
    storage.pause_s, storage.cuts = chance.choice([0.0, 0.05]), chance.choice([0, 2])
    step = min(saved + chance.randint(2, 10), LAST_KILL)
    wait_until(process, lambda: has_begun(run, attempt, step))
    kill(process, run.path, everything, chance)
    print(f"killed in or after step {step}; {storage.status}, {storage.cuts} cuts, {storage.pause_s} s")
    storage.status = storage.cuts = 0
    shutil.rmtree(run.path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *long_form(400, 409)])
def test_killed_runs_resume_from_their_mirror_alone(tmp_path: Path, seed: int, undisturbed: str) -> None:
    """As when a machine is lost with its disk, twice; each time another one goes on."""
    chance = random.Random(seed)
    with s3.serve() as storage:
        url, env = f"s3://{s3.BUCKET}/run", storage.environment
        (tmp_path / "drill.yaml").write_text(json.dumps({**EXACT, "storage": {"mirror": url}}))
        begin = ("train", TOY, "--save-dir", "run", "--resume", "--config", "drill.yaml", "--devices")
        resume = ("resume", url, "--runs-dir", "runs", "--devices")
        kill_and_lose(start(*begin, "cpu,cpu", cwd=tmp_path, env=env), tmp_path, 1, storage, chance)
        kill_and_lose(start(*resume, "cpu", cwd=tmp_path, env=env), tmp_path, 2, storage, chance)
        finish(start(*begin, "cpu,cpu", cwd=tmp_path, env=env), timeout_s=150.0)
    run = RunDir(tmp_path / "run")
    assert (run.status(), run.read().attempt) == ("completed", 3)
    assert b'"status": "completed"' in dict(storage.puts)["run/run.json"]
    found = [(epoch.epoch, epoch.used, epoch.repeated, epoch.unused) for epoch in audit_samples(run)]
    assert found == [(epoch, SAMPLES, (), ()) for epoch in range(1, EPOCHS + 1)]
    assert fingerprint(run.path) == undisturbed


@pytest.mark.slow
def test_a_stop_waits_for_the_mirror(tmp_path: Path) -> None:
    """For longer than ranks may take to end, while the storage is away; nobody is killed, and all is there."""
    with s3.serve() as storage:
        settings = {**FAST, "launch": {"stop_grace_s": 1.0}, "storage": {"mirror": f"s3://{s3.BUCKET}/run"}}
        (tmp_path / "drill.yaml").write_text(json.dumps(settings))
        begin = ("train", TOY, "--save-dir", "run", "--config", "drill.yaml", "--devices", "cpu,cpu")
        process, run = start(*begin, cwd=tmp_path, env=storage.environment), RunDir(tmp_path / "run")
        wait_until(process, lambda: storage.has("run.json") and has_begun(run, 1, 4))
        storage.status = 503
        process.send_signal(signal.SIGTERM)
        wait_until(process, lambda: run.read().status == "stopped")
        time.sleep(3.0)
        storage.status = 0
        finish(process, code=143)
        last = CheckpointStore(run.checkpoints).steps()[-1]
        assert storage.has(f"checkpoints/step-{last:08d}/manifest.json")
        assert b'"status": "stopped"' in dict(storage.puts)["run/run.json"]
