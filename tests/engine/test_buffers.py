"""Buffers that change in training are merged as declared, or refused with their name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lockstep.engine.buffers import Buffers
from lockstep.errors import UnsupportedError
from tests.gloo import run_ranks


class Counter(nn.Module):
    value: Tensor

    def __init__(self, reduction: dict[str, str] | None = None) -> None:
        super().__init__()
        self.register_buffer("value", torch.full((2,), 10.0))
        if reduction is not None:
            self.buffer_reduction = reduction


def merged(rank: int, ranks: int, kind: str) -> list[float]:
    """Rank r adds r + 1; rank 0 has seen one sample, rank 1 three, the last one none."""
    module = nn.Sequential(Counter({"value": kind}))
    buffers = Buffers(module)
    module[0].value += rank + 1
    weight = [1.0, 3.0, 0.0][rank]
    if weight == 0.0:
        module[0].value.fill_(float("inf") if kind == "mean" else rank + 11)
    buffers.synchronise(weight, merge_statistics=False)
    return module[0].value.tolist()


@pytest.mark.parametrize(("kind", "expected"), [("mean", 11.75), ("sum", 16.0), ("max", 13.0)])
def test_declared_buffers_are_reduced_as_declared(kind: str, expected: float) -> None:
    assert run_ranks(merged, 3, kind) == [[expected, expected]] * 3


def differing(rank: int, ranks: int) -> str:
    module = Counter({"value": "same"})
    buffers = Buffers(module)
    buffers.synchronise(1.0, merge_statistics=False)
    module.value += rank
    try:
        buffers.synchronise(1.0, merge_statistics=False)
    except UnsupportedError as error:
        return error.what
    return ""


def test_buffers_declared_the_same_are_compared() -> None:
    assert all("value is declared the same" in text for text in run_ranks(differing, 2))


def test_a_changing_buffer_that_nobody_declared_is_refused_with_its_name() -> None:
    module = nn.Sequential(nn.Linear(1, 1), Counter())
    buffers = Buffers(module)
    buffers.synchronise(1.0, merge_statistics=False)
    module[1].value += 1
    with pytest.raises(UnsupportedError, match=r"1\.value changed in training"):
        buffers.synchronise(1.0, merge_statistics=False)
    with pytest.raises(UnsupportedError, match=r"1\.value"):
        buffers.refuse_changed()


@pytest.mark.parametrize("reduction", [{"valeu": "mean"}, {"value": "median"}])
def test_a_wrong_declaration_is_refused(reduction: dict[str, str]) -> None:
    with pytest.raises(UnsupportedError):
        Buffers(Counter(reduction))
