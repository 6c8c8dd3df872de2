from __future__ import annotations

import pickle
from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, WeightedRandomSampler, default_collate

import lockstep
from lockstep import ArrayDataset, Datasets, Loss
from lockstep.data.arrays import by_row
from lockstep.data.reader import Reader
from lockstep.data.sampling import balanced_weights, labels_of
from lockstep.errors import DataError, SampleError, TaskError
from tests.attempts import attempt
from tests.toys import FEATURES, Toy, arrays

SAMPLES = np.arange(60, dtype=np.float32).reshape(10, 2, 3)
LABELS = torch.arange(10)


def test_a_sample_is_one_item_of_each_array() -> None:
    dataset = ArrayDataset(SAMPLES, LABELS)
    sample, label = dataset[7]
    assert len(dataset) == 10
    assert torch.equal(sample, torch.from_numpy(SAMPLES[7]))
    assert label.item() == 7


@given(indices=st.lists(st.integers(0, 9), max_size=20), kind=st.sampled_from(["list", "array", "int32", "tensor"]))
def test_a_batch_holds_the_samples_asked_for_in_their_order(indices: list[int], kind: str) -> None:
    asked = {
        "list": lambda: indices,
        "array": lambda: np.array(indices, dtype=np.int64),
        "int32": lambda: np.array(indices, dtype=np.int32),
        "tensor": lambda: torch.tensor(indices, dtype=torch.int64),
    }[kind]()
    samples, labels = ArrayDataset(SAMPLES, LABELS).__getitems__(asked)
    assert torch.equal(samples, torch.from_numpy(SAMPLES[indices]))
    assert labels.tolist() == indices


def test_indices_may_be_read_only() -> None:
    indices = np.array([3, 1])
    indices.flags.writeable = False
    assert ArrayDataset(LABELS).__getitems__(indices)[0].tolist() == [3, 1]


def test_an_index_outside_the_data_is_an_error() -> None:
    with pytest.raises(IndexError):
        ArrayDataset(LABELS).__getitems__([10])


def test_arrays_are_shared_not_copied() -> None:
    samples = SAMPLES.copy()
    dataset = ArrayDataset(samples)
    samples[0] = -1
    assert (dataset[0][0] == -1).all()


def test_a_read_only_memory_map_works_without_a_warning(tmp_path: Path) -> None:
    np.save(tmp_path / "samples.npy", SAMPLES)
    mapped = np.load(tmp_path / "samples.npy", mmap_mode="r")
    batch = ArrayDataset(mapped).__getitems__([9, 0])[0]
    assert torch.equal(batch, torch.from_numpy(SAMPLES[[9, 0]]))


def test_it_travels_to_worker_processes() -> None:
    dataset = pickle.loads(pickle.dumps(ArrayDataset(SAMPLES, LABELS)))
    assert dataset.__getitems__([2])[1].tolist() == [2]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ((), r"\(none\) "),
        ((np.float32(1.0),), "cannot be a data set"),
        ((SAMPLES, LABELS[:9]), r"\(9,\) "),
        ((np.array(["a", "b"]),), "tensor"),
    ],
)
def test_arrays_that_cannot_be_a_data_set_are_refused(arrays: tuple[np.ndarray, ...], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        ArrayDataset(*arrays)
    assert caught.value.fix


class OfRows(Toy):
    """Of each sample one feature and the label, as a list of dictionaries."""

    def datasets(self) -> Datasets:
        inputs, labels = arrays(60, 1)
        rows = [{"x": x, "label": label} for x, label in zip(inputs[:, 0], labels, strict=True)]
        return Datasets(rows, rows[:10])

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return super().loss(model, _inputs_and_labels(batch))

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
        return super().evaluate(model, _inputs_and_labels(batch))


class OfFrame(OfRows):
    """The same as frames."""

    def datasets(self) -> Datasets:
        import pandas

        inputs, labels = arrays(60, 1)
        frame = pandas.DataFrame({"x": inputs[:, 0].numpy(), "label": labels.numpy()}, index=[5] * 60)
        return Datasets(frame, frame[:10])


def _inputs_and_labels(batch: Any) -> tuple[Tensor, Tensor]:
    return batch["x"][:, None].repeat(1, FEATURES), batch["label"]


def test_a_run_of_pandas_frames_is_that_of_their_rows(tmp_path: Path) -> None:
    of_frame, _ = attempt(OfFrame, tmp_path / "frame")
    of_rows, _ = attempt(OfRows, tmp_path / "rows")
    assert all(torch.equal(value, of_rows[name]) for name, value in of_frame.items())


def test_a_pandas_frame_is_its_rows_and_is_gathered_where_it_has_numbers() -> None:
    import pandas

    frame = pandas.DataFrame({"x": np.arange(9) / 2, "label": [0, 1, 2] * 3}, index=[5] * 9)
    rows, texts = by_row(frame), by_row(frame.assign(text=list("abcdefghi")))
    indices = np.array([8, 0, 3])
    for data in (rows, texts):
        reader, expected = Reader(data, default_collate, 1), default_collate([data[int(i)] for i in indices])
        assert reader.gathers == (data is rows)
        batch = reader.batch(0, indices, 0)
        assert batch.keys() == expected.keys()
        assert batch["x"].tolist() == [4.0, 0.0, 1.5]
        assert batch["x"].dtype == expected["x"].dtype
    assert batch["text"] == ["i", "a", "d"]
    assert balanced_weights(labels_of(rows)).tolist() == [1 / 3] * 9
    assert len(list(rows)) == 9


class Framed(OfFrame):
    """The frame with another column."""

    def __init__(self, column: Any) -> None:
        super().__init__()
        self.column = column

    def datasets(self) -> Datasets:
        datasets = super().datasets()
        return Datasets(datasets.train.assign(extra=self.column), datasets.val)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "missing"),
        ("<NA>", "missing"),
        (datetime(2026, 1, 2), "a time"),
        (Decimal("1.5"), "a decimal"),
        ({1, 2}, r"\bset\b"),
    ],
)
def test_a_value_that_no_batch_can_have_is_named_with_its_column_and_row(value: Any, words: str) -> None:
    import pandas

    column = pandas.Series(["text"] * 50 + [pandas.NA if value == "<NA>" else value] * 10, index=[5] * 60)
    with pytest.raises(DataError, match=rf"'extra' .*\b50 .*{words}"):
        lockstep.plan(Framed(column.to_numpy(dtype=object)))
    samples = [{"x": 1.0, "extra": [1]}, {"x": 2.0, "extra": [pandas.NA if value == "<NA>" else value]}]
    with pytest.raises(SampleError, match=rf"'extra'\[0\] .*\b1 .*{words}"):
        Reader(samples, default_collate, 1).batch(0, np.array([0, 1]), 0)


def test_missing_texts_and_dates_of_a_frame_are_named() -> None:
    import pandas

    for column in (pandas.Series(["a"] * 59 + [None], dtype="str"), pandas.date_range("2026-01-01", periods=60)):
        with pytest.raises(DataError, match="'extra' "):
            lockstep.plan(Framed(np.asarray(column)))
    lockstep.plan(Framed(["a"] * 60))
    lockstep.plan(Framed([[1, 2]] * 60))


def test_a_column_name_twice_is_refused() -> None:
    import pandas

    frame = pandas.DataFrame([[1.0, 2.0, 3]], columns=["x", "x", "label"])
    with pytest.raises(DataError, match=r"'x' .*DataFrame"):
        by_row(frame)
    arrow = pytest.importorskip("pyarrow")
    with pytest.raises(DataError, match=r"'x' .*Table"):
        by_row(arrow.Table.from_arrays([arrow.array([1]), arrow.array([2])], names=["x", "x"]))


def test_frames_of_other_libraries_and_series_are_rows() -> None:
    import pandas

    arrow = pytest.importorskip("pyarrow").table({"x": [1.5, 2.5], "text": ["a", "b"]})
    assert list(by_row(arrow)) == [{"x": 1.5, "text": "a"}, {"x": 2.5, "text": "b"}]
    assert by_row(pandas.Series([4, 5], index=[7, 7])).tolist() == [4, 5]

    class DataFrame:  # of polars
        def get_columns(self) -> list[Any]:
            return [pandas.Series([3, 4], name="x")]

        def __len__(self) -> int:
            return 2

    DataFrame.__module__ = "polars.dataframe.frame"
    assert list(by_row(DataFrame())) == [{"x": 3}, {"x": 4}]


class Pairs(Sampler[Any]):
    """Pairs of samples, as of one class."""

    def __init__(self, indices: list[int]) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[Any]:
        return iter([self.indices])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ((np.zeros((9, 2)), torch.zeros(9)), r"\btuple .*\b2 arrays .*\b9 rows"),
        ({"x": np.zeros((9, 2))}, r"\bdict .*\b1 array .*\b9 rows"),
        ("data/train.csv", r"is a text: 'data/train.csv'"),
        (DataLoader([1, 2]), r"DataLoader\nwhy: .*\nfix: "),  # type: ignore[arg-type]
        (
            DataLoader([1, 2], batch_sampler=Pairs([0, 1])),  # type: ignore[arg-type]
            r"\bPairs\b.* iterable",
        ),
        (DataLoader([1, 2], sampler=WeightedRandomSampler([1, 2], 2)), "weights=sampler"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_data_set_is_refused(wrong: Any, words: str) -> None:
    with pytest.raises((DataError, TaskError), match=words):
        by_row(wrong)
    samples = (torch.zeros(3), torch.zeros(3), torch.zeros(3))
    assert by_row(samples) is samples, "three samples of three numbers"


def test_an_array_that_torch_cannot_take_is_read_row_by_row() -> None:
    backwards, foreign = np.arange(8).reshape(4, 2)[::-1], np.arange(8).reshape(4, 2).astype(">i8")
    reader = Reader(backwards, default_collate, 1)
    assert reader.batch(0, np.array([0, 3]), 0).tolist() == [[6, 7], [0, 1]]
    with pytest.raises(SampleError, match="byte order"):
        Reader(foreign, default_collate, 1).batch(0, np.array([0, 3]), 0)
    for array in (backwards, foreign):
        with pytest.raises(DataError, match="cannot be a tensor"):
            ArrayDataset(array)


def test_a_sample_that_is_none_is_named() -> None:
    with pytest.raises(SampleError, match=r"sample 2 .*\bNone\b"):
        Reader([1, 2, None, 3], default_collate, 1).batch(0, np.array([3, 2, 0]), 0)


def test_a_length_that_is_none_is_told() -> None:
    class Gone(Toy):
        def datasets(self) -> Datasets:
            class Rows:
                def __len__(self) -> int:
                    raise OSError("the database is gone")

                def __getitem__(self, index: int) -> int:
                    return index

            return Datasets(Rows())

    with pytest.raises(DataError, match=r"\bRows\b.*\nwhy: OSError: "):
        lockstep.plan(Gone())
