"""Nested batches keep their shape on the way to a device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.engine.transfer import to_device


class Pair(NamedTuple):
    inputs: Tensor
    labels: Tensor


class Movable:
    def __init__(self) -> None:
        self.place = "cpu"

    def to(self, device: torch.device, non_blocking: bool = False) -> Movable:
        self.place = str(device)
        return self


def test_tensors_and_movable_objects_go_and_the_rest_stays() -> None:
    meta = torch.device("meta")
    batch: Any = {"pair": Pair(torch.zeros(2), torch.ones(2)), "list": [torch.zeros(1), "text", None], "own": Movable()}
    moved = to_device(batch, meta)
    assert isinstance(moved["pair"], Pair)
    assert {tensor.device for tensor in (*moved["pair"], moved["list"][0])} == {meta}
    assert moved["list"][1:] == ["text", None]
    assert moved["own"].place == "meta"
    assert batch["pair"].inputs.device.type == "cpu"
