"""The dtype of a field does not depend on which rows come first, or are in one batch; what has none is refused."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset, default_collate

import lockstep
from lockstep.data.arrays import by_row
from lockstep.data.reader import Reader
from lockstep.engine.training_data import check_frames
from lockstep.errors import DataError, LockstepError
from lockstep.readers.columns import ParquetFiles
from lockstep.readers.records import CsvFiles, JsonLines, TarShards

LARGE = 2**53 + 1
#: Values of a field in some rows and in others, and their dtype and values in a batch; ``None``: there is none.
FIELDS: list[tuple[Any, Any, Any]] = [
    (1, 1.5, torch.tensor([1.0, 1.5], dtype=torch.float64)),
    (1, 2, torch.tensor([1, 2])),
    (1, LARGE, torch.tensor([1, LARGE])),
    ([1, 2], [1.5, 2], [torch.tensor([1.0, 1.5], dtype=torch.float64), torch.tensor([2, 2])]),
    ([1, 2], [1, 2.5], [torch.tensor([1, 1]), torch.tensor([2.0, 2.5], dtype=torch.float64)]),
    ({"a": 1}, {"a": 0.5}, {"a": torch.tensor([1.0, 0.5], dtype=torch.float64)}),
    (LARGE, 1.5, None),
    (True, 1, None),
    (True, 1.5, None),
    (None, 1, None),
    ("a", 1, None),
    ("a", None, None),
    ([1, 2], [1, None], None),
    ([1], 1, None),
    ({"a": 1}, {"a": 1, "b": 2}, None),
    (2**63, 1, None),
]


def equal(first: Any, second: Any) -> bool:
    """Whether two batches have the same values of the same dtypes."""
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(equal, first, second))
    return (
        first.dtype == second.dtype and torch.equal(first, second)
        if isinstance(first, torch.Tensor)
        else first == second
    )


def lines(folder: Path, values: list[Any], **options: Any) -> JsonLines:
    path = Path(tempfile.mkdtemp(dir=folder)) / "rows.jsonl"
    path.write_text("".join(json.dumps({"x": value}) + "\n" for value in values))
    return JsonLines(path, **options)


@pytest.mark.parametrize(("first", "second", "right"), FIELDS, ids=map(repr, FIELDS))
@pytest.mark.parametrize("is_swapped", [False, True])
def test_json_lines(first: Any, second: Any, right: Any, is_swapped: bool, tmp_path: Path) -> None:
    values = [second, first] if is_swapped else [first, second]
    data = lines(tmp_path, values)
    if right is None:
        with pytest.raises(DataError, match=r"record [12] of .*rows\.jsonl"):
            check_frames(data)
        assert [row["x"] for row in data] == values, "for a task with its own collate"
        return
    check_frames(Subset(data, [0]))
    order = np.array([1, 0] if is_swapped else [0, 1])
    for rows in (order, order[::-1], order[:1], order[1:]):
        batch = Reader(Subset(data, [0, 1]), default_collate, 1).batch(0, rows, 0)
        picked = [0 if row == order[0] else 1 for row in rows]
        expected = torch.utils.data.default_convert(right)
        assert equal(batch, {"x": _rows_of(expected, picked)})


def _rows_of(batch: Any, rows: list[int]) -> Any:
    if isinstance(batch, dict):
        return {key: _rows_of(part, rows) for key, part in batch.items()}
    return [_rows_of(part, rows) for part in batch] if isinstance(batch, list) else batch[rows]


numbers = st.one_of(st.integers(-(2**60), 2**60), st.floats(allow_nan=False), st.booleans(), st.none())


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(numbers, min_size=1, max_size=6), order=st.permutations(range(6)))
def test_any_field_of_numbers(values: list[Any], order: list[int], tmp_path: Path) -> None:
    """The batch of any rows in any order has the values and dtype that NumPy has for the field, or all are refused."""
    data = lines(tmp_path, values)
    types = set(map(type, values))
    is_exact = float not in types or all(abs(value) <= 2**53 for value in values if type(value) is int)
    if not (types == {bool} or (types <= {int, float} and is_exact)):
        with pytest.raises(DataError):
            check_frames(data)
        return
    check_frames(data)
    whole = np.array(values)
    rows = np.array([number for number in order if number < len(values)])
    for part in (rows, rows[:1], rows[-2:]):
        batch = Reader(data, default_collate, 1).batch(0, part, 0)["x"]
        assert equal(batch, torch.from_numpy(whole[part]))


def test_transforms_get_the_values_of_the_lines(tmp_path: Path) -> None:
    data = lines(tmp_path, [1, 1.5, None], transform=lambda row: row["x"])
    check_frames(data)
    assert [type(value) for value in data] == [int, float, type(None)]


def test_records_of_shards_and_texts_of_csv(tmp_path: Path) -> None:
    import io
    import tarfile

    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for number, value in enumerate((1, 1.5, 2)):
            content = json.dumps({"x": value}).encode()
            member = tarfile.TarInfo(f"{number}.json")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    shards = TarShards(tmp_path)
    check_frames(shards)
    batch = Reader(shards, default_collate, 1).batch(0, np.array([2, 0]), 0)
    assert equal(batch["json"]["x"], torch.tensor([2.0, 1.0], dtype=torch.float64))
    (tmp_path / "0.csv").write_text("x\n1\n1.5\n\n2\n")
    assert [row["x"] for row in CsvFiles(tmp_path)] == ["1", "1.5", "2"]


@pytest.mark.parametrize(("first", "second", "right"), FIELDS[:3] + FIELDS[6:10] + FIELDS[-1:], ids=str)
@pytest.mark.parametrize("is_swapped", [False, True])
def test_frames(first: Any, second: Any, right: Any, is_swapped: bool) -> None:
    pandas = pytest.importorskip("pandas")
    values = [second, first] if is_swapped else [first, second]
    data = by_row(pandas.DataFrame({"x": pandas.Series(values, dtype=object)}))
    if right is None:
        with pytest.raises(DataError, match="'x'"):
            check_frames(data)
        return
    check_frames(data)
    for row in (0, 1):
        batch = Reader(data, default_collate, 1).batch(0, np.array([row]), 0)
        assert equal(batch["x"], right[[int(row != is_swapped)]])


@pytest.mark.parametrize(("first", "second", "right"), FIELDS, ids=map(repr, FIELDS))
@pytest.mark.parametrize("is_swapped", [False, True])
def test_lists(first: Any, second: Any, right: Any, is_swapped: bool) -> None:
    """Of a list, numbers are not converted: a program can do that itself."""
    data = [{"x": value} for value in ([second, first] if is_swapped else [first, second])]
    if right is not None and (first, second) in ((1, 2), (1, LARGE)):
        check_frames(data)
        batch = Reader(data, default_collate, 1).batch(0, np.arange(2), 0)
        assert equal(batch["x"], right.flip(0) if is_swapped else right)
        return
    if first != 2**63:
        with pytest.raises(DataError, match="in one row"):
            check_frames(data)
    with pytest.raises(LockstepError):
        Reader(data, default_collate, 1).batch(0, np.arange(2), 0)


class Rows:
    """Samples of a user's data set."""

    def __init__(self, *samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, 1.5),
        (True, 1),
        (np.float32(1), np.float64(1)),
        (np.int64(1), 1.5),
        (np.float32(1), 1.5),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (np.zeros(2, np.int64), np.zeros(2)),
        ("a", 1.5),
        ({"x": 1}, {"x": 1, "y": 2}),
    ],
    ids=repr,
)
def test_batches_of_any_data_set(first: Any, second: Any) -> None:
    """In one batch, and in two: in any order, as on other devices."""
    for samples in itertools.permutations([(0.0, first), (0.0, second)]):
        with pytest.raises(LockstepError):  # torch refuses a text that comes later itself
            Reader(Rows(*samples), default_collate, 1).batch(0, np.arange(2), 0)
        reader = Reader(Rows(*samples), default_collate, 1)
        reader.batch(0, np.array([0]), 0)
        if isinstance(first, dict):
            continue
        with pytest.raises(LockstepError, match="in one row"):
            reader.batch(0, np.array([1]), 1)


def test_samples_that_may_differ() -> None:
    """Scalars of NumPy, arrays beside tensors, other keys in another batch, lists of other lengths."""
    for first, second in ((np.int64(1), 2), (np.float64(1), 1.5), (np.bool_(True), False)):
        for samples in ((first, second), (second, first)):
            batch = Reader(Rows(*samples), default_collate, 1).batch(0, np.arange(2), 0)
            assert equal(batch, torch.tensor(samples, dtype=torch.as_tensor(first).dtype))
    texts = Rows(np.str_("a"), "text")
    assert Reader(texts, default_collate, 1).batch(0, np.arange(2), 0) == ["a", "text"]
    arrays = Rows(np.zeros(2, np.float32), torch.ones(2))
    assert equal(Reader(arrays, default_collate, 1).batch(0, np.arange(2), 0), torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    other = Reader(Rows({"x": 1}, {"y": [1.5]}, {"y": [1.5, 2.5]}), default_collate, 1)
    assert [sorted(other.batch(0, np.array([row]), row)) for row in range(3)] == [["x"], ["y"], ["y"]]


@pytest.mark.parametrize("where", ["list", "fixed", "struct"])
def test_gaps_within_values_of_parquet_are_refused_when_opened(where: str, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    values = {"list": [[1, 2], [3, None]], "fixed": [[1, 2], [3, None]], "struct": [{"a": 1}, {"a": None}]}[where]
    column = pa.array(values, pa.list_(pa.int64(), 2) if where == "fixed" else None)
    pa.parquet.write_table(pa.table({"x": column}), tmp_path / "0.parquet")
    with pytest.raises(DataError, match=r"the column 'x'.* of sample 1 is None"):
        check_frames(ParquetFiles(tmp_path))


class Line(lockstep.Task):
    def __init__(self, file: str) -> None:
        self.file = file

    def datasets(self) -> lockstep.Datasets:
        return lockstep.Datasets(train=JsonLines(self.file))

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(1, 1, bias=False).double()

    def loss(self, model: torch.nn.Module, batch: Any) -> lockstep.Loss:
        assert batch["x"].dtype == batch["y"].dtype == torch.float64
        return lockstep.Loss((model(batch["x"][:, None])[:, 0] - batch["y"]).square().sum(), len(batch["x"]))


@pytest.mark.slow
def test_a_run_on_mixed_numbers_has_the_loss_of_float64(tmp_path: Path) -> None:
    """Batches of one and of all rows, whichever row comes first."""
    pairs = [(1, 0.5), (0.25, 2), (3, 4), (1.5, 1)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"x": x, "y": y}) + "\n" for x, y in pairs))
    x, y = torch.tensor(pairs, dtype=torch.float64).T
    for batch_size in (1, 4):
        run = lockstep.train(
            Line(str(tmp_path / "rows.jsonl")),
            devices="cpu",
            epochs=1,
            batch_size=batch_size,
            lr=1e-30,
            save_dir=tmp_path / f"{batch_size}",
        )
        weight = run.load_model().weight.detach()
        right = (x * weight[0, 0] - y).square().mean().item()
        assert run.history[-1]["train_loss"] == pytest.approx(right, rel=1e-12)
