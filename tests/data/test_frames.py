"""Frames: values that are encoded, refused by name or named by the plan; classes of a column."""

from __future__ import annotations

import json
import pickle
import re
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from torch import nn

import lockstep
from lockstep import Datasets, Loss, Task
from lockstep.data import FrameEncoder
from lockstep.errors import DataError

TRAIN = pd.DataFrame(
    {
        "size": pd.Categorical(["s", "l", "m", "s", None, "l"], categories=["s", "m", "l"], ordered=True),
        "city": ["Oslo", None, "Rome", "Oslo", "Bern", "Rome"],
        "built": pd.to_datetime(["2020-01-01", "2020-01-03", None, "2020-01-05", "2020-01-01", "2020-01-05"]),
        "day": [date(2020, 1, 1), date(2020, 1, 3), None, date(2020, 1, 5), date(2020, 1, 1), date(2020, 1, 5)],
        "price": [Decimal("1.5"), Decimal("2.5"), None, Decimal("3.5"), Decimal("1.5"), Decimal("3.5")],
        "rooms": pd.array([1, 2, pd.NA, 3, 1, 3], dtype="Int64"),
        "flat": pd.array([True, False, pd.NA, True, False, True], dtype="boolean"),
        "species": ["cat", "dog", "cat", "dog", "cat", "cat"],
    }
)


def test_values_are_those_of_the_training_frame() -> None:
    encoder = FrameEncoder(TRAIN, target="species")
    assert encoder.numbers == ("built", "day", "price", "rooms", "flat")
    assert encoder.sizes == {"size": 4, "city": 4}
    assert encoder.classes == ("cat", "dog")
    rows = encoder(TRAIN)
    assert rows["size"].tolist() == [1, 3, 2, 1, 0, 3]
    assert rows["city"].tolist() == [2, 0, 3, 2, 1, 3]
    assert rows["species"].tolist() == [0, 1, 0, 1, 0, 0]
    # 0, 2, 4, 0 and 4 days; 1.5 to 3.5; 1 to 3: the same values when standardised, as scikit-learn does.
    known = np.array([0.0, 2.0, 4.0, 0.0, 4.0])
    scaled = (known - known.mean()) / known.std()
    for name in ("built", "day", "price", "rooms"):
        assert rows[name].dtype == np.float32
        assert np.allclose(np.delete(rows[name], 2), scaled, atol=1e-6) and rows[name][2] == 0
    # Another frame: values that are new or missing, no target, more columns, another order of rows and columns.
    other = TRAIN.iloc[[1, 3]][["rooms", "price", "flat", "day", "built", "city", "size"]].assign(
        more=1, city=["Kyiv", "Rome"]
    )
    encoded = pickle.loads(pickle.dumps(encoder))(other)
    assert encoded["city"].tolist() == [0, 3] and encoded["rooms"].tolist() == rows["rooms"].tolist()[1:4:2]
    assert list(encoded) == [*encoder.numbers, "size", "city"]
    assert {rows[name].dtype for name in ("city", "size", "species")} == {np.dtype(np.int64)}


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"city": ["Oslo", None, ["x"], "a", "b", "c"]}, ("'city'", "['x']", "row 2")),
        ({"species": ["cat", "dog", None, "dog", "cat", "cat"]}, ("'species'", "row 2")),
        ({"rooms": ["one", "2", "3", "1", "1", "2"]}, ("'rooms'", "'one'", "row 0")),
    ],
)
def test_what_is_not_encoded_is_named_with_column_row_and_value(
    changes: dict[str, Any], facts: tuple[str, ...]
) -> None:
    with pytest.raises(DataError) as error:
        encoder = FrameEncoder(TRAIN if "rooms" in changes else TRAIN.assign(**changes), target="species")
        encoder(TRAIN.assign(**changes))
    assert all(fact in error.value.what for fact in facts)


class Sold(Task):
    """The species by all other columns, whose categories are embedded."""

    def __init__(self, frame: Any) -> None:
        super().__init__()
        self.frame = frame

    def datasets(self) -> Datasets:
        return Datasets(self.frame, self.frame)

    def model(self) -> nn.Module:
        return nn.Linear(1, 2)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        scores = model(batch["rooms"].float()[:, None])
        return Loss(nn.functional.cross_entropy(scores, batch["species"], reduction="sum"), len(scores))


def test_missing_numbers_are_named_and_a_column_is_balanced(tmp_path: Path) -> None:
    frame = pd.DataFrame({"rooms": [1.0, np.nan, 3.0, np.nan], "species": [0, 1, 0, 0]})
    plan = lockstep.plan(Sold(frame), devices="cpu", batch_size=2)
    assert any(re.search(r"'rooms' \(2, .*\b1\)", note.text) for note in plan.notes)
    encoded = FrameEncoder(frame)(frame)
    balanced = {"data.sampling": "balanced", "data.label_column": "species", "data.epoch_samples": 1000}
    rows = encoded.assign(species=frame["species"])
    for number, data in enumerate((rows, rows.to_dict("records"))):
        run = lockstep.train(
            Sold(data),
            balanced | {"telemetry.record_samples": True},
            devices="cpu",
            epochs=1,
            batch_size=50,
            num_workers=0,
            save_dir=tmp_path / f"run-{number}",
        )
        assert np.isfinite(run.metrics["val_loss"])
        lines = (run.run_dir / "samples-rank0.jsonl").read_text().splitlines()
        drawn = np.concatenate([json.loads(line)["indices"] for line in lines])
        assert len(drawn) == 1000 and 0.42 < np.mean(drawn == 1) < 0.58, "the class of one row is half of the samples"
    with pytest.raises(lockstep.errors.ConfigError):
        lockstep.plan(Sold(rows), balanced | {"data.label_column": "specie"}, devices="cpu")
