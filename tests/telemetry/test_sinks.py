"""What a run leaves behind: real run folders, read back with the readers that everybody uses."""

import importlib.util
import io
import json
import math
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.config import RunConfig, resolve
from lockstep.errors import ConfigError, StorageError
from lockstep.events import (
    EpochEnded,
    Evaluated,
    Event,
    Fanout,
    Note,
    PictureDrawn,
    Remarked,
    RunEnded,
    RunStarted,
    Sink,
    Sound,
    StepLogged,
)
from lockstep.rundir.folder import RunDir, new_run_id
from lockstep.telemetry import sinks
from lockstep.telemetry.loggers import TensorBoardSink, is_wanted
from lockstep.telemetry.sinks import RunFolderSink, standard_sinks

PLAN: dict[str, Any] = {"task": {"name": "har"}, "epochs": 3, "decisions": {}, "notes": []}


@pytest.fixture(autouse=True)
def files_sorted_by_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard reads the files of one second and process by their number, as text: 10 before 9."""
    from tensorboard.summary.writer import event_file_writer

    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(
        tmp_path / "run", resolve({"training": {"epochs": 3}}), run_id=new_run_id(), command=["lockstep"]
    )


def started(run: RunDir, *, step: int = 0) -> RunStarted:
    attempt = run.begin_attempt(PLAN, {}, step)
    return RunStarted(run.path, attempt, step, 30, PLAN)


def logged(attempt: int, step: int, **changes: Any) -> StepLogged:
    values: dict[str, Any] = {
        "epoch": 1 + step // 10, "samples_seen": step * 32, "loss": 1 / step, "lr": 1e-3, "grad_norm": 0.5,
        "samples_per_s": 900.0, "data_wait_share": 0.1, "skipped_steps": 0, "scalars": {},
    }  # fmt: skip
    return StepLogged(attempt=attempt, step=step, **values | changes)


def ended_epoch(attempt: int, epoch: int, *, improved: bool = True, loss: float | None = None) -> EpochEnded:
    row = {
        "epoch": epoch, "train_loss": 1.0 / epoch, "val_loss": 2.0 / epoch if loss is None else loss,
        "val_accuracy": 0.5 + epoch / 10, "lr": 1e-3, "samples_per_s": 900.0, "duration_s": 6.0,
    }  # fmt: skip
    return EpochEnded(attempt, epoch, epoch * 10, row, improved)


def ended(status: str = "completed", **changes: Any) -> RunEnded:
    values: dict[str, Any] = {
        "step": 30, "final_metrics": {"val_loss": 0.7, "test_loss": 0.8, "test_accuracy": 0.75}, "best_epoch": 2,
        "best_metric": {"val_accuracy": 0.7}, "duration_s": 20.0,
    }  # fmt: skip
    return RunEnded(status, **values | changes)


def send(sink: Sink, *events: Event) -> None:
    for event in events:
        sink.emit(event)
    sink.close()


def folder_sink(run: RunDir) -> RunFolderSink:
    return RunFolderSink(run, run.config())


def test_a_whole_run(run: RunDir) -> None:
    start = started(run)
    send(folder_sink(run), start, logged(1, 5), *(ended_epoch(1, n, improved=n < 3) for n in (1, 2, 3)), ended())
    record = run.read()
    assert (record.status, record.best_epoch, record.best_metric) == ("completed", 2, {"val_accuracy": 0.7})
    assert record.final_metrics == {"val_loss": 0.7, "test_loss": 0.8, "test_accuracy": 0.75}
    assert record.started_at and record.completed_at and record.error is None
    assert [row["epoch"] for row in run.epochs()] == [1, 2, 3]
    assert {"train_loss", "val_loss", "val_accuracy", "lr", "samples_per_s", "duration_s"} <= run.epochs()[0].keys()


def test_the_best_so_far_is_known_during_the_run(run: RunDir) -> None:
    sink = folder_sink(run)
    for event in (started(run), ended_epoch(1, 1), ended_epoch(1, 2, improved=False)):
        sink.emit(event)
    record = run.read()
    assert record.status == "running"
    assert record.best_epoch == 1
    assert record.best_metric == {"val_loss": 2.0, "val_accuracy": 0.6}


def test_evaluations_between_epochs_are_rows_and_may_be_the_best(run: RunDir) -> None:
    between = [Evaluated(1, 1, 5, {"val_loss": 1.5}, True), Evaluated(1, 2, 15, {"val_loss": 1.75}, False)]
    sink = folder_sink(run)
    for event in (started(run), between[0], ended_epoch(1, 1, improved=False), between[1]):
        sink.emit(event)
    assert run.evaluations() == [
        {"attempt": 1, "step": 5, "epoch": 1, "improved": True, "val_loss": 1.5},
        {"attempt": 1, "step": 15, "epoch": 2, "improved": False, "val_loss": 1.75},
    ]
    assert (run.read().best_epoch, run.read().best_metric) == (1, {"val_loss": 1.5})
    send(folder_sink(run), started(run, step=10), Evaluated(2, 2, 15, {"val_loss": 1.25}, True))
    assert [(row["attempt"], row["step"], row["val_loss"]) for row in run.evaluations()] == [(1, 5, 1.5), (2, 15, 1.25)]
    assert run.read().best_metric == {"val_loss": 1.25}


def test_a_step_row_has_the_keys_of_the_design(run: RunDir) -> None:
    send(folder_sink(run), started(run), logged(1, 5, scalars={"entropy": 0.3}))
    (row,) = run.steps()
    assert set(row) == {
        "attempt", "step", "epoch", "samples_seen", "loss", "lr", "grad_norm", "samples_per_s", "data_wait_share",
        "skipped_steps", "scalars",
    }  # fmt: skip
    assert row["scalars"] == {"entropy": 0.3}


def test_numbers_that_are_not_finite_stay_valid_json(run: RunDir) -> None:
    start = started(run)
    send(
        folder_sink(run), start, logged(1, 5, loss=math.nan, grad_norm=math.inf), ended_epoch(1, 1, loss=math.nan),
        ended(best_metric={"val_loss": math.nan}),
    )  # fmt: skip

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    files = [run.metrics_file, run.run_file, run.path / sinks.RESULTS_FILE]
    for text in [*(file.read_text() for file in files), *run.steps_file.read_text().splitlines()]:
        json.loads(text, parse_constant=refuse)
    assert run.steps()[0]["loss"] is None


def test_a_resumed_run_keeps_the_rows_that_still_count(run: RunDir) -> None:
    send(folder_sink(run), started(run), *(ended_epoch(1, n) for n in (1, 2, 3)))
    send(folder_sink(run), started(run, step=20), ended_epoch(2, 3), ended())
    assert [(row["epoch"], row["attempt"]) for row in run.epochs()] == [(1, 1), (2, 1), (3, 2)]


def test_a_resumed_run_is_running_again(run: RunDir) -> None:
    send(folder_sink(run), started(run), ended_epoch(1, 1), ended("failed", error="rank 1: boom"))
    before = run.read()
    assert (before.status, before.error) == ("failed", "rank 1: boom")
    folder_sink(run).emit(started(run, step=10))
    record = run.read()
    assert (record.status, record.error, record.completed_at) == ("running", None, None)
    assert record.started_at == before.started_at
    assert record.best_epoch == 2


def test_training_results_in_its_own_form(run: RunDir) -> None:
    send(folder_sink(run), started(run), *(ended_epoch(1, n) for n in (1, 2)))
    send(folder_sink(run), started(run, step=20), ended_epoch(2, 3), ended(duration_s=20.0))
    results = json.loads((run.path / "training_results.json").read_text())
    assert results["best_epoch"] == 2
    assert results["best_val_acc"] == pytest.approx(0.7)
    assert (results["test_loss"], results["test_acc"]) == (0.8, 0.75)
    assert results["total_time_minutes"] == pytest.approx(20 / 60), "earlier attempts are in the event's seconds"
    assert results["history"]["epoch"] == [1, 2, 3]
    assert results["history"]["val_acc"] == pytest.approx([0.6, 0.7, 0.8])
    assert RunConfig.model_validate(results["config"]) == run.config()


def test_a_configuration_that_is_damaged_meanwhile_does_not_take_the_end(run: RunDir) -> None:
    sink = folder_sink(run)
    config = run.config()
    sink.emit(started(run))
    run.config_file.write_text("not: [a configuration")
    send(sink, ended_epoch(1, 1), ended())
    assert run.read().status == "completed"
    results = json.loads((run.path / "training_results.json").read_text())
    assert RunConfig.model_validate(results["config"]) == config


def test_a_run_without_validation_has_no_best(run: RunDir) -> None:
    send(folder_sink(run), started(run), ended(best_epoch=None, best_metric={}, final_metrics={"train_loss": 0.1}))
    results = json.loads((run.path / "training_results.json").read_text())
    assert results["best_epoch"] is None
    assert not [key for key in results if key.startswith(("best_val", "test_"))]
    assert run.read().best_epoch is None


def test_a_folder_that_is_gone_stops_the_run(run: RunDir, tmp_path: Path) -> None:
    fanout = Fanout(essential=[folder_sink(run)])
    fanout.emit(started(run))
    run.path.rename(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="is missing"):
        fanout.emit(logged(1, 5))


def events_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def test_tensorboard_reads_what_the_sink_writes(run: RunDir) -> None:
    send(
        TensorBoardSink(run.logs), started(run), logged(1, 5, scalars={"entropy": 0.25}, grad_norm=None),
        Evaluated(1, 1, 7, {"val_loss": 1.5}, False), ended_epoch(1, 1), Note("remark", "x"), ended(),
    )  # fmt: skip
    found = events_of(run.logs)
    assert found["train/loss"] == [(5, pytest.approx(0.2))]
    assert found["train/entropy"] == [(5, 0.25)]
    assert found["lr"] == [(5, pytest.approx(1e-3))]
    assert found["throughput/samples_per_s"] == [(5, 900.0)]
    assert found["val/loss"] == [(7, 1.5), (10, 2.0)]
    assert found["train_epoch/loss"] == [(10, 1.0)]
    assert found["test/accuracy"] == [(30, 0.75)]
    assert "train/grad_norm" not in found


def test_tensorboard_of_a_resumed_run_hides_what_is_superseded(run: RunDir) -> None:
    send(TensorBoardSink(run.logs), started(run), *(logged(1, step, loss=1.0) for step in (5, 10, 15)))
    send(TensorBoardSink(run.logs), started(run, step=10), *(logged(2, step, loss=2.0) for step in (15, 20)))
    assert events_of(run.logs)["train/loss"] == [(5, 1.0), (10, 1.0), (15, 2.0), (20, 2.0)]


def test_pictures_of_epochs_that_are_run_again_are_not_the_newest(run: RunDir) -> None:
    pixels = np.zeros((2, 3), dtype=np.uint8)
    drawn = [PictureDrawn(1, epoch, epoch * 10, "drawn", pixels) for epoch in (1, 2, 3)]
    send(folder_sink(run), started(run), *(ended_epoch(1, epoch) for epoch in (1, 2)), *drawn)
    send(folder_sink(run), started(run, step=10))
    assert sorted(file.name for file in run.pictures.iterdir()) == ["drawn-epoch-0001.png", "drawn-epoch-0002.png"]


def test_remarks_of_an_attempt_that_was_superseded_go_and_a_recording_is_kept_once(run: RunDir) -> None:
    sound = Sound("heard", np.array([0.0, 1.0, -2.0], np.float32), 8000)
    said = [Remarked(1, epoch, epoch * 10, ["a line", sound]) for epoch in (1, 2)]
    send(folder_sink(run), started(run), *said)
    (file,) = run.audio.iterdir()
    with wave.open(str(file)) as heard:
        assert (heard.getframerate(), heard.getnframes()) == (8000, 3)
        assert np.frombuffer(heard.readframes(3), "<i2").tolist() == [0, 32767, -32767]
    expected = [{"text": "a line"}, {"text": "heard", "audio": file.name}]
    assert [(row["epoch"], row["remarks"]) for row in run.remarks()] == [(1, expected), (2, expected)]
    send(folder_sink(run), Remarked(1, 2, 20, ["another"]))
    assert [row["remarks"] for row in run.remarks()] == [expected, [{"text": "another"}]]


def test_tensorboard_of_a_run_that_begins_again_hides_all_that_was(run: RunDir) -> None:
    send(TensorBoardSink(run.logs), started(run), *(logged(1, step, loss=1.0) for step in (5, 10)))
    send(TensorBoardSink(run.logs), started(run), logged(2, 5, loss=2.0))
    assert events_of(run.logs)["train/loss"] == [(5, 2.0)]


def test_tensorboard_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wanted(setting: str) -> bool:
        return is_wanted("tensorboard", resolve({"telemetry": {"tensorboard": setting}}))

    assert wanted("auto")
    assert not wanted("off")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not wanted("auto")
    with pytest.raises(ConfigError, match="tensorboard") as caught:
        wanted("on")
    assert "'lockstep-train[tensorboard]'" in caught.value.fix and "telemetry.tensorboard=off" in caught.value.fix


def test_the_standard_sinks_write_folder_console_and_tensorboard(run: RunDir) -> None:
    stream = io.StringIO()
    send(standard_sinks(run, run.config(), stream), started(run), ended_epoch(1, 1), ended())
    assert run.read().status == "completed"
    assert "epoch 1/3" in stream.getvalue()
    assert (run.logs / "run.log").read_text() == stream.getvalue()
    assert list(run.logs.glob("events.out.tfevents.*"))
    assert not list(run.path.glob("**/.*tmp*"))
