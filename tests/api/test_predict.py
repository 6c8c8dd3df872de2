"""Predictions, tables and classes in Python: what a user of a trained classifier of a frame types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn
from torchmetrics.classification import MulticlassConfusionMatrix, MulticlassRecall

import lockstep
from lockstep import Datasets, Loss, Task
from lockstep.cli.main import main
from lockstep.errors import LockstepError

NAMES = ("cat", "dog", "bird")


def frame(rows: int) -> pd.DataFrame:
    values = [((7 * row) % 13 / 13, (5 * row) % 11 / 11) for row in range(rows)]
    return pd.DataFrame(
        {
            "x": [x for x, _ in values],
            "y": [y for _, y in values],
            "label": [(row + row // 2) % 3 for row in range(rows)],
        }
    )


class Pets(Task):
    class_names = NAMES

    def datasets(self) -> Datasets:
        return Datasets(frame(48), frame(24), frame(25))

    def model(self) -> nn.Module:
        return nn.Linear(2, 3)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        scores = self.scores(model, batch)
        return Loss(nn.functional.cross_entropy(scores, batch["label"], reduction="sum"), len(scores))

    def scores(self, model: nn.Module, batch: Any) -> Any:
        return model(torch.stack([batch["x"], batch["y"]], 1).float())

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Any, ...]:
        return self.scores(model, batch), batch["label"]

    def metrics(self) -> dict[str, Any]:
        return {"recall": MulticlassRecall(3, average=None), "confusion": MulticlassConfusionMatrix(3)}

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"class": [NAMES[number] for number in self.scores(model, batch).argmax(1).tolist()]}


def test_predictions_tables_and_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = lockstep.train(Pets(), devices="cpu", epochs=2, batch_size=8, num_workers=0, save_dir="run")
    model = run.load_model()
    data = frame(25)
    inputs = torch.tensor(data[["x", "y"]].to_numpy(), dtype=torch.float32)
    scores = model(inputs).detach()
    losses = nn.functional.cross_entropy(scores, torch.tensor(data["label"]), reduction="none")

    predicted = run.predict(loss=True)
    assert list(predicted.columns) == ["index", "class", "loss"] and predicted["index"].tolist() == list(range(25))
    assert predicted["class"].tolist() == [NAMES[number] for number in scores.argmax(1).tolist()]
    assert predicted["loss"].tolist() == pytest.approx(losses.tolist(), rel=1e-4)
    worst = predicted.nlargest(3, "loss")
    assert worst["index"].tolist() == losses.argsort(descending=True)[:3].tolist()
    assert run.predict(data.iloc[:4])["class"].tolist() == predicted["class"].tolist()[:4]
    assert run.predict("val", out="rows.parquet") == Path("rows.parquet")
    assert len(pd.read_parquet("rows.parquet")) == 24

    with pytest.raises(LockstepError, match=r"(?s)\bloss\b.*--loss") as refused:
        run.predict(data[["x", "y"]], loss=True)
    assert "'label'" in str(refused.value)
    assert run.predict(data[["x", "y"]])["class"].tolist() == predicted["class"].tolist()
    data.to_csv("new.csv")
    with pytest.raises(LockstepError, match=r"new\.csv") as unreadable:
        run.evaluate(tmp_path / "new.csv")
    assert "--data" not in str(unreadable.value)

    metrics = run.evaluate(data)
    assert metrics["test_loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
    assert run.evaluate("test") == metrics
    right = torch.tensor(data["label"]) == scores.argmax(1)
    for number, name in enumerate(NAMES):
        mine = torch.tensor(data["label"]) == number
        assert metrics[f"test_recall/{name}"] == pytest.approx(right[mine].float().mean().item() if mine.any() else 0.0)
        assert all(f"val_recall/{name}" in row for row in run.history)
    tables = run.tables
    assert tables["class_names"] == list(NAMES)
    assert [sum(row) for row in tables["test_confusion"]] == [(data["label"] == number).sum() for number in range(3)]

    cells: dict[str, list[Any]] = {}
    for index, pair in enumerate(zip(data["label"], scores.argmax(1).tolist(), strict=True)):
        cells.setdefault(f"{pair[0]},{pair[1]}", []).append([index, None])
    assert json.loads(Path("run/confused.json").read_text()) == cells, "the samples behind each cell"

    capsys.readouterr()
    assert main(["predict", "run", "val", "--loss", "--out", "rows.jsonl"]) == 0
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    assert sum(row["loss"] for row in rows) / 24 == pytest.approx(run.evaluate("val")["val_loss"], rel=1e-5)
    capsys.readouterr()
    assert main(["evaluate", "run", "val", "--split", "val"]) == 2
