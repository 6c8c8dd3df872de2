"""Steps are queued ahead of the GPU: nothing in them waits for it."""

from __future__ import annotations

import pytest
import torch

from lockstep import ArrayDataset
from lockstep.config import OptimizerConfig
from lockstep.data.requests import InOrder, Source, windows
from lockstep.engine.distributed.staging import SideStream
from lockstep.engine.optim.optimizers import build_optimizer
from lockstep.engine.optim.precision import Precision, cast
from lockstep.engine.run_log import LossMeter
from lockstep.engine.strategies.base import Flags, Replica, Strategy
from lockstep.engine.strategies.exact import ExactStrategy
from lockstep.hardware.world import World
from lockstep.planning import BatchPlan, Schedule
from tests.toys import Toy, arrays
from tests.updates import update_for_model

STEPS, QUIET = 8, 3


def take_steps(device: torch.device, precision: str, *, exact: bool) -> float:
    """The mean loss; the steps after the first ones must not wait."""
    torch.manual_seed(0)
    task = Toy(Toy.Config(dropout=0.3, batchnorm=True))
    model = cast(task.model().to(device), precision)
    how = Precision(precision, device, 0.125)
    replica = Replica(task, model, how, device, 0)
    strategy = ExactStrategy(replica, World()) if exact else Strategy(replica)
    schedule = Schedule(name="cosine", lr=0.02, total_steps=STEPS, steps_per_epoch=STEPS)
    update = update_for_model(model, build_optimizer(OptimizerConfig(lr=0.02), model, 0.02), schedule, how, 1.0)
    source = Source(ArrayDataset(*arrays(8 * STEPS, 1)).to(device), task.collate, 0, InOrder())
    plan = BatchPlan(samples=8 * STEPS, global_batch=8, batch_size=8, accumulate=1, ranks=1)
    losses = LossMeter(device)
    for step, window in enumerate(windows(plan, rank=0, epoch=0, position=0, epochs=1, ghosts=False)):
        if step == QUIET and device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        reduced = strategy.gradients(window, map(source.batch, window.requests), step, Flags())
        update.apply(step, reduced.count, reduced.divisor, want_norm=True)
        losses.add(reduced.total, reduced.count)
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    total, count = losses.read()
    return total / count


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("precision", "exact"), [("32", False), ("bf16-mixed", False), ("bf16-true", False), ("32", True)]
)
def test_steps_do_not_wait_for_the_gpu(precision: str, exact: bool) -> None:
    try:
        found = take_steps(torch.device("cuda", 0), precision, exact=exact)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found == pytest.approx(take_steps(torch.device("cpu"), precision, exact=exact), rel=0.1)


@pytest.mark.gpu
def test_batches_arrive_whole_while_the_gpu_is_busy() -> None:
    """Copies are on a separate stream, and their memory is not used again too early."""
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


@pytest.mark.parametrize("count", [4, torch.tensor(4)])
def test_losses_are_summed_where_they_are(count: torch.Tensor | int) -> None:
    losses = LossMeter(torch.device("cpu"))
    losses._on_host = False  # as on a GPU
    for total in (2.0, float("nan"), 6.0):
        losses.add(torch.tensor(total), count)
    assert losses.read() == (8.0, 8.0)
