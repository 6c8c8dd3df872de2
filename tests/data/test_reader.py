"""Reading samples one by one or gathered, what they draw, and their dtypes, which do not depend on the other rows."""

from __future__ import annotations

import itertools
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

import lockstep
from lockstep import ArrayDataset
from lockstep.data.arrays import by_row
from lockstep.data.reader import Reader
from lockstep.engine.training_data import check_frames
from lockstep.errors import DataError, LockstepError, SampleError
from lockstep.readers.columns import ParquetFiles
from lockstep.readers.records import CsvFiles, JsonLines, TarShards


class Drawing(Dataset[Tensor]):
    """Samples that are what they draw."""

    def __init__(self, draw: Callable[[int], Any], samples: int = 60) -> None:
        self.draw, self.samples = draw, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.as_tensor(self.draw(index), dtype=torch.float64)


def everything(index: int) -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.randn(()))]


def rarely(index: int) -> list[float]:
    """First draws when the first batches have shown that it does not."""
    return [random.random() if index == 41 else 0.0, np.random.rand() if index in (43, 57) else 0.0]


def read(data: Any, order: np.ndarray, size: int, seed: int = 3, collate: Any = default_collate) -> list[Tensor]:
    """Every sample, by index."""
    reader, found = Reader(data, collate, seed), [torch.empty(0)] * len(order)
    for start in range(0, len(order), size):
        indices = order[start : start + size]
        for index, row in zip(indices.tolist(), reader.batch(1, indices, start), strict=True):
            found[index] = row
    return found


@pytest.mark.parametrize("draw", [everything, rarely])
def test_what_a_sample_draws_is_its_own_however_it_is_read(draw: Callable[[int], Any]) -> None:
    data, straight = Drawing(draw), np.arange(60)
    alone = torch.stack(read(data, straight, 1))
    mixed = np.random.default_rng(0).permutation(60)
    whole = Subset(data, range(60))
    for found in (read(data, mixed, 7), read(data, straight, 60), read(whole, mixed, 16)):
        assert torch.equal(torch.stack(found), alone)
    if draw is everything:
        assert len(alone.unique()) == alone.numel(), "no number twice, whoever draws it"
        assert not torch.isclose(torch.stack(read(data, straight, 8, seed=4)), alone).any()


def test_reading_leaves_the_generators_of_the_process_as_they_were() -> None:
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    random.gauss(0, 1)  # a second number waits
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    data, straight = Drawing(everything), np.arange(60)
    read(data, straight, 8)
    read(data, straight, 8, collate=lambda samples: [sample + np.random.randn() for sample in samples])
    assert random.getstate() == states[0]
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), states[1], strict=True))
    assert torch.equal(torch.get_rng_state(), states[2])
    read(Drawing(rarely), straight, 8)
    assert random.getstate() == states[0]
    bits = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.Philox(5))
    try:
        before = repr(np.random.get_state(legacy=False))
        assert torch.equal(torch.stack(read(data, straight, 8)), torch.stack(read(data, straight, 1)))
        assert repr(np.random.get_state(legacy=False)) == before
    finally:
        np.random.set_bit_generator(bits)


def test_what_collate_draws_belongs_to_the_batch() -> None:
    def mixup(samples: list[Tensor]) -> Tensor:
        return torch.stack(samples) + random.random()

    data, indices = Drawing(lambda index: float(index)), np.arange(4)
    first = Reader(data, mixup, 3)
    batches = [first.batch(0, indices, position) for position in (0, 4, 8)]
    again = Reader(data, mixup, 3)
    assert torch.equal(again.batch(0, indices, 8), batches[2])
    assert torch.equal(again.batch(0, indices, 0), batches[0])
    assert len({float(batch[0]) for batch in batches}) == 3


def test_who_draws_nothing_is_not_seeded() -> None:
    def seeds(draw: Callable[[int], Any]) -> list[set[Any]]:
        """Of Python, NumPy and torch: those that samples of a later batch are read with."""

        def recorded(index: int) -> Any:
            found.append((index, random.getstate()[1], np.random.get_state()[1].tobytes(), torch.initial_seed()))
            return draw(index)

        found: list[Any] = []
        reader = Reader(Drawing(recorded), default_collate, 3)
        for position in (0, 8):
            found.clear()
            reader.batch(0, np.arange(8), position)
        return [set(column) for column in list(zip(*found, strict=True))[1:]]

    assert [len(column) for column in seeds(lambda index: random.random())] == [8, 1, 1]
    assert [len(column) for column in seeds(lambda index: 0.0)] == [1, 1, 1]


class Keyed(Drawing):
    def sample(self, index: int, rng: np.random.Generator) -> tuple[int, Tensor]:
        return index, torch.as_tensor(rng.random(2))


def test_sample_with_a_generator_is_found_behind_subsets_and_concatenations() -> None:
    inner = Keyed(everything, 10)
    both = ConcatDataset([Subset(inner, [9, 8, 7]), Drawing(float, 2), inner])
    reader = Reader(Subset(both, [0, 5, 14]), default_collate, 3)
    indices, drawn = reader.batch(0, np.arange(3), 0)
    assert indices.tolist() == [9, 0, 9]
    assert len(drawn.unique()) == 6, "one sample in two places draws for each"
    plain, _ = Reader(Subset(inner, [4]), default_collate, 3).batch(0, np.arange(1), 0)
    assert plain.tolist() == [4]


class Changed(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return tuple(tensor[index] + 1 for tensor in self.tensors)


def gathered() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(40, 3, 5, 4, generator=generator)
    labels = torch.arange(40)
    kinds = [torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.complex64, torch.int32]
    tensors = TensorDataset(images, labels, *(images[..., 0].to(kind) for kind in kinds))
    array = np.random.default_rng(0).random((40, 6))
    half = TensorDataset(images[:20], labels[:20])
    return {
        "tensors": tensors,
        "channels last": TensorDataset(images.to(memory_format=torch.channels_last), images.permute(0, 2, 3, 1)),
        "strided": TensorDataset(images[:, ::2], labels.expand(3, 40).T),
        "subset": Subset(tensors, [3, 1, 39, *range(37)]),
        "subset of a subset": Subset(Subset(tensors, range(39, -1, -1)), torch.arange(40)),  # type: ignore[arg-type]
        "concatenation": ConcatDataset([half, Subset(TensorDataset(images, labels), range(0, 40, 2))]),
        "arrays": ConcatDataset([ArrayDataset(images[:20]), ArrayDataset(images[20:])]),
        "array": array.astype(np.float32),
        "integers": (array * 99).astype(np.int64),
        "tensor": images,
    }


def test_a_hugging_face_data_set_in_torch_format_is_gathered() -> None:
    """Where that package is installed."""
    data = pytest.importorskip("datasets").Dataset.from_dict({"x": [[1.5, n] for n in range(9)], "y": list(range(9))})
    data = data.with_format("torch")
    reader = Reader(data, default_collate, 3)
    batch, expected = reader.batch(0, np.array([5, 0]), 0), default_collate([data[5], data[0]])
    assert reader.gathers
    assert batch.keys() == expected.keys()
    assert all(torch.equal(batch[name], expected[name]) and batch[name].dtype == expected[name].dtype for name in batch)


@pytest.mark.parametrize("name", gathered())
def test_a_gather_gives_what_default_collate_makes_of_the_samples(name: str) -> None:
    data = gathered()[name]
    reader = Reader(data, default_collate, 3)
    assert reader.gathers
    for indices in (np.array([5, 0, 39, 5, 21]), np.arange(20, 24), np.array([17])):
        batch, expected = reader.batch(0, indices, 0), default_collate([data[int(i)] for i in indices])
        assert type(batch) is type(expected)
        pairs = zip(batch, expected, strict=True) if isinstance(batch, list) else [(batch, expected)]
        for ours, theirs in pairs:
            assert ours.dtype == theirs.dtype
            assert ours.is_contiguous()
            assert torch.equal(ours, theirs)
    mine = Reader(data, lambda samples: len(samples), 3)
    assert not mine.gathers
    assert mine.batch(0, np.arange(7), 0) == 7, "a task's own collate is asked"


def test_a_gather_reads_what_is_there_now() -> None:
    """As a hook may have changed it, or a curriculum."""
    data = TensorDataset(torch.zeros(4))
    subset = Subset(data, [0, 1])
    reader = Reader(subset, default_collate, 3)
    reader.batch(0, np.arange(2), 0)
    data.tensors[0][3] = 7
    subset.indices = [2, 3]
    assert reader.batch(0, np.arange(2), 0)[0].tolist() == [0, 7]


@pytest.mark.parametrize(
    "data",
    [
        Changed(torch.arange(9.0)),
        TensorDataset(torch.arange(9.0, requires_grad=True)),
        TensorDataset(torch.eye(9).to_sparse()),
        ConcatDataset([TensorDataset(torch.zeros(2)), TensorDataset(torch.zeros(2), torch.zeros(2))]),
        ConcatDataset([TensorDataset(torch.zeros(2)), TensorDataset(torch.zeros(2, dtype=torch.int64))]),
        np.arange(9.0),
        [torch.zeros(2)] * 9,
    ],
)
def test_what_may_be_something_else_is_read_sample_by_sample(data: Any) -> None:
    reader = Reader(data, default_collate, 3)
    assert not reader.gathers
    if type(data) is Changed:
        assert reader.batch(0, np.array([2, 4]), 0)[0].tolist() == [3, 5]


def test_samples_before_the_first_are_those_at_the_end() -> None:
    """As Python has it; a gather has not."""
    data = Subset(TensorDataset(torch.arange(9)), [-1, 0])
    assert Reader(data, default_collate, 3).batch(0, np.arange(2), 0)[0].tolist() == [8, 0]


def broken(error: type[Exception]) -> Callable[[int], Any]:
    def draw(index: int) -> float:
        if index == 41:
            raise error("there is no such record")
        return 0.0

    return draw


@pytest.mark.parametrize("error", [StopIteration, IndexError, KeyError])
@pytest.mark.parametrize("seen", [0, 8])
def test_an_error_names_the_sample_and_the_data_set(error: type[Exception], seen: int) -> None:
    data = Drawing(broken(error))
    reader = Reader(data, default_collate, 3)
    reader.batch(0, np.arange(seen, seen + 1), 0)
    with pytest.raises(SampleError, match=r"sample 41 .*\bDrawing\b") as caught:
        reader.batch(0, np.arange(40, 44), 0)
    assert error.__name__ in caught.value.why
    assert "test_reader.py" in caught.value.why
    behind = Reader(Subset(data, range(30, 60)), default_collate, 3)
    behind.batch(0, np.arange(1), 0)
    with pytest.raises(SampleError, match=r"sample 11 .*\bSubset \(sample 41 .*\bDrawing\)"):
        behind.batch(0, np.arange(10, 13), 0)


def test_samples_that_do_not_fit_together_are_named() -> None:
    reader = Reader(Drawing(lambda index: [0.0] * index), default_collate, 3)
    with pytest.raises(SampleError, match=r"samples 1, 2 .*\bDrawing\b"):
        reader.batch(0, np.array([1, 2]), 0)


def test_a_sample_that_is_no_tensor_is_answered_with_what_makes_a_batch() -> None:
    reader = Reader([object()] * 3, default_collate, 3)
    with pytest.raises(SampleError, match="object") as caught:
        reader.batch(0, np.array([1, 2]), 0)
    assert "Task.collate" in caught.value.fix


class Buffer(Drawing):
    """A replay buffer: its own ``sample`` is no sample of a data set."""

    def sample(self, number: int, replace: bool = False) -> list[int]:
        raise AssertionError("this is not ours")


class WithDefault(Drawing):
    def sample(self, index: int, rng: np.random.Generator | None = None) -> float:
        assert rng is not None
        return rng.random()


class Behind:
    """Whatever the data set within has."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, index: int) -> Any:
        return self._inner[index]


def test_a_sample_method_is_ours_by_its_signature() -> None:
    assert read(Behind(Buffer(float, 3)), np.arange(3), 3) == [0.0, 1.0, 2.0]
    assert read(Behind(WithDefault(float, 3)), np.arange(3), 3) != [0.0, 1.0, 2.0]
    assert read(Behind(Drawing(float, 3)), np.arange(3), 3) == [0.0, 1.0, 2.0]
    assert read(Buffer(float, 3), np.arange(3), 3) == [0.0, 1.0, 2.0]
    assert read(WithDefault(float, 3), np.arange(3), 3) != [0.0, 1.0, 2.0]


# Dtypes.

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
    pytest.importorskip("pyarrow.parquet")
    values = {"list": [[1, 2], [3, None]], "fixed": [[1, 2], [3, None]], "struct": [{"a": 1}, {"a": None}]}[where]
    column = pa.array(values, pa.list_(pa.int64(), 2) if where == "fixed" else None)
    pa.parquet.write_table(pa.table({"x": column}), tmp_path / "0.parquet")
    with pytest.raises(DataError, match=r"'x'.*sample 1 .*\bNone\b"):
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
