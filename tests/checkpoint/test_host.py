"""Copies in host memory: independent, faithful, and cheap the second time."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lockstep.checkpoint.host import HostBuffers, to_host
from lockstep.errors import CheckpointError


def test_a_copy_does_not_change_when_training_goes_on() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    copy = to_host(state)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    moment = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    assert all(torch.equal(copy["model"][name], tensor) for name, tensor in before.items())
    assert torch.equal(copy["optimizer"]["state"][0]["exp_avg"], moment)
    assert copy["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=5), st.integers(2, 4))
def test_used_again_buffers_hold_the_newest_values(shapes: list[list[int]], times: int) -> None:
    buffers = HostBuffers()
    for n in range(times):
        state = {"tensors": [torch.full(shape, float(n)) for shape in shapes], "n": n}
        copy = to_host(state, buffers)
        assert copy["n"] == n and all(map(torch.equal, copy["tensors"], state["tensors"]))


def test_memory_is_used_again_until_a_shape_or_type_changes() -> None:
    buffers = HostBuffers()
    places = [to_host({"w": tensor}, buffers)["w"].data_ptr() for tensor in (torch.zeros(4000), torch.ones(4000))]
    assert places[0] == places[1]
    assert to_host({"w": torch.ones(40, 100)}, buffers)["w"].shape == (40, 100)
    assert to_host({"w": torch.ones(40, 100, dtype=torch.bfloat16)}, buffers)["w"].dtype == torch.bfloat16


def test_tied_tensors_stay_tied_and_others_stay_apart() -> None:
    buffers = HostBuffers()
    shared = torch.arange(4.0)
    for state in (
        {"a": shared, "b": shared, "part": shared[:2]},
        {"a": shared + 1, "b": shared + 2, "part": shared[:2]},
        {"a": shared, "b": shared, "part": shared[2:]},
    ):
        copy = to_host(state, buffers)
        assert all(torch.equal(copy[name], tensor) for name, tensor in state.items())
        assert (copy["a"] is copy["b"]) == (state["a"] is state["b"])


def test_places_with_like_names_do_not_share_memory() -> None:
    buffers = HostBuffers()
    state: dict[Any, Any] = {
        "a/b": torch.tensor([1.0]),
        "a": {"b": torch.tensor([2.0])},
        0: torch.tensor([3.0]),
        "0": torch.tensor([4.0]),
    }
    for _ in range(2):
        copy = to_host(state, buffers)
        assert [copy["a/b"].item(), copy["a"]["b"].item(), copy[0].item(), copy["0"].item()] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.tensor(True),
        torch.zeros(0, 4),
        torch.rand(3, 4).T,
        torch.rand(8)[::2],
        torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.rand(3).bfloat16(),
        torch.rand(1).expand(5),
        torch.rand(3, dtype=torch.complex64).conj(),
        nn.Parameter(torch.rand(3)),
    ],
)
def test_any_dense_tensor_is_copied_contiguous(tensor: Tensor) -> None:
    copy = to_host([tensor])[0]
    assert torch.equal(copy, tensor) and copy.is_contiguous() and not copy.requires_grad
    assert tensor.numel() == 0 or copy.data_ptr() != tensor.data_ptr()


def test_containers_and_plain_values_are_copied() -> None:
    inner = [1, {"x": "y"}]
    copy = to_host(OrderedDict(a=inner, b=(1.5, None), c=b"raw"))
    inner.append(2)
    assert copy == {"a": [1, {"x": "y"}], "b": (1.5, None), "c": b"raw"} and type(copy) is dict


def test_a_tensor_without_values_is_refused_by_its_place() -> None:
    for tensor in (torch.empty(2, device="meta"), torch.eye(2).to_sparse()):
        with pytest.raises(CheckpointError, match="optimizer/3/odd"):
            to_host({"optimizer": {3: {"odd": tensor}}})


@pytest.mark.gpu
def test_a_gpu_state_arrives_whole_in_page_locked_memory() -> None:
    buffers = HostBuffers()
    weight = torch.zeros(10_000_000, device="cuda")
    for n in range(3):
        weight.fill_(n)
        copy = to_host({"w": weight, "tied": weight}, buffers)
        weight.fill_(99)
        assert (
            copy["w"].is_pinned()
            and copy["tied"] is copy["w"]
            and torch.equal(copy["w"], torch.full((10_000_000,), float(n)))
        )
