"""The memory of a pipeline's devices, against what torch's allocator hands out on two ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lockstep import Loss
from lockstep.data.requests import BatchRequest, Window
from lockstep.engine.optim.optimizers import build_optimizer
from lockstep.engine.optim.precision import Precision
from lockstep.engine.partition import Undivided
from lockstep.engine.rank_context import RankContext
from lockstep.engine.strategies.base import Flags
from lockstep.engine.strategies.pipeline import PipelineModel
from lockstep.engine.strategies.stages import stages_of
from lockstep.errors import ConfigError, TaskError, UnsupportedError
from lockstep.hardware.world import World
from lockstep.lab.bench.trials import Subject
from lockstep.lab.forecast.memory import Counting, estimate_memory
from tests.gloo import run_ranks
from tests.lab.forecast.test_memory import Deep

PARTS, SIZE = 4, 64


class Cut(Deep):
    """Eight blocks, each of which can be a stage."""

    def stages(self, model: Any) -> list[nn.Module]:
        return list(model)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(model(batch[0]).square().sum(), len(batch[0]))


def settings(**pipeline: Any) -> dict[str, Any]:
    training = {"batch_size": SIZE, "accumulate": PARTS, "threads": 1}
    return {"hardware": {"selected_devices": ["cpu", "cpu"]}, "training": training, "pipeline": pipeline}


KINDS = ("gpipe", "1f1b")


def most_allocated_of_each(rank: int, ranks: int) -> list[int]:
    return [most_allocated(rank, ranks, kind) for kind in KINDS]


def most_allocated(rank: int, ranks: int, kind: str) -> int:
    """The most bytes that torch's allocator had given out at once on this rank, in two steps of a pipeline."""
    device, task = torch.device("cpu"), Cut()
    batches = [(torch.randn(SIZE, 16),) for _ in range(2 * PARTS)]
    config = Subject(Cut, settings(schedule=kind)).base.config
    plan: Any = type("Seeded", (), {"seed": 0})
    nothing: Any = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        model = task.model().train()
        stages = stages_of(task, model, ranks)
        world = World(rank, ranks, rank, ranks)
        whole = Undivided(task, model, nothing, RankContext(nothing, world, config, plan, device, nothing))
        pipeline = PipelineModel(whole, stages[4 * rank : 4 * rank + 4], "")
        for stage in stages[4:] if rank == 0 else stages[:4]:
            stage.to("meta")  # other ranks' stages stay on the host, which is not the device
        optimizer = build_optimizer(config.optimizer, pipeline.mine, 1e-3)
        strategy = pipeline.strategy(task, Precision("32", device, 1.0))
        window = Window(
            0, 0, PARTS * SIZE, tuple(BatchRequest(0, n, n * SIZE, (n + 1) * SIZE) for n in range(PARTS)), False
        )
        for step in range(2):
            strategy.gradients(window, iter(batches[step * PARTS : (step + 1) * PARTS]), step, Flags())
            optimizer.step()
        del strategy, pipeline, stages, model, optimizer
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return int(np.cumsum(changes).max()) + batches[0][0].nbytes


def test_what_each_device_of_a_pipeline_holds_is_counted_within_a_fifth() -> None:
    first, second = run_ranks(most_allocated_of_each, 2, timeout_s=100)
    for kind, *measured in zip(KINDS, first, second, strict=True):
        counting = Counting(Subject(Cut, settings(schedule=kind)))
        estimates = [sum(kinds.values()) for kinds in counting.pipeline(2, SIZE)]
        assert estimates == pytest.approx(measured, rel=0.2), kind


def test_fewer_micro_batches_at_once_need_less() -> None:
    """The first of two devices holds two of four micro-batches under 1f1b, and all under gpipe."""
    held = {}
    for kind in ("gpipe", "1f1b"):
        found = estimate_memory(Subject(Cut, settings(schedule=kind)), limit=1.0, strategy="pipeline")
        first, second = found["strategies"]["device 1"], found["strategies"]["device 2"]
        held[kind] = first["activations"], second["activations"]
        assert found["strategies"]["pipeline"] == max(first, second, key=lambda kinds: kinds["total"])
        assert any("8 stages are cut by the cost of their operators" in note for note in found["notes"])
    assert held["1f1b"][0] < 0.6 * held["gpipe"][0]
    assert held["1f1b"][1] < 0.4 * held["gpipe"][1]


def test_a_global_batch_is_divided_into_micro_batches() -> None:
    training = {"batch_size": 32, "global_batch_size": 200}
    config = {"hardware": {"selected_devices": ["cpu", "cpu"]}, "training": training}
    assert Counting(Subject(Cut, config)).micro_batches(32) == 7


def test_what_cannot_be_a_pipeline_is_refused() -> None:
    one = {"hardware": {"selected_devices": ["cpu"]}}
    with pytest.raises(UnsupportedError, match="pipeline needs several devices"):
        estimate_memory(Subject(Cut, one), strategy="pipeline")
    with pytest.raises(ConfigError, match="9 devices, but the model has 8 stage"):
        estimate_memory(Subject(Cut, one), gpus=9, strategy="pipeline")
    with pytest.raises(TaskError, match="cannot be trained in stages"):
        estimate_memory(Subject(Deep, one), gpus=2, strategy="pipeline")
