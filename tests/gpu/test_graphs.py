"""CUDA graphs of whole steps: the same training, with dropout and statistics, and on without them where they fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import Loss
from lockstep.config.load import merge
from lockstep.engine.distributed.staging import SideStream
from lockstep.engine.optim.recording import Recording
from tests.dist.runs import train, used
from tests.gpu.test_training import SAME, TOY, epoch_losses
from tests.toys import Toy

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

#: One micro-batch a step, and an optimizer whose kernels are called directly.
SETTINGS = merge(
    SAME,
    {
        "task": {"dropout": 0.3, "batchnorm": True},
        "training": {"batch_size": 32, "cuda_graphs": "on"},
        "optimizer": {"name": "adamw", "lr": 0.01},
        "telemetry": {"progress": "off"},
    },
)
OFF = {"training": {"cuda_graphs": "off"}}


class Reads(Toy):
    """A loss that waits for the GPU, which cannot be recorded."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        total, count = super().loss(model, batch)
        return Loss(total * (1 if total.item() > -1 else 2), count)


@pytest.mark.parametrize("precision", ["32", "bf16-mixed", "bf16-true"])
def test_replays_train_as_steps_do(tmp_path: Path, precision: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = merge(SETTINGS, {"hardware": {"precision": precision}})
    graphed = train(TOY, tmp_path / "graphed", "gpu:0", settings)
    assert "cuda_graphs is off from" not in capsys.readouterr().out
    eager = train(TOY, tmp_path / "eager", "gpu:0", merge(settings, OFF))
    assert epoch_losses(graphed) == pytest.approx(epoch_losses(eager), rel=1e-4 if precision == "32" else 2e-2)
    assert used(graphed) == used(eager)


def test_a_run_continues_where_recording_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graphed = train("tests.gpu.test_graphs:Reads", tmp_path / "graphed", "gpu:0", SETTINGS)
    assert "cuda_graphs is off from step 4 on: recording failed" in capsys.readouterr().out
    eager = train("tests.gpu.test_graphs:Reads", tmp_path / "eager", "gpu:0", merge(SETTINGS, OFF))
    assert epoch_losses(graphed) == pytest.approx(epoch_losses(eager), rel=1e-5)


def test_a_recording_that_fails_leaves_nothing_open() -> None:
    """The stream is that of before, dropout draws, and memory that went from one stream to another is used again."""
    device = torch.device("cuda", 0)
    x, before, move = torch.ones(1000, device=device), torch.cuda.current_stream(), SideStream(device)
    with pytest.raises(RuntimeError):
        Recording(lambda: [x * x.sum().item()], device)
    assert torch.cuda.current_stream() == before
    assert 0 < int(nn.functional.dropout(x, 0.5).count_nonzero()) < 1000
    held = []
    for _ in range(20):
        moved = move(torch.ones(2**20).pin_memory())
        total = moved.sum()
        del moved
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated(device))
        del total
    assert held[-1] <= held[1]


def test_dropout_of_a_replay_is_that_of_its_seed() -> None:
    device = torch.device("cuda", 0)
    x, generator = torch.ones(1000, device=device), torch.cuda.default_generators[0]

    def body() -> list[Tensor]:
        return [nn.functional.dropout(x, 0.5)]

    body()
    recording = Recording(body, device)
    for seed in (1, 2, 1):
        generator.manual_seed(seed)
        found = recording.replay()[0].clone()
        generator.manual_seed(seed)
        assert torch.equal(found, body()[0])
