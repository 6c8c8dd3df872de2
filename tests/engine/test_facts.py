"""What the plan learns of a task."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from lockstep.config import resolve
from lockstep.config.sections import DistributedConfig, HardwareConfig
from lockstep.data.arrays import ArrayDataset
from lockstep.engine.facts import QUICK_S, fingerprint, gives_whole_batches, has_quick_samples
from lockstep.hardware.resolve import resolve_placement
from lockstep.hardware.world import World
from lockstep.plan import TaskFacts, make_plan
from tests.hardware.machines import machine


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
    assert fingerprint(Noisy()) == fingerprint(Noisy())
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()


def test_other_data_have_another_fingerprint() -> None:
    assert fingerprint(Noisy()) != fingerprint(Noisy(shift=0.5))


def test_a_list_of_samples_is_no_whole_batch() -> None:
    arrays = ArrayDataset(torch.zeros(40, 3))
    assert gives_whole_batches(arrays)
    assert gives_whole_batches(Subset(arrays, range(10)))
    assert not gives_whole_batches(Noisy())
    assert not gives_whole_batches(Subset(Noisy(), range(10))), "torch gives every Subset a __getitems__"


def test_samples_that_take_their_time_are_told_from_quick_ones() -> None:
    class Slow(Noisy):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, float, float]:
            time.sleep(10 * QUICK_S)
            return super().__getitem__(index)

    before = torch.random.get_rng_state()
    assert not has_quick_samples(Slow())
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("device", "quick", "workers"), [("cpu", True, 0), ("cpu", False, 3), ("gpu:0", True, 3), ("gpu:0", False, 3)]
)
def test_quick_samples_need_no_process_beside_a_step_on_the_cpu(device: str, quick: bool, workers: int) -> None:
    placement = resolve_placement(HardwareConfig(selected_devices=[device]), DistributedConfig(), World(), machine(1))
    facts = TaskFacts(name="toy", train_samples=100, quick_samples=quick)
    plan = make_plan(resolve({}), placement, facts, cores=4)
    assert plan.loader.num_workers == workers
    (reason,) = [choice.reason for choice in plan.choices if choice.name == "loader"]
    assert ("quickly made" in reason) == (workers == 0)
