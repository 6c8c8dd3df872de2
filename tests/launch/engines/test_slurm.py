"""Training by SLURM: the script, and real jobs on a real controller with two nodes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.cli.main import main
from lockstep.config.load import merge, parse_set
from lockstep.errors import UsageError
from lockstep.launch.engines.jobs import training_command
from lockstep.launch.engines.slurm import Slurm
from lockstep.launch.engines.spec import Job, NodeRange
from lockstep.rundir.folder import RunDir
from tests.conftest import cli_environment
from tests.gloo import ROOT
from tests.launch.slurm_cluster import SBIN, cluster

TOY = f"{ROOT / 'tests' / 'toys.py'}:Toy"
#: One rank on each of two nodes; a loader worker each, which SLURM's signals reach as well.
JOB = ("--on", "slurm", "--nodes", "2", "--devices", "cpu", "--num-workers", "1", "--set", "task.dataset=plain")
WAIT_S = 110


# --- the script ------------------------------------------------------------------------------------


def test_the_script_says_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"partition": "gpu", "time": "4:00:00", "account": "me", "qos": "high"}
    job = Job(
        command=("-m", "lockstep", "train", "har"),
        run_folder=tmp_path / "my run",
        nodes=NodeRange(2, 2),
        ranks_per_node=4,
        gpus_per_node="a100:4",
        options={**options, "sbatch_option": ["cpus-per-task=8", "exclusive"]},
    )
    script = Slurm().manifest(job)
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert lines[1:] == [
        *("nodes=2", "ntasks-per-node=4", "partition=gpu", "time=4:00:00", "gpus-per-node=a100:4", "account=me"),
        *("qos=high", f"chdir={tmp_path}", f"output='{tmp_path}/my run/logs/slurm.log'", "open-mode=append", "requeue"),
        *("signal=B:USR1@120", "cpus-per-task=8", "exclusive"),
    ]
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""
    assert "scontrol requeue" in script


@pytest.mark.parametrize(
    "bad",
    [
        {"partition": "a\n#SBATCH --wrap=x"},
        {"time": "1 hour"},
        {"account": "$(touch x)"},
        {"sbatch_option": ("--exclusive",)},
        {"sbatch_option": ("wrap=a b",)},
    ],
)
def test_values_that_sbatch_has_no_meaning_for_are_refused(bad: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        Slurm().manifest(Job(command=("-m", "lockstep"), run_folder=tmp_path, nodes=NodeRange(1, 1), options=bad))
    assert caught.value.fix


VALUES = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=20)
KEYS = st.sampled_from(["a", "b", "c"])
SETTINGS = st.dictionaries(
    KEYS, st.dictionaries(KEYS, VALUES | TEXTS | st.lists(VALUES | TEXTS, max_size=3), min_size=1), min_size=1
)


@given(SETTINGS)
@example({"a": {"a": [1e-05]}})  # text in YAML 1.1
def test_any_settings_come_through_the_shell_as_they_were(settings: dict[str, Any]) -> None:
    job = Job(command=training_command("har", settings), run_folder=Path("/runs/one"), nodes=NodeRange(1, 1))
    command = shlex.split(shlex.join(["python", *job.arguments()]))
    assert command[:5] == ["python", "-m", "lockstep", "train", "har"]
    assert command[-3:] == ["--save-dir", "/runs/one", "--resume"]
    found: dict[str, Any] = {}
    for flag, pair in zip(command[5:-3:2], command[6:-3:2], strict=True):
        assert flag == "--set"
        found = merge(found, parse_set(pair))
    assert found == settings


Printed = pytest.CaptureFixture[str]


def test_print_shows_a_script_that_holds_the_settings_and_makes_nothing(
    capsys: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more.yaml").write_text("optimizer: {lr: 0.005}\n")
    assert main(["train", TOY, *JOB, "--config", "more.yaml", "--partition", "main", "--print"]) == 0
    script = capsys.readouterr().out
    assert "--set optimizer.lr=0.005" in script
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --partition=main\n" in script
    assert [path.name for path in tmp_path.iterdir()] == ["more.yaml"]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--on", "slurm"), "sbatch"),
        (("--partition", "main"), "--partition is for a cluster"),
        (("--on", "slurm", "--nodes", "1:2"), "--nodes 1:2"),
        (("--on", "slurm", "--gpus-per-node", "many"), "--gpus-per-node 'many'"),
    ],
)
def test_without_slurm_and_with_flags_that_need_it(
    arguments: tuple[str, ...], what: str, capsys: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["train", TOY, *arguments]) == 2
    error = capsys.readouterr().err
    assert what in error
    assert "fix:" in error
    assert not list(tmp_path.iterdir())


# --- jobs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    with cluster() as environ:
        yield environ


def command(cwd: Path, slurm: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep", *arguments],
        cwd=cwd,
        env=cli_environment(**slurm),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def lockstep(
    slurm: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> Callable[..., tuple[int, str, str]]:
    """A command in this process: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(arguments)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


Run = Callable[..., tuple[int, str, str]]


def ask(slurm: dict[str, str], *arguments: str) -> str:
    result = subprocess.run(
        arguments, env={"PATH": SBIN, **slurm}, capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    return result.stdout.strip()


def job_id(run: Path) -> str:
    return str(json.loads((run / "job.json").read_text())["id"])


def wait_for_step(run: Path, step: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while (beat := RunDir(run).progress()) is None or beat.step < step:
        assert time.monotonic() < deadline, (run / "logs" / "slurm.log").read_text()
        time.sleep(0.1)


def wait_for_state(slurm: dict[str, str], job: str, state: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while (found := ask(slurm, "squeue", "--noheader", "--jobs", job, "--states=all", "--format=%T")) != state:
        assert time.monotonic() < deadline, f"job {job} is {found}, not {state}"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def reference(slurm: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of two nodes, and what following it printed."""
    folder = tmp_path_factory.mktemp("reference")
    process = command(folder, slurm, "train", TOY, *JOB, "--partition", "main", "--save-dir", "run")
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, output
    return folder / "run", output


@pytest.mark.slow
def test_a_job_on_two_nodes(reference: tuple[Path, str], lockstep: Run) -> None:
    run, output = reference
    record = RunDir.open(run).read()
    assert record.status == "completed"
    assert RunDir.open(run).plan()["placement"]["world_size"] == 2
    assert re.search(rf"slurm .*\b{job_id(run)} .*{run}", output)
    assert "epoch 2/2" in output, "the log was followed"
    assert (run / "job.sbatch").read_text().startswith("#!/bin/bash\n")
    assert f"{job_id(run)}, COMPLETED" in lockstep("show", str(run))[1]


@pytest.mark.slow
def test_a_preempted_job_saves_queues_again_and_ends_as_if_nothing_had_been(
    reference: tuple[Path, str], slurm: dict[str, str], tmp_path: Path
) -> None:
    process = command(tmp_path, slurm, "train", TOY, *JOB, "--save-dir", "run", "--set", "task.pause_s=0.02")
    run = tmp_path / "run"
    try:
        wait_for_step(run, 3)
        job = job_id(run)
        ask(slurm, "scancel", "--signal=USR1", "--batch", job)  # as SLURM does before the time limit
        wait_for_state(slurm, job, "PENDING")
        assert RunDir.open(run).read().status == "stopped"
        saved = RunDir.open(run).progress()
        assert saved is not None and 3 <= saved.step < 14
        # Two minutes otherwise. A start within the second of the requeue is refused: "Job credential revoked".
        ask(slurm, "scontrol", "update", f"JobId={job}", "StartTime=now+3")
        output, _ = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert re.search(rf"attempt 2 .*\b{saved.step}\b", output)
    ours, theirs = RunDir.open(run), RunDir.open(reference[0])
    assert ours.read().status == "completed"
    assert [row["val_loss"] for row in ours.epochs()] == pytest.approx([row["val_loss"] for row in theirs.epochs()])
    assert ours.epochs()[-1]["train_loss"] == pytest.approx(theirs.epochs()[-1]["train_loss"])


@pytest.mark.drill
def test_ctrl_c_ends_the_following_and_stop_ends_the_job(slurm: dict[str, str], tmp_path: Path, lockstep: Run) -> None:
    process = command(tmp_path, slurm, "train", TOY, *JOB, "--save-dir", "run", "--set", "task.pause_s=0.1")
    run = tmp_path / "run"
    wait_for_step(run, 1)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, output
    assert f"job {job_id(run)} continues" in output
    assert ask(slurm, "squeue", "--noheader", "--jobs", job_id(run), "--format=%T") == "RUNNING"
    assert lockstep("stop", "run", "--timeout", str(WAIT_S))[:2] == (0, f"{RunDir(run).read().id}: stopped\n")
    assert RunDir.open(run).read().status == "stopped"
    assert (run / "checkpoints" / "last" / "manifest.json").is_file()


@pytest.mark.drill
def test_a_waiting_job_leaves_the_queue_when_it_is_stopped(
    slurm: dict[str, str], tmp_path: Path, lockstep: Run
) -> None:
    later = ("--sbatch-option", "begin=now+1hour")
    process = command(tmp_path, slurm, "train", TOY, *JOB, *later, "--save-dir", "run")
    try:
        deadline = time.monotonic() + WAIT_S
        while not (tmp_path / "run" / "job.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert "pending" in lockstep("show", "run")[1]
        assert lockstep("stop", "run")[1].endswith("stopped\n")
        process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
    assert process.returncode == 143


@pytest.mark.slow
def test_stop_leaves_a_job_of_another_folder_alone(slurm: dict[str, str], tmp_path: Path, lockstep: Run) -> None:
    later = ("--sbatch-option", "begin=now+1hour")
    process = command(tmp_path, slurm, "train", TOY, *JOB, *later, "--save-dir", "my run")
    run, forged = tmp_path / "my run", tmp_path / "forged"
    try:
        deadline = time.monotonic() + WAIT_S
        while not (run / "job.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        shutil.copytree(run, forged)
        code, _, error = lockstep("stop", str(forged))
        assert (code, f" {job_id(run)}" in error) == (2, True), error
        assert ask(slurm, "squeue", "--noheader", "--jobs", job_id(run), "--format=%T") == "PENDING"
        assert lockstep("stop", str(run))[0] == 0
        process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
    assert process.returncode == 143


def test_a_wrong_partition_is_one_clear_error(tmp_path: Path, lockstep: Run) -> None:
    code, _, error = lockstep("train", TOY, *JOB, "--partition", "nowhere", "--save-dir", "run")
    assert code == 2
    assert error.count("error:") == 1
    assert "nowhere" in error
    assert not list(tmp_path.iterdir())


@pytest.mark.drill
def test_one_node_with_one_rank_and_with_two(slurm: dict[str, str], tmp_path: Path) -> None:
    for devices, ranks in (("cpu", 1), ("cpu,cpu", 2)):
        process = command(
            tmp_path, slurm, "train", TOY, "--on", "slurm", "--devices", devices, "--save-dir", str(ranks)
        )
        output, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, output
        assert RunDir.open(tmp_path / str(ranks)).plan()["placement"]["world_size"] == ranks
