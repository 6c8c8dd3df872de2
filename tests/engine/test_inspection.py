"""What the plan learns of a task."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from lockstep import ArrayDataset, Datasets
from lockstep.config import resolve
from lockstep.config.sections import DistributedConfig, HardwareConfig
from lockstep.data.order import ORDER_VERSION
from lockstep.data.requests import BatchRequest, InOrder
from lockstep.engine.blueprint import blueprint
from lockstep.engine.diagnostics.step_trace import TracedSource
from lockstep.engine.fingerprint import examined, same_data
from lockstep.engine.inspection import QUICK_S, has_quick_samples, inspect_task, multiply_adds
from lockstep.engine.resume import check_fits
from lockstep.engine.trained import refuse_meta
from lockstep.engine.trial_optimizer import optimizer_facts
from lockstep.errors import CheckpointError, TaskError
from lockstep.hardware.resolve import resolve_placement
from lockstep.hardware.world import World
from lockstep.launch.prepare import prepare
from lockstep.planning import TaskFacts, make_plan
from tests.hardware.machines import machine
from tests.sequences import Sequences
from tests.toys import Toy, TwoGroups


class Noisy:
    """Augments from the global generators, as many data sets do."""

    def __init__(self, shift: float = 0.0) -> None:
        self.shift = shift

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float, float]:
        return torch.rand(3) + self.shift + index, random.random(), float(np.random.rand())


def test_random_augmentation_does_not_change_the_fingerprint_nor_the_callers_generators() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    assert examined(Noisy())[0] == examined(Noisy())[0]
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()


def test_other_data_have_another_fingerprint() -> None:
    assert examined(Noisy())[0] != examined(Noisy(shift=0.5))[0]


def test_numbers_and_tensors_have_the_fingerprint_that_older_runs_wrote_down() -> None:
    """Else those runs would be told that their data have changed."""
    sample = {"tensor": torch.arange(6.0).reshape(2, 3).T, "array": np.arange(4, dtype=np.int16), "rest": [True, "é"]}
    assert examined([sample, (1.5, None, b"raw")])[0] == "2:6671a6456f019fe4"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_type_that_numpy_lacks_is_told_by_its_values(dtype: torch.dtype) -> None:
    values = torch.linspace(-2, 2, 24).reshape(4, 6)
    ours = examined(ArrayDataset(values.to(dtype), values[:, 0].to(dtype)))[0]
    assert ours == examined(ArrayDataset(values.to(dtype).T.contiguous().T, values[:, 0].to(dtype)))[0]
    assert ours != examined(ArrayDataset((values + 1).to(dtype), values[:, 0].to(dtype)))[0]


def test_objects_are_told_by_their_values_and_not_by_where_they_lie() -> None:
    def dataset(word: str, *numbers: int) -> list[Any]:
        texts = np.array([[f"{word} {n}", None] for n in range(3)], dtype=object)
        return [(texts, set(numbers), {"deep": frozenset([frozenset(numbers), word])})]

    # 0 and 8 take turns in being the first item of a small set, as they were added.
    one, same = dataset("word", 0, 8), dataset("word", 8, 0)
    assert examined(one)[0] == examined(same)[0]
    others = [dataset("ward", 0, 8), dataset("word", 0, 9), dataset("word", 0)]
    assert len({examined(data)[0] for data in [one, *others]}) == 4


@dataclass
class Item:
    """A sample of a class of the user's own."""

    values: torch.Tensor
    names: list[str]
    other: Any = None


def test_equal_objects_have_one_hash_whatever_parts_they_share() -> None:
    """Of which the bytes of a pickle depend; and a slice is not hashed with all of its storage."""
    word, table = "".join(["wo", "rd"]), torch.arange(6.0)
    shared = Item(table[:3], [word, word])
    apart = Item(table[:3].clone(), ["".join(["wo", "rd"]), word])
    shared.other, apart.other = shared, apart
    assert examined([shared])[0] == examined([apart])[0]
    others = [Item(table[3:], [word, word]), Item(table[:3], [word, "ward"]), Item(table[:3], [word], Item)]
    assert len({examined([item])[0] for item in [shared, *others]}) == 4


class Whole:
    """Gives finished batches: a dictionary with texts, or an object that has no rows."""

    def __init__(self, kind: str, shift: float = 0.0) -> None:
        self.kind, self.shift = kind, shift

    def __len__(self) -> int:
        return 4

    def __getitems__(self, indices: Any) -> Any:
        values = torch.arange(4.0)[torch.as_tensor(indices)] + self.shift
        if self.kind == "packed":
            return pack_sequence([values])
        texts = [f"text {int(value)}" for value in values]
        return {"text": texts} if self.kind == "texts" else Item(values, texts)


@pytest.mark.parametrize("kind", ["texts", "object", "packed"])
def test_finished_batches_of_any_kind_are_hashed_by_sample(kind: str) -> None:
    def hashes(source: TracedSource, *spans: tuple[int, int]) -> int:
        return sum(source.batch(BatchRequest(0, 0, *span)).digest for span in spans) % 2**64

    source = TracedSource(Whole(kind), list, 0, InOrder())
    assert hashes(source, (0, 4)) == hashes(source, (0, 1), (1, 4))
    assert hashes(source, (0, 2)) != hashes(source, (2, 4))
    if kind != "packed":  # which has no rows: its samples are known by their indices
        assert hashes(source, (0, 4)) != hashes(TracedSource(Whole(kind, 1.0), list, 0, InOrder()), (0, 4))


class Vocabulary:
    """As a token or an annotation may be: a set in an object."""

    def __init__(self, *words: Any) -> None:
        self.words = set(words)


def test_sets_in_objects_are_hashed_alike_in_whatever_order_they_lie() -> None:
    one, same, other = ([(1.0, Vocabulary(*numbers))] for numbers in [(0, 8), (8, 0), (0, 9)])
    assert examined(one)[0] == examined(same)[0] != examined(other)[0]


class Unseeded(Noisy):
    """Draws from a generator that nobody can seed."""

    def __getitem__(self, index: int) -> Any:
        return {"index": index + self.shift, "noise": np.random.default_rng().random()}


def test_what_differs_each_time_is_named_and_left_out() -> None:
    found, unstable = examined(Unseeded())
    assert unstable == ("the field 'noise'",)
    assert found == examined(Unseeded())[0] != examined(Unseeded(shift=1))[0]
    assert examined(Noisy())[1] == ()
    assert same_data(found, found)
    assert not same_data(found, examined(Unseeded(shift=1))[0])
    # A run from before this was looked at, whose hash was another one each time.
    assert same_data("40:0123456789abcdef", found)
    assert not same_data("41:0123456789abcdef", found)
    facts = TaskFacts(name="toy", train_samples=100, fingerprint=found, unstable=unstable)
    placement = resolve_placement(HardwareConfig(selected_devices=["cpu"]), DistributedConfig(), World(), machine(1))
    notes = make_plan(resolve({}), placement, facts, cores=4).notes
    assert any("'noise'" in note.text for note in notes)


class OnDisk:
    """Fixed-size records behind one file handle, which is opened at once or with the first sample."""

    def __init__(self, path: Path, *, lazy: bool) -> None:
        self.path, self.file = path, None if lazy else path.open("rb")

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> float:
        self.file = self.file or self.path.open("rb")
        self.file.seek(1000 * index)
        return float(self.file.read(1000).split()[0])

    def __del__(self) -> None:
        if self.file is not None:
            self.file.close()


@pytest.mark.parametrize("lazy", [False, True])
def test_a_file_that_workers_would_read_through_one_handle_is_noticed(tmp_path: Path, lazy: bool) -> None:
    class Filed(Toy):
        opened = 0

        def datasets(self) -> Datasets:
            self.opened += 1
            return Datasets(OnDisk(tmp_path / "records", lazy=lazy))

    (tmp_path / "records").write_bytes(b"".join(f"{n} ".encode().ljust(1000) for n in range(40)))
    task = Filed()
    found = prepare(task, {"hardware": {"selected_devices": ["cpu"]}, "data": {"num_workers": 2}})
    assert (found.facts.read_file is None) == found.facts.opens_files == lazy
    assert task.opened == 1 + lazy
    if lazy:
        assert found.datasets.train.file is None, "each worker opens it itself"
    assert any(note.key == "file_shared" for note in found.plan.notes) != lazy
    default = prepare(task, {"hardware": {"selected_devices": ["cpu"]}}).plan
    assert lazy or default.loader.num_workers == 0
    assert found.facts.fingerprint == inspect_task(task, task.datasets(), "it").fingerprint


def test_the_samples_of_a_step_are_hashed_alike_however_they_are_divided() -> None:
    """By ``verify``; of a type that NumPy lacks, too."""
    values = torch.linspace(-2, 2, 24).reshape(4, 6).bfloat16()
    plain = TracedSource(ArrayDataset(values, torch.arange(4)), list, 0, InOrder())
    whole = plain.batch(BatchRequest(0, 0, 0, 4)).digest
    parts = [plain.batch(BatchRequest(0, 0, *span)).digest for span in ((0, 1), (1, 4))]
    assert sum(parts) % 2**64 == whole == replace(plain, arrangement="reversed").batch(BatchRequest(0, 0, 0, 4)).digest
    other = TracedSource(ArrayDataset(values + 1, torch.arange(4)), list, 0, InOrder())
    assert other.batch(BatchRequest(0, 0, 0, 4)).digest != whole


def test_samples_that_take_their_time_are_told_from_quick_ones() -> None:
    class Slow(Noisy):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, float, float]:
            time.sleep(10 * QUICK_S)
            return super().__getitem__(index)

    before = torch.random.get_rng_state()
    assert not has_quick_samples(Slow())
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(("quick", "workers"), [(True, 0), (False, 3)])
def test_workers_for_data_that_reading_opens_follow_from_the_cores(quick: bool, workers: int) -> None:
    placement = resolve_placement(HardwareConfig(selected_devices=["cpu"]), DistributedConfig(), World(), machine(1))
    facts = TaskFacts(name="toy", train_samples=100, quick_samples=quick, opens_files=True)
    plan = make_plan(resolve({}), placement, facts, cores=4)
    assert (plan.loader.num_workers, plan.loader.most_workers) == (workers, workers)
    assert ("less time than another process" in plan.decisions["workers"].reason) == (workers == 0)


class Graph(torch.nn.Module):
    """A graph convolution with a dense adjacency; a sample is the number of a node."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.eye(30))
        self.register_buffer("features", torch.randn(30, 4))
        self.register_buffer("mask", torch.ones(30, dtype=torch.bool))
        self.layer = torch.nn.Linear(4, 2, bias=False)


@pytest.mark.parametrize(
    ("model", "sample", "expected"),
    [
        (torch.nn.Linear(561, 6, bias=False), torch.zeros(1, 561), 561 * 6),
        (torch.nn.Conv1d(9, 4, 5, bias=False), np.zeros((9, 128)), 9 * 4 * 5 * 128),
        (torch.nn.Embedding(10, 4), {"tokens": [1, 2, 3], "label": 0}, 10 * 4 * 3),
        (torch.nn.Linear(4, 2), "text", 0),
        (Graph(), torch.tensor(3), 30 * 30 + 30 * 4 + 4 * 2),
    ],
)
def test_the_work_of_a_step_decides_over_its_threads(model: torch.nn.Module, sample: Any, expected: int) -> None:
    assert multiply_adds(model, [(sample, 0)]) == expected
    placement = resolve_placement(HardwareConfig(selected_devices=["cpu"]), DistributedConfig(), World(), machine(1))
    for scale, threads in ((1, 4 if expected == 0 else 1), (10_000, 4)):
        facts = TaskFacts(name="toy", train_samples=100, multiply_adds=expected * scale)
        assert make_plan(resolve({}), placement, facts, cores=4).threads == threads
    assert make_plan(resolve({}), placement, facts, cores=4, preset=(3, "OMP_NUM_THREADS")).threads == 3


class ByValue(Toy):
    """A rate that is computed from the weights, which a model without memory lacks."""

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        largest = max(parameter.abs().max().item() for parameter in model.parameters())
        return torch.optim.SGD(model.parameters(), lr=0.25 if 0 < largest < 10 else 1.0)


class Undecided(Toy):
    def optimizer(self, model: torch.nn.Module) -> None:
        return None


@pytest.mark.parametrize(("kind", "lr"), [(Toy, None), (Undecided, None), (TwoGroups, 0.1), (ByValue, 0.25)])
def test_the_rate_of_a_tasks_own_optimizer_is_known_before_it_trains(kind: type[Toy], lr: float | None) -> None:
    task = kind()
    before = torch.random.get_rng_state()
    assert optimizer_facts(task, blueprint(task), task) == (lr, False)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_monitor_without_a_direction_is_refused() -> None:
    class Odd(Toy):
        monitor = ("val_accuracy", "highest")

    with pytest.raises(TaskError, match=r"monitor .*'highest'"):
        inspect_task(Odd(), Odd().datasets(), "odd")


class Keeping(Toy):
    """Keeps its model, one of its layers, and another in a list, and trains the layer that it has kept."""

    net: Any = None

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.layers: list[Any] = []

    def model(self) -> torch.nn.Module:
        if self.net is None:
            self.net = super().model()
            self.head = self.net[4]
            self.layers.append(self.net[0])
        return self.net

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.head.parameters(), lr=0.25)


def test_what_a_task_keeps_of_its_model_has_memory() -> None:
    task = Keeping()
    assert inspect_task(task, task.datasets(), "keeping").optimizer_lr == 0.25
    assert blueprint(task)[0].weight.is_meta
    assert task.net is None and task.layers == []
    assert not task.model()[0].weight.is_meta and len(task.layers) == 1


class Lock:
    """Is held until it is deleted."""

    held = False

    def __init__(self) -> None:
        if Lock.held:
            raise BlockingIOError("it is locked")
        self.mine = Lock.held = True

    def __del__(self) -> None:
        Lock.held = Lock.held and not hasattr(self, "mine")


class NeedsValues(Toy):
    """Makes its model under a lock, keeps a layer in a list; ``reader`` reads values, which the meta device lacks."""

    reader = "model"

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.layers: list[Any] = []

    def model(self) -> torch.nn.Module:
        lock, net = Lock(), super().model()
        self.layers.append(net[4])
        assert lock.mine and (self.reader != "model" or net[4].weight.sum().item() < 100)
        return net

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        [head] = self.layers
        assert self.reader != "optimizer" or head.weight.sum().item() < 100
        return torch.optim.SGD(head.parameters(), lr=0.25)


@pytest.mark.parametrize("reader", ["model", "optimizer"])
def test_nothing_of_a_first_try_without_values_reaches_the_second(reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NeedsValues, "reader", reader)
    task = NeedsValues()
    assert inspect_task(task, task.datasets(), "needs values").optimizer_lr == 0.25
    assert task.layers == []


def test_a_model_without_memory_is_refused() -> None:
    with pytest.raises(TaskError, match=r"0\.weight .*\bmeta\b"):
        refuse_meta(blueprint(Toy()))


def test_a_checkpoint_of_another_order_does_not_fit() -> None:
    """Of data that a run accepts; a resume refuses other settings of the order before."""
    plan = prepare(Sequences(), {"hardware": {"selected_devices": ["cpu"]}}).plan
    manifest = {
        "fingerprint": plan.task.fingerprint,
        "order_version": ORDER_VERSION,
        "order": plan.order.model_dump(),
        "seed": plan.seed,
    }
    check_fits(manifest, plan)
    for other in ({"order": {}}, {"seed": plan.seed + 1}, {"order_version": ORDER_VERSION - 1}):
        with pytest.raises(CheckpointError, match=r"order|seed"):
            check_fits({**manifest, **other}, plan)
