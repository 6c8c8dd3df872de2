"""``strategy: fsdp`` in half precision: parameters travel in 16 bits, and training is that of one device in 16 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep import ArrayDataset
from lockstep.config import OptimizerConfig, SchedulerConfig
from lockstep.data.requests import InOrder, Source, windows
from lockstep.engine.distributed.dtensor_state import gathered
from lockstep.engine.optim.optimizers import build_optimizer
from lockstep.engine.optim.precision import Precision
from lockstep.engine.strategies.base import Flags, Replica, Strategy
from lockstep.engine.strategies.fsdp import ShardedModel
from lockstep.hardware.world import World
from lockstep.planning import BatchPlan
from lockstep.planning.schedule import resolve_schedule
from tests.dist.test_fsdp import Deep, Weighted, undivided
from tests.gloo import run_ranks
from tests.updates import update_for_model

CPU = torch.device("cpu")
HALVES = ("bf16-mixed", "16-mixed")
SAMPLES, PER_STEP = 90, 12


def train(rank: int, ranks: int, precision: str) -> tuple[list[float], list[Tensor], int]:
    """Losses of two epochs, the whole weights afterwards, and skipped steps. One rank takes the parts of two."""
    torch.manual_seed(0)
    model, task, world = Deep(batchnorm=False), Weighted(), World(rank, ranks, rank, ranks)
    generator = torch.Generator().manual_seed(1)
    items = torch.randint(1, 9, (SAMPLES,), generator=generator).float()
    source = Source(ArrayDataset(torch.randn(SAMPLES, 4, generator=generator), items), task.collate, 0, InOrder())
    batch = BatchPlan(
        samples=SAMPLES, global_batch=PER_STEP, batch_size=PER_STEP // 2, accumulate=2 // ranks, ranks=ranks
    )
    sharded = ShardedModel(undivided(task, model, world, precision)) if ranks > 1 else None
    schedule, _ = resolve_schedule(
        SchedulerConfig(name="constant", warmup_steps=0), lr=0.01, total_steps=16, steps_per_epoch=8, offset=0
    )
    scaling = Precision(precision, CPU, 2.0**-4)
    update = update_for_model(model, build_optimizer(OptimizerConfig(), model, 0.01), schedule, scaling, 1.0, sharded)
    strategy: Any = Strategy(Replica(task, model, scaling, CPU, 0))
    if sharded is not None:
        strategy = sharded.strategy(task, scaling)
    losses = []
    for step, window in enumerate(windows(batch, rank=rank, epoch=0, position=0, epochs=2, ghosts=True)):
        reduced = strategy.gradients(window, map(source.batch, window.requests), step, Flags())
        update.apply(step, reduced.count, reduced.divisor, want_norm=False)
        losses.append(float(reduced.total) / float(reduced.count))
    return losses, [gathered(p, keep=True).detach() for p in model.parameters()], update.skipped


def both(rank: int, ranks: int) -> list[tuple[list[float], list[Tensor], int]]:
    return [train(rank, ranks, precision) for precision in HALVES]


@pytest.fixture(scope="module")
def divided() -> dict[str, list[tuple[list[float], list[Tensor], int]]]:
    """By precision, what each of two ranks saw."""
    return dict(zip(HALVES, map(list, zip(*run_ranks(both, 2, timeout_s=240.0), strict=True)), strict=True))


@pytest.mark.parametrize(("precision", "rounding"), [("bf16-mixed", 2.0**-7), ("16-mixed", 2.0**-10)])
def test_two_ranks_in_half_precision_train_as_one_does(divided: Any, precision: str, rounding: float) -> None:
    full, alone, (first, second) = train(0, 1, "32"), train(0, 1, precision), divided[precision]
    assert first[0] == second[0]
    assert first[0] == pytest.approx(alone[0], rel=4 * rounding, abs=rounding)
    assert first[0] != pytest.approx(full[0], rel=1e-6), "it is in 16 bits indeed"
    assert first[0][-1] < first[0][0]
    assert first[2] == alone[2], "a loss scale that is too high is found out by the same steps"
    for ours, same, theirs in zip(first[1], second[1], alone[1], strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, same)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.05)
