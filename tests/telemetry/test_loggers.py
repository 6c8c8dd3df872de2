"""CSV, W&B and MLflow, each with the real package and read back; and loggers that fail."""

import json
import re
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.config import resolve
from lockstep.errors import ConfigError
from lockstep.events import (
    EpochEnded,
    Event,
    Fanout,
    Note,
    PictureDrawn,
    RanksLogged,
    RankState,
    RunEnded,
    RunStarted,
    StepLogged,
)
from lockstep.telemetry import loggers as the_loggers
from lockstep.telemetry.loggers import BackgroundSink, MlflowSink, as_row, loggers, wandb_mode
from tests.fakes import RecordingSink
from tests.gloo import ROOT, clean_environment
from tests.rundir.runs import make_run

PLAN: dict[str, Any] = {"decisions": {"strategy": {"title": "strategy", "shown": "ddp", "reason": "two devices"}}}
RANKS = (RankState(0, 0.02, 0.0, 0.015, 1.0, None, 1.5), RankState(1, 0.02, 0.001, 0.019, 1.0, None, 2.5))


def step(number: int, loss: float, attempt: int = 1) -> StepLogged:
    return StepLogged(attempt, number, 1, number * 32, loss, 1e-3, None, 900.0, 0.1, 0, {"entropy": 0.25})


def events(folder: Path, *, first: int = 0, status: str = "completed") -> list[Event]:
    return [
        RunStarted(folder, 1, first, 30, PLAN),
        Note("remark", "no logger cares"),
        step(first + 5, 0.5),
        RanksLogged(1, first + 5, 1, RANKS),
        EpochEnded(1, 1, first + 10, {"train_loss": 0.75, "val_accuracy": 0.5, "lr": 1e-3}, True),
        PictureDrawn(1, 1, first + 10, "drawn", np.zeros((4, 6), dtype=np.uint8)),
        RunEnded(status, first + 10, {"val_accuracy": 0.5, "test_accuracy": 0.25}, 1, {"val_accuracy": 0.5}, 3.0),
    ]


@pytest.mark.parametrize(
    ("logged", "row"),
    [
        ({"val/acc": 1}, {"val_acc": 1}),
        ({"valid_acc/top 5": 1, "validation/f1": 2}, {"val_acc/top 5": 1, "val_f1": 2}),
        ({"test/acc": 1, "validity": 2, "lr-SGD": 3, "val": 4}, {"test_acc": 1, "validity": 2, "lr-SGD": 3, "val": 4}),
        ({"val/acc": 1, "val_acc": 2, "valid/acc": 3}, {"val/acc": 1, "val_acc": 2, "valid/acc": 3}),
        ({"val/acc": 1, "valid/acc": 2}, {"val_acc": 1, "valid/acc": 2}),
        ({"train/loss": 1, "train/acc": 2}, {"train/loss": 1, "train_acc": 2}),
    ],
)
def test_rows_have_one_name_for_what_modules_log(logged: dict[str, int], row: dict[str, int]) -> None:
    assert as_row(logged, taken=("train_loss",)) == row


WANDB = """
import sys
from pathlib import Path
from tests.telemetry.test_loggers import events
from lockstep.rundir.folder import RunDir
from lockstep.telemetry.sinks import standard_sinks

run = RunDir.open(Path(sys.argv[1]))
sinks = standard_sinks(run, run.config(), sys.stdout)
for event in events(run.path):
    sinks.emit(event)
sinks.close()
"""


def wandb_records(file: Path) -> Iterator[Any]:
    """What a ``.wandb`` file holds: LevelDB's log format in blocks of 32 KiB after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    content, position, parts = file.read_bytes(), 7, b""
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


@pytest.mark.slow
def test_wandb_offline(tmp_path: Path) -> None:
    telemetry = {"wandb": True, "wandb_project": "rehearsal", "tensorboard": "off"}
    run = make_run(tmp_path / "run", telemetry=telemetry, training={"epochs": 3})
    # In a process of its own: W&B leaves a service and threads behind until the process ends.
    done = subprocess.run(
        [sys.executable, "-c", WANDB, str(run.path)],
        env=clean_environment(PYTHONPATH=f"{ROOT / 'src'}:{ROOT}", WANDB_MODE="offline"),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stdout
    (file,) = run.logs.glob("wandb/offline-run-*/run-*.wandb")
    records = {kind: [] for kind in ("run", "history", "exit")}  # type: dict[str, list[Any]]
    for record in wandb_records(file):
        records.setdefault(record.WhichOneof("record_type"), []).append(record)
    started = records["run"][0].run
    assert (started.run_id, started.project) == ("run-00000001", "rehearsal")
    config = {item.key: json.loads(item.value_json) for item in started.config.update}
    assert config["training"]["epochs"] == 3
    assert config["plan"] == {"strategy": "ddp"}
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records["history"]
    ]
    assert [row["step"] for row in rows] == [5, 5, 10, 10, 10]
    assert rows[0]["train/loss"] == 0.5
    assert (rows[3]["drawn/width"], rows[3]["drawn/height"]) == (6, 4)
    assert rows[4]["test/accuracy"] == 0.25
    assert records["exit"][0].exit.exit_code == 0


@pytest.mark.parametrize(
    ("setting", "environment", "mode"),
    [("auto", None, "online"), ("auto", "disabled", "disabled"), ("offline", "online", "offline")],
)
def test_the_mode_of_wandb_is_the_setting_else_that_of_the_environment(
    setting: str, environment: str | None, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if environment is not None:
        monkeypatch.setenv("WANDB_MODE", environment)
    assert wandb_mode(resolve({"telemetry": {"wandb_mode": setting}})) == mode


def mlflow_run(store: Path) -> Any:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=store.as_uri())
    experiment = client.get_experiment_by_name("segments")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    return client, found


@pytest.mark.slow
def test_mlflow_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = resolve({"training": {"epochs": 3}, "name": "first try", "telemetry": {"mlflow_experiment": "segments"}})
    for first, status in ((0, "failed"), (10, "completed")):  # two attempts of one run
        sink = MlflowSink(tmp_path, "run-1", config)
        for event in events(tmp_path, first=first, status=status):
            sink.emit(event)
        sink.close()
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client, found = mlflow_run(tmp_path / "mlruns")
    assert found.info.run_name == "first try"
    assert found.info.status == "FINISHED"
    assert found.data.params["training.epochs"] == "3"
    assert found.data.params["plan.strategy"] == "ddp"
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == [(5, 0.5), (15, 0.5)]
    (picture,) = client.list_artifacts(found.info.run_id, "pictures")
    assert picture.path == "pictures/drawn-epoch-0001.png"
    assert found.data.metrics["test/accuracy"] == 0.25


def test_files_of_mlflow_send_no_picture_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    outside = tmp_path / "outside"
    outside.mkdir()
    client = MlflowClient(tracking_uri=(tmp_path / "run" / "mlruns").as_uri())
    client.create_experiment("segments", artifact_location=outside.as_uri())
    sink = MlflowSink(tmp_path / "run", "run-1", resolve({"telemetry": {"mlflow_experiment": "segments"}}))
    for event in events(tmp_path / "run"):
        sink.emit(event)
    assert list(outside.iterdir()) == []
    client, found = mlflow_run(tmp_path / "run" / "mlruns")
    assert [metric.value for metric in client.get_metric_history(found.info.run_id, "train/loss")] == [0.5]


def test_loggers_are_off_by_default_and_named_when_they_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    assert loggers(run, resolve({"telemetry": {"tensorboard": "off"}})) == []
    monkeypatch.setattr(the_loggers.importlib.util, "find_spec", lambda name: None)
    for name in ("wandb", "mlflow"):
        with pytest.raises(ConfigError, match=name) as caught:
            loggers(run, resolve({"telemetry": {name: True}}))
        assert f"lockstep-train[{name}]" in caught.value.fix


def warnings_of(*failing: Any, folder: Path, between: Any = lambda: None) -> list[str]:
    """Send a whole run to ``failing``; the warnings that another sink heard. Every event must reach that one."""
    heard = RecordingSink()
    fanout = Fanout(optional=[heard, *failing])
    for event in events(folder):
        fanout.emit(event)
        between()
    fanout.close()
    assert [type(event) for event in heard.events if not isinstance(event, Note)] == [
        type(event) for event in events(folder) if not isinstance(event, Note)
    ]
    return [event.text for event in heard.events if isinstance(event, Note) and event.level == "warning"]


def test_a_server_that_is_not_there_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    sink = MlflowSink(tmp_path, "run-1", resolve({"telemetry": {"mlflow_uri": "http://127.0.0.1:9"}}))
    (warning,) = warnings_of(BackgroundSink(sink), folder=tmp_path)
    assert warning.startswith("MLflow ")
    assert "127.0.0.1" in warning


def test_a_logger_whose_import_raises_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow" / "__init__.py").write_text("raise RuntimeError('a broken installation')")
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlflow"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    sink = MlflowSink(tmp_path, "run-1", resolve({}))
    (warning,) = warnings_of(BackgroundSink(sink), folder=tmp_path)
    assert warning.startswith("MLflow ") and warning.endswith(": a broken installation")


class Stuck:
    """A logger that waits for a server which never answers."""

    name = "Stuck"

    def __init__(self) -> None:
        self.released = threading.Event()

    def emit(self, event: Event) -> None:
        self.released.wait()

    def close(self) -> None:
        pass


def test_a_logger_that_hangs_does_not_hold_up_the_run(tmp_path: Path) -> None:
    stuck = Stuck()
    try:
        (warning,) = warnings_of(BackgroundSink(stuck, close_timeout_s=0.1), folder=tmp_path)
    finally:
        stuck.released.set()
    assert re.match(r"Stuck .*\b0\.1 s\b", warning)


def test_a_logger_that_hangs_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(the_loggers, "MAX_WAITING", 3)
    stuck = Stuck()
    try:
        (warning,) = warnings_of(BackgroundSink(stuck), folder=tmp_path)
    finally:
        stuck.released.set()
    assert re.match(r"Stuck .*\b3 events\b", warning)


def test_the_background_keeps_the_order_and_ends(tmp_path: Path) -> None:
    class Slow(RecordingSink):
        name = "Slow"

        def emit(self, event: Event) -> None:
            time.sleep(0.01)
            super().emit(event)

    slow = Slow()
    assert warnings_of(BackgroundSink(slow), folder=tmp_path) == []
    assert [type(event) for event in slow.events] == [type(event) for event in events(tmp_path)]
    assert not [thread for thread in threading.enumerate() if thread.name == "lockstep-Slow"]
