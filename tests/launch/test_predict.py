"""Predictions in a file: the same bytes on any ranks, in several formats."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from lockstep import Task
from lockstep.api.finished import evaluation
from lockstep.api.finished import predict as predictions
from lockstep.config import resolve
from lockstep.engine import predict as engine
from lockstep.errors import ConfigError, DataError, LockstepError, TaskError
from lockstep.rundir.folder import RunDir
from tests.toys import Toy

pytestmark = pytest.mark.processes


def predict(run: RunDir, data: Any, out: Path, *, task: Any = None, devices: str | None = None) -> dict[str, Any]:
    return predictions.predict(run, predictions.PredictionRequest(data=data, devices=devices), out, task=task)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    folder = tmp_path_factory.mktemp("predict") / "run"
    settings: dict[str, Any] = {
        "save_dir": str(folder),
        "training": {"epochs": 1, "threads": 1},
        "hardware": {"selected_devices": "cpu"},
        "validation": {"batch_size": 16},
        "telemetry": {"progress": "off", "system_metrics": False},
    }
    return RunDir(lockstep.train("autoencoder", settings).run_dir)


@pytest.mark.slow
def test_a_file_is_the_same_on_one_two_and_three_ranks(run: RunDir, tmp_path: Path) -> None:
    files = [tmp_path / f"{ranks}.csv" for ranks in (1, 2, 3)]
    for ranks, file in enumerate(files, start=1):
        found = predict(run, "val", file, devices=",".join(["cpu"] * ranks))
        assert found["rows"] == 197
    assert files[0].read_bytes() == files[1].read_bytes() == files[2].read_bytes()
    with files[0].open() as lines:
        rows = list(csv.DictReader(lines))
    assert [row["index"] for row in rows] == [str(number) for number in range(197)]
    assert len(json.loads(rows[0]["code"])) == 16 and float(rows[0]["mse"]) > 0
    assert sorted(tmp_path.iterdir()) == sorted(files), "nothing else is left"


def test_an_interrupted_prediction_leaves_no_file(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "table_rows", interrupt)
    with pytest.raises(KeyboardInterrupt):
        predict(run, "test", tmp_path / "rows.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_parquet(run: RunDir, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    predict(run, "test", tmp_path / "a.parquet")
    assert parquet.read_table(tmp_path / "a.parquet").num_rows == 200


@pytest.mark.parametrize(
    ("data", "out", "error", "text"),
    [
        ("test", "a.xls", ConfigError, "not a format"),
        ("no/such/file", "a.csv", DataError, "no/such/file"),
        ("test", "no_folder/a.csv", LockstepError, "there is no folder"),
        (".", "a.csv", LockstepError, r"(?s)cannot read data from .*name a split of the run"),
    ],
)
def test_bad_input(run: RunDir, tmp_path: Path, data: str, out: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        predict(run, data, tmp_path / out)


class Wrong(Toy):
    def predict(self, model: Any, batch: Any) -> Any:
        return {"one": [1]}


class Counted(Toy):
    def predict(self, model: Any, batch: Any) -> Any:
        with Path("tries").open("a") as tries:
            print("once", file=tries)
        raise ValueError("no prediction")


@pytest.mark.slow
def test_ranks_that_fail_are_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = {
        "save_dir": str(tmp_path / "run"),
        "training": {"max_steps": 1, "threads": 1},
        "launch": {"max_restarts": 2},
        "hardware": {"selected_devices": "cpu"},
        "telemetry": {"progress": "off", "system_metrics": False},
    }
    lockstep.train(Counted, settings)
    with pytest.raises(LockstepError, match="no prediction"):
        predict(RunDir(tmp_path / "run"), "val", tmp_path / "rows.jsonl", devices="cpu,cpu")
    assert 1 <= len((tmp_path / "tries").read_text().splitlines()) <= 2, "each rank once at most"


class Silent(Wrong):
    evaluate, predict = Task.evaluate, Task.predict


class Empty(Silent):
    def evaluate(self, model: Any, batch: Any) -> tuple[Any, ...]:
        return ()


def test_a_column_of_another_length_and_none_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {
        "save_dir": str(tmp_path / "run"),
        "training": {"max_steps": 1, "threads": 1},
        "telemetry": {"progress": "off", "system_metrics": False},
    }
    run = RunDir(lockstep.train(Wrong, settings).run_dir)
    with pytest.raises(TaskError, match=r"predict\(\)"):
        predict(run, "val", tmp_path / "a.csv", task=Wrong)
    with pytest.raises(TaskError, match=r"fix: .*\bpredict\(self"):
        predict(run, "val", tmp_path / "a.csv", task=Empty)
    monkeypatch.delattr("lockstep.api.finished.predict.compute")
    with pytest.raises(TaskError, match=r"fix: .*\bpredict\(self"):
        predict(run, "val", tmp_path / "a.csv", task=Silent, devices="cpu,cpu")


class Largest:
    """The largest difference; its rows are gathered on rank 0."""

    def __init__(self) -> None:
        self.largest = 0.0

    def update(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self.largest = max(self.largest, float((first - second).abs().max()))

    def compute(self) -> dict[str, float]:
        return {"error": self.largest}


class OfColumns(Toy):
    """Predicts a column of a matrix, some of them not finite, from rows of a file or of a frame."""

    def evaluate(self, model: Any, batch: Any) -> tuple[Any, ...]:
        scores = super().evaluate(model, batch)[0]
        return scores[:, 0], scores[:, 1]

    def metrics(self) -> Any:
        return Largest()

    def predict(self, model: Any, batch: Any) -> Any:
        values = batch["value"]
        return {"value": values, "root": (values - 3).sqrt(), "both": torch.stack([values, values / 0], 1)}

    def prediction_data(self, path: Path) -> Any:
        import pandas

        return pandas.read_csv(path)


def test_a_frame_is_predicted_and_its_numbers_are_json(tmp_path: Path) -> None:
    """On three ranks, of which the last has a chunk of one row."""
    run = lockstep.train(
        OfColumns(), devices="cpu,cpu,cpu", epochs=1, batch_size=16, validation={"batch_size": 26},
        checkpoint={"monitor": "val_error"}, save_dir=tmp_path / "run",
    )  # fmt: skip
    assert run.metrics["val_error"] > 0, "the last of 53 samples is a chunk, of which only a column is sent"
    (tmp_path / "rows.csv").write_text("value\n" + "\n".join(map(str, [0.0, 1.0, 4.0, 7.0])))
    found = predict(RunDir(run.run_dir), tmp_path / "rows.csv", tmp_path / "out.jsonl", task=OfColumns())
    assert found["rows"] == 4
    rows = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["root"] for row in rows] == [None, None, 1.0, 2.0]
    assert [row["both"] for row in rows] == [[0.0, None], [1.0, None], [4.0, None], [7.0, None]]


def test_evaluate_takes_one_device_of_a_run_on_all() -> None:
    config = resolve({"hardware": {"selected_devices": ["all"]}})
    assert evaluation._config_on(config, None, "auto").hardware.selected_devices is None
    assert evaluation._config_on(config, "all", "auto").hardware.selected_devices == ("all",)


class CountingThreads(Toy):
    def predict(self, model: Any, batch: Any) -> Any:
        return {"threads": torch.full((len(batch[0]),), torch.get_num_threads())}


def test_predictions_use_one_thread_on_one_device_and_give_the_callers_back(tmp_path: Path) -> None:
    """Sums depend on the number of threads, and ranks have one."""
    run = lockstep.train(CountingThreads(), devices="cpu", max_steps=1, save_dir=tmp_path / "run")
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        predict(RunDir(run.run_dir), "val", tmp_path / "out.jsonl", task=CountingThreads)
        after = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {row["threads"] for row in rows} == {1}
    assert after == 3
