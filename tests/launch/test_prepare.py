"""What is settled before anything starts: where a run goes on, and what is refused."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from lockstep.cli.main import main
from lockstep.engine.resume import resume_point
from lockstep.errors import ConfigError, RunFolderError
from lockstep.hardware.world import World
from lockstep.launch.meeting.membership import meeting
from lockstep.launch.meeting.preparation import TrainRequest, prepare_together
from lockstep.launch.prepare import RunInputs, prepare, settle
from lockstep.launch.run_claim import changed_config, claimed, create_folder
from lockstep.rundir.claim import claim
from lockstep.rundir.folder import RunDir
from tests.gloo import ROOT, clean_environment
from tests.toys import Toy

ON_TWO = {"hardware": {"selected_devices": ["cpu", "cpu"]}, "training": {"batch_size": 16}}


def stopped_at_once(folder: Path, **settings: Any) -> tuple[RunDir, RunInputs]:
    """A run whose first attempt ended before a checkpoint, and what that attempt had prepared."""
    prepared = prepare(Toy, {**ON_TWO, "save_dir": str(folder), **settings})
    run = create_folder(prepared.config)
    run.begin_attempt(prepared.plan.as_dict(), prepared.placement.as_dict())
    run.update(status="stopped")
    return run, prepared


@pytest.mark.parametrize(("hold", "expected"), [(True, 32), (False, 16)])
def test_a_run_without_a_checkpoint_holds_its_global_batch_on_other_devices(
    tmp_path: Path, hold: bool, expected: int
) -> None:
    run, first = stopped_at_once(tmp_path / "run")
    on_one = changed_config(run, {"hardware": {"selected_devices": ["cpu"]}})
    plan = prepare(Toy, on_one.model_dump(mode="json"), resume=resume_point(run, hold=hold, report=pytest.fail)).plan
    assert first.plan.batch.global_batch == 32 and plan.batch.global_batch == expected
    assert plan.order == first.plan.order
    assert plan.total_steps == 2 * -(-200 // expected)


def test_an_edited_config_is_named_at_resume_and_accepted_only_where_it_is_asked_for(tmp_path: Path) -> None:
    run, _ = stopped_at_once(tmp_path / "run")
    written = run.config_file.read_text()
    run.config_file.write_text(written.replace("lr: 0.01", "lr: 0.02").replace("seed: 42", "seed: 43"))
    with pytest.raises(RunFolderError, match=r"training\.seed 42 → 43, optimizer\.lr 0\.01 → 0\.02") as caught:
        changed_config(run, {})
    assert "--set optimizer.lr=0.02" in caught.value.fix and "--set training.seed" not in caught.value.fix
    run.config_file.write_text(written.replace("lr: 0.01", "lr: 0.02"))
    assert changed_config(run, {"optimizer": {"lr": 0.02}}).optimizer.lr == 0.02


def test_a_resume_takes_a_moved_task_and_refuses_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = stopped_at_once(tmp_path / "run")
    moved = tmp_path / "moved.py"
    moved.write_text("import tests.toys\n\nclass Toy(tests.toys.Toy):\n    pass\n\nclass Other(Toy):\n    pass\n")
    resume = ["resume", str(run.path), "--devices", "cpu", "--set", "training.max_steps=1", "--set"]
    assert main([*resume, f"task.name={moved}:Other"]) == 2
    assert "task.name" in capsys.readouterr().err
    assert main([*resume, f"task.name={moved}:Toy"]) == 0
    assert (run.config().task.name, run.status()) == (f"{moved}:Toy", "completed")


def test_paths_of_a_task_are_found_from_other_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = {"task": {"data": "corpus.txt"}, "data": {"data_dir": "data"}, "save_dir": "run"}
    config = settle("text", asked)[1]
    assert config.task.settings["data"] == str(tmp_path / "corpus.txt")
    assert config.data.data_dir == tmp_path / "data"
    run = create_folder(config)
    assert changed_config(run, asked).task == config.task
    monkeypatch.chdir(run.path)
    with pytest.raises(ConfigError, match=r"\btask\b"):
        changed_config(run, asked)


def test_a_run_without_a_checkpoint_begins_where_it_began(tmp_path: Path) -> None:
    run, first = stopped_at_once(tmp_path / "run", debug={"start_position": 64})
    point = resume_point(run, hold=True, report=pytest.fail)
    assert point is not None and (point.step, point.epoch, point.position) == (0, 0, 64)
    assert prepare(Toy, run.config().model_dump(mode="json"), resume=point).plan.total_steps == first.plan.total_steps


def test_a_run_without_a_plan_holds_nothing(tmp_path: Path) -> None:
    run = create_folder(settle(Toy, {**ON_TWO, "save_dir": str(tmp_path / "run")})[1])
    assert resume_point(run, hold=True, report=pytest.fail) is None
    run.plan_file.write_text("{}")
    with pytest.raises(RunFolderError, match=r"^\S*plan\.json"):
        resume_point(run, hold=True, report=pytest.fail)


@pytest.mark.parametrize(
    ("telemetry", "words"),
    [
        ({"wandb": True}, "wandb"),
        ({"mlflow": True}, "mlflow"),
        ({"tensorboard": "on"}, "tensorboard"),
    ],
)
def test_telemetry_that_cannot_be_is_refused_before_there_is_a_run_or_an_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, telemetry: dict[str, Any], words: str
) -> None:
    without_loggers(monkeypatch)
    monkeypatch.chdir(tmp_path)
    wrong = {**ON_TWO, "save_dir": "run", "telemetry": telemetry}
    for begin in (lambda: lockstep.train(Toy, wrong), lambda: begin_as_rank(wrong)):
        with pytest.raises(ConfigError, match=words):
            begin()
        assert not list(tmp_path.iterdir())
    run, _ = stopped_at_once(tmp_path / "run")
    before = run.read(), run.config()
    with pytest.raises(ConfigError, match=words):
        lockstep.train(Toy, wrong, resume=True)
    assert (run.read(), run.config()) == before


def without_loggers(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec, missing = importlib.util.find_spec, {"wandb", "mlflow", "tensorboard"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name in missing else find_spec(name, *more)
    )


def begin_as_rank(settings: dict[str, Any]) -> None:
    """What rank 0 of a torchrun does when the ranks have agreed on a new run."""
    task, config = settle(Toy, {**settings, "hardware": {"selected_devices": "cpu"}})
    world = World(launcher="torchrun")
    with meeting(world, config) as team, contextlib.ExitStack() as claim:
        prepare_together(team, task, config, TrainRequest(False, settings, False), claim)


def test_threads_that_the_user_has_set_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert prepare(Toy, {"hardware": {"selected_devices": "cpu"}}).plan.threads == 3
    plan = prepare(Toy, {"hardware": {"selected_devices": "cpu,cpu"}}).plan
    assert (plan.threads, plan.decisions["threads"].reason) == (3, "OMP_NUM_THREADS")
    assert prepare(Toy, {"hardware": {"selected_devices": "cpu"}, "training": {"threads": 2}}).plan.threads == 2
    monkeypatch.delenv("OMP_NUM_THREADS")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        plan = prepare(Toy, {"hardware": {"selected_devices": "cpu"}}).plan
    finally:
        torch.set_num_threads(before)
    assert plan.threads == 1


CLAIMER = """
import sys
from pathlib import Path
from lockstep.launch.run_claim import claimed
from lockstep.rundir.folder import RunDir
with claimed(RunDir(Path(sys.argv[1]))):
    print("claimed", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_a_claim_keeps_others_out_and_dies_with_its_process(tmp_path: Path) -> None:
    run, _ = stopped_at_once(tmp_path / "run")
    other = subprocess.Popen(
        [sys.executable, "-c", CLAIMER, str(run.path)],
        env=clean_environment(PYTHONPATH=str(ROOT / "src")),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"claimed\n"
        with pytest.raises(RunFolderError, match=run.read().id), claim(run, 0.2):
            pass
        os.kill(other.pid, signal.SIGKILL)
        with claimed(run):
            with pytest.raises(RunFolderError, match=run.read().id), claim(run, 0.0):
                pass  # a thread of the same process is another one, too
            refused: list[RunFolderError] = []
            resuming = threading.Thread(target=lambda: refused.extend(claim_error(run)))
            resuming.start()
            resuming.join()
            assert len(refused) == 1
        with claim(run, 0.0):
            pass  # it was given back
    finally:
        other.kill()
        other.communicate()


def claim_error(run: RunDir) -> list[RunFolderError]:
    try:
        with claim(run, 0.0):
            return []
    except RunFolderError as error:
        return [error]


def test_a_resume_waits_for_the_claim_of_one_that_ends(tmp_path: Path) -> None:
    run, _ = stopped_at_once(tmp_path / "run")
    inside = threading.Event()

    def hold() -> None:
        with claimed(run):
            inside.set()
            time.sleep(0.3)

    holder = threading.Thread(target=hold)
    holder.start()
    inside.wait(60)
    with claim(run, 60.0):
        pass
    holder.join()
