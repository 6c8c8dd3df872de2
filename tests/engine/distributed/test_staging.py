"""Nested batches keep their shape on the way to a device."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence

from lockstep.data.loader import _pinned
from lockstep.engine.distributed.staging import to_device


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


@dataclass(frozen=True)
class Graph:
    nodes: Tensor
    name: str
    edges: Any = None


class Blocking:
    """Moves in place, and knows nothing of asynchronous copies."""

    place = "cpu"

    def to(self, device: torch.device) -> None:
        self.place = str(device)

    def pin_memory(self) -> Blocking:
        self.place = "pinned"
        return self


class Named(dict[str, Any]):
    owner = "me"


class Rows(list[Any]):
    pass


def test_containers_keep_their_type_and_the_batch_stays_as_it_is() -> None:
    meta, zeros = torch.device("meta"), torch.zeros
    packed = pack_padded_sequence(zeros(3, 2, 4), torch.tensor([3, 2]))
    named = Named(value=zeros(1))
    named.owner = "you"
    batch: list[Any] = [
        packed,
        Graph(zeros(2), "a", edges=[zeros(3), None]),
        defaultdict(list, {"x": zeros(1)}),
        OrderedDict(b=zeros(1), a="text"),
        UserDict({"x": (zeros(1), None)}),
        named,
        Rows([zeros(1), {"deep": [zeros(1)]}]),
        MappingProxyType({"x": zeros(1)}),
        Blocking(),
    ]
    moved = to_device(batch, meta)
    assert [type(part) for part in moved] == [*(type(part) for part in batch[:7]), dict, Blocking]
    assert moved[0].data.device == meta and packed.data.device.type == "cpu"
    assert moved[1].nodes.device == moved[1].edges[0].device == meta and moved[1].name == "a"
    assert batch[1].nodes.device.type == batch[1].edges[0].device.type == "cpu"
    assert moved[2]["x"].device == meta and moved[2]["absent"] == []
    assert list(moved[3]) == ["b", "a"] and moved[3]["b"].device == meta
    assert moved[4]["x"][0].device == meta and batch[4]["x"][0].device.type == "cpu"
    assert moved[5].owner == "you" and moved[5]["value"].device == meta and named["value"].device.type == "cpu"
    assert moved[6][1]["deep"][0].device == meta and batch[6][0].device.type == "cpu"
    assert moved[7]["x"].device == meta
    assert moved[8].place == "meta"


def test_pinning_walks_a_batch_in_the_same_way() -> None:
    pinned = _pinned({"graph": Graph(Blocking(), "a", edges=(Blocking(), "text")), "none": None})  # type: ignore[arg-type]
    assert isinstance(pinned["graph"], Graph)
    assert pinned["graph"].nodes.place == pinned["graph"].edges[0].place == "pinned"  # type: ignore[attr-defined]
