"""What the plan learns of a task."""

from __future__ import annotations

import random

import numpy as np
import torch

from lockstep.engine.facts import fingerprint


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
