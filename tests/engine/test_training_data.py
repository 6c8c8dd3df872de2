"""The order of a plan, made from the task's lengths; data that change; what validation data may be."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lockstep
from lockstep.errors import CheckpointError, ConfigError, DataError
from lockstep.planning import OrderPlan
from lockstep.rundir.folder import RunDir
from tests.samples import samples_by_step
from tests.sequences import Sequences
from tests.toys import FEATURES, Toy, arrays

SAMPLES = 600
SETTINGS: dict[str, Any] = {
    "scheduler": {"name": "constant", "warmup_epochs": 0},
    "telemetry": {"record_samples": True, "progress": "off", "system_metrics": False},
}


class Long(Sequences):
    """Lengths are those of the data and ``added``, from the ``after``-th time that they are asked for."""

    added, after, asked, left_out = 0, 0, 0, 0

    class Config(Sequences.Config):
        samples: int = SAMPLES

    def lengths(self) -> Any:
        self.asked += 1
        lengths = self.train_data.lengths
        return (lengths + self.added * (self.asked > self.after))[self.left_out :]


def run_of(folder: Path, global_batch: int, **settings: Any) -> lockstep.Run:
    training = {"global_batch_size": global_batch, "epochs": 2, **settings.pop("training", {})}
    return lockstep.train(Long, {**SETTINGS, "training": training, **settings}, devices="cpu", save_dir=folder)


def windows(run: lockstep.Run, samples: int, steps: int) -> list[list[int]]:
    """The samples of the first ``steps`` steps in groups of ``samples``, each sorted."""
    drawn = [sorted(used.elements()) for _, (_, used) in sorted(samples_by_step(RunDir(run.run_dir)).items())][:steps]
    taken = [index for step in drawn for index in step]
    return [sorted(taken[first : first + samples]) for first in range(0, len(taken), samples)]


def test_the_order_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    once = {"training": {"max_steps": 4}}
    one = run_of(tmp_path / "one", 128, **once)
    other = run_of(tmp_path / "other", 64, training={"max_steps": 8})
    assert one.plan.order == other.plan.order == OrderPlan(window=512, block=64, lanes=8)
    assert windows(one, 128, 4) == windows(other, 128, 8)


def test_overfitting_takes_a_fixed_part_of_the_data_in_order_of_length(tmp_path: Path) -> None:
    settings = {"debug": {"overfit_batches": 5}, "data": {"bucket_window": 120, "bucket_block": 60}}
    run = run_of(tmp_path / "run", 24, **settings)
    assert run.plan.batch.samples == 120
    first, second = windows(run, 120, 10)
    assert first == second and len({*first}) == 120
    steps = windows(run, 24, 10)
    assert steps[:5] != steps[5:], "another order in each epoch"
    lengths = Sequences(Sequences.Config(samples=SAMPLES))
    lengths.datasets()
    spread = [np.ptp(lengths.train_data.lengths[indices]) for indices in steps]
    assert np.mean(spread) < 0.7 * np.ptp(lengths.train_data.lengths[first])


def test_lengths_that_change_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path / "run", 64, training={"max_steps": 1})
    with monkeypatch.context() as patched:
        patched.setattr(Long, "added", 1)
        assert lockstep.plan(Long, devices="cpu").task.fingerprint != run.plan.task.fingerprint
        with pytest.raises(CheckpointError, match="training data"):
            lockstep.Run(run.run_dir).resume(training={"max_steps": 2})
        patched.setattr(Long, "after", 1)
        with pytest.raises(DataError, match=r"Task\.lengths\(\)"):
            run_of(tmp_path / "other", 64, training={"max_steps": 1})
    monkeypatch.setattr(Long, "left_out", 1)
    with pytest.raises(DataError, match=f"{SAMPLES} samples"):
        lockstep.plan(Long, devices="cpu")


def test_a_resume_in_another_order_is_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 64, training={"max_steps": 1})
    with pytest.raises(ConfigError, match="bucketing"):
        lockstep.Run(run.run_dir).resume(data={"bucketing": "off"}, training={"max_steps": 2})
    assert lockstep.Run(run.run_dir).resume(training={"max_steps": 2}).step == 2


class Columns(UserDict[Any, Any]):
    """A mapping of columns that is one data set, like tensordict's TensorDict: torch reads its rows by __getitems__."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) if isinstance(index, str) else self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(self.data["x"][i], self.data["y"][i]) for i in indices]


@pytest.mark.parametrize("kind", ["mapping", "array", "tensor"])
def test_validation_data_may_be_a_tensor_an_array_or_a_mapping_of_columns(kind: str, tmp_path: Path) -> None:
    """The truth value of the first two is an error; the third is not several validation sets by name."""
    inputs, labels = arrays(32, 1)
    rows = torch.cat([inputs, labels[:, None]], 1)
    data = {"mapping": Columns(x=inputs, y=labels), "array": rows.numpy(), "tensor": rows}[kind]

    class Own(Toy):
        def datasets(self) -> lockstep.Datasets:
            return lockstep.Datasets(data, data, data)

        def loss(self, model: Any, batch: Any) -> lockstep.Loss:
            return super().loss(model, batch if kind == "mapping" else (batch[:, :-1], batch[:, -1].long()))

        def evaluate(self, model: Any, batch: Any) -> Any:
            return super().evaluate(model, batch if kind == "mapping" else (batch[:, :-1], batch[:, -1].long()))

    run = lockstep.train(Own(), devices="cpu", epochs=1, save_dir=tmp_path / "run")
    facts = run.plan.task
    assert facts.val_samples == facts.test_samples == 32
    assert [name for name in run.history[0] if name.endswith("_loss")] == ["train_loss", "val_loss"]


class Rows(UserDict[str, torch.Tensor]):
    """Iterating it gives rows, not keys, as of a TensorDict."""

    def __iter__(self) -> Any:
        return iter([self.data["x"][0]])

    def keys(self) -> Any:
        return self.data.keys()

    def to(self, *where: Any, **how: Any) -> Rows:
        return self


class SamplesOfColumns(Toy):
    def datasets(self) -> lockstep.Datasets:
        return lockstep.Datasets([Rows(x=x, y=y) for x, y in zip(*arrays(32, 1), strict=True)])


def test_samples_that_iterate_over_their_rows_are_planned_by_their_columns() -> None:
    multiply_adds = [lockstep.plan(task, devices="cpu").task.multiply_adds for task in (SamplesOfColumns(), Toy())]
    assert multiply_adds[0] == multiply_adds[1] > 0


class Batched:
    """Gives finished batches: a dictionary, or rows."""

    def __init__(self, kind: Any, shift: float) -> None:
        self.kind, self.shift = kind, shift
        self.inputs, self.labels = arrays(32, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index] + self.shift, self.labels[index]

    def __getitems__(self, indices: list[int]) -> Any:
        return self.kind(x=self.inputs[indices] + self.shift, y=self.labels[indices])


class OfBatches(Toy):
    def __init__(self, kind: Any, shift: float) -> None:
        super().__init__()
        self.data_of = Batched(kind, shift)

    def datasets(self) -> lockstep.Datasets:
        return lockstep.Datasets(self.data_of)

    def loss(self, model: Any, batch: Any) -> lockstep.Loss:
        return super().loss(model, (batch["x"], batch["y"]))


def test_a_batch_that_iterates_over_its_rows_is_compared_by_its_columns(tmp_path: Path) -> None:
    """As `lockstep verify` compares batches."""
    digests = []
    for number, (kind, shift) in enumerate(((Rows, 0.0), (dict, 0.0), (Rows, 1.0))):
        folder = tmp_path / str(number)
        lockstep.train(OfBatches(kind, shift), debug={"trace": "on"}, devices="cpu", max_steps=2, save_dir=folder)
        digests.append(np.load(folder / "trace-rank0.npz")["digest"].tolist())
    assert digests[0] == digests[1] != digests[2]


class Enormous:
    """More samples than 32 bits count."""

    def __len__(self) -> int:
        return 10**10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((FEATURES,), index / 1e10) + 0.1 * torch.randn(FEATURES), index % 3


class OfEnormous(Toy):
    def datasets(self) -> lockstep.Datasets:
        return lockstep.Datasets(Enormous())


def test_more_samples_than_32_bits_count(tmp_path: Path) -> None:
    run = lockstep.train(OfEnormous(), devices="cpu", max_steps=3, save_dir=tmp_path / "run", batch_size=16)
    assert run.step == 3 and run.plan.task.train_samples == 10**10
