"""Training data on the GPU, and checkpoints that are copied while training continues."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep import ArrayDataset
from lockstep.checkpoint.writer import HostBuffers
from lockstep.config.load import merge
from tests.dist.runs import train, used
from tests.gpu.test_training import SAME, TOY, epoch_losses

IMAGES = "tests.engine.test_layout:Still"

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def test_data_on_the_gpu_give_the_same_training(tmp_path: Path) -> None:
    runs = {
        device: train(TOY, tmp_path / device, "gpu:0", merge(SAME, {"data": {"device": device}}))
        for device in ("host", "gpu")
    }
    assert epoch_losses(runs["gpu"]) == epoch_losses(runs["host"])
    assert used(runs["gpu"]) == used(runs["host"])


def test_layout_and_place_of_data_follow_their_rules(tmp_path: Path) -> None:
    """A task with convolutions: channels_last in 16-bit precision alone, and the same training in either layout."""
    half = merge(SAME, {"hardware": {"precision": "bf16-mixed"}})
    run = train(IMAGES, tmp_path / "half", "gpu:0", half)
    decisions = run.plan()["decisions"]
    assert decisions["channels_last"]["value"] is True and decisions["data_device"]["value"] == "auto"
    other = train(IMAGES, tmp_path / "rows", "gpu:0", merge(half, {"hardware": {"channels_last": "off"}}))
    assert epoch_losses(run) == pytest.approx(epoch_losses(other), rel=2e-2)
    assert train(IMAGES, tmp_path / "full", "gpu:0", SAME).plan()["decisions"]["channels_last"]["value"] is False


def test_a_gather_on_the_gpu() -> None:
    data = ArrayDataset(torch.arange(10), torch.arange(20.0).view(10, 2)).to(torch.device("cuda", 0))
    first, second = data.__getitems__([3, 1])
    assert first.is_cuda
    assert first.tolist() == [3, 1]
    assert second.tolist() == [[6, 7], [2, 3]]


def test_a_copy_is_of_the_values_before_the_update() -> None:
    """The copy is queued behind much work, and weights and buffers are written to as soon as that is allowed."""
    device = torch.device("cuda", 0)
    weight, buffer = torch.zeros(4096, 4096, device=device), torch.zeros(1000, device=device)
    buffers = HostBuffers()
    for number in range(5):
        weight.fill_(number)
        buffer.fill_(number)
        for _ in range(20):
            busy = torch.tanh(weight @ weight)
        copy = buffers.copy({"weight": weight, "buffer": buffer}, lambda place, tensor: place == ("weight",))
        buffer.fill_(-1)
        assert buffers.copied is not None
        buffers.copied.wait()
        weight.fill_(-1)
        buffers.copied.synchronize()
        assert copy["weight"].unique().tolist() == [number]
        assert copy["buffer"].unique().tolist() == [number]
        del busy
