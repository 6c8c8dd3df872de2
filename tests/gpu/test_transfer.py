"""Copies on a stream of their own: what arrives is what was sent, and its memory is not used again too early."""

from __future__ import annotations

import pytest
import torch

from lockstep.engine.distributed.staging import SideStream

pytestmark = pytest.mark.gpu


def test_batches_arrive_whole_while_the_gpu_is_busy() -> None:
    device = torch.device("cuda", 0)
    move = SideStream(device)
    busy = torch.randn(4096, 4096, device=device)
    sums = []
    for number in range(50):
        batch = {"inputs": torch.full((1024, 256), float(number)).pin_memory(), "rest": [number, "text"]}
        moved = move(batch)
        for _ in range(3):
            busy = torch.tanh(busy @ busy)
        sums.append(moved["inputs"].mean())  # queued behind the work above; the next copies are not
        assert moved["rest"] == [number, "text"]
        del moved
    assert torch.stack(sums).tolist() == [float(number) for number in range(50)]
