"""Counted memory against what torch's allocator hands out; the verb."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lockstep import ArrayDataset, Datasets, Loss, Task
from lockstep.cli.main import main
from lockstep.errors import TaskError, UnsupportedError, UsageError
from lockstep.lab.bench.trials import Subject
from lockstep.lab.forecast.footprint import StepCounter
from lockstep.lab.forecast.memory import estimate_memory, print_memory

CASES = {
    "har": ({}, 64),
    "autoencoder": ({}, 512),
    "speech": ({"task": {"utterances": 16}}, 4),
}


def batch_of(task: Task, train: Any, indices: list[int]) -> Any:
    if hasattr(train, "sample"):
        return task.collate([train.sample(index, np.random.default_rng(index)) for index in indices])
    return train.__getitems__(indices) if hasattr(train, "__getitems__") else task.collate([train[i] for i in indices])


def allocated(task: Task, batch: Any, *, keep_gradients: bool) -> int:
    """The most bytes that torch's allocator had given out at once during three steps on real tensors."""
    with (
        torch.random.fork_rng(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler,
    ):
        model = task.model().train()
        optimizer = task.optimizer(model) or torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for _ in range(3):
            for parameter in model.parameters():
                if not keep_gradients:
                    parameter.grad = None
                elif parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            task.loss(model, batch).total.backward()
            optimizer.step()
        del model, optimizer
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return int(np.cumsum(changes).max())


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the profiler, and of torch's own transformer layers
@pytest.mark.parametrize("name", ["har", "autoencoder", pytest.param("speech", marks=pytest.mark.slow)])
@pytest.mark.parametrize("keep_gradients", [False, True])
def test_the_peak_is_counted_within_a_fifth(name: str, keep_gradients: bool) -> None:
    settings, size = CASES[name]
    prepared = Subject(name.split()[0], {**settings, "hardware": {"selected_devices": ["cpu"]}}).base
    train = prepared.datasets.train
    batch = batch_of(prepared.task, train, [index % len(train) for index in range(size)])
    own = sum(leaf.untyped_storage().nbytes() for leaf in batch if isinstance(leaf, Tensor))
    counted = StepCounter(prepared.task, prepared.config, size, keep_gradients).count(batch)
    measured = allocated(prepared.task, batch, keep_gradients=keep_gradients) + own
    assert sum(counted.kinds.values()) == pytest.approx(measured, rel=0.2)
    parameters = sum(p.numel() * p.element_size() for p in prepared.task.model().parameters())
    assert counted.kinds["parameters"] == parameters
    assert sum(counted.gradients) == sum(counted.blocks) == parameters
    assert counted.kinds["optimizer"] >= 2 * parameters
    if keep_gradients:
        assert counted.kinds["gradients"] == parameters


class Large(Task):
    """More parameters than this machine has memory for."""

    def datasets(self) -> Datasets:
        return Datasets(ArrayDataset(torch.zeros(64, 8), torch.zeros(64, dtype=torch.long)))

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 1 << 17), nn.ReLU(), nn.Linear(1 << 17, 1 << 18, bias=False))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        samples, labels = batch
        return Loss(nn.functional.cross_entropy(model(samples), labels, reduction="sum"), len(labels))


def test_a_model_larger_than_memory_is_counted_without_it() -> None:
    config = Subject("autoencoder", {"hardware": {"selected_devices": ["cpu"]}}).base.config
    task = Large()
    counted = StepCounter(task, config, 4, keep_gradients=True).count(
        (torch.zeros(4, 8), torch.zeros(4, dtype=torch.long))
    )
    assert counted.on == "fake"
    assert sum(counted.kinds.values()) > 4 * 4 * 2**35


class Deep(Task):
    """Blocks with large activations."""

    def datasets(self) -> Datasets:
        return Datasets(ArrayDataset(torch.zeros(512, 16)))

    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 16)) for _ in range(8)))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(model(batch[0]).square().sum(), len(batch[0]))


@pytest.mark.slow
def test_settings_of_fsdp_are_in_its_estimate() -> None:
    def found(**fsdp: Any) -> dict[str, float]:
        settings = {"hardware": {"selected_devices": ["cpu"]}, "training": {"batch_size": 256}, "fsdp": fsdp}
        estimate = estimate_memory(Subject(Deep, settings), gpus=64, strategy="fsdp")
        kinds: dict[str, float] = estimate["strategies"]["fsdp"]
        return kinds

    plain = found()
    assert found(activation_checkpointing=True)["activations"] < plain["activations"] / 2
    with pytest.raises(UnsupportedError, match=r"fsdp\.sharding=hybrid"):
        found(sharding="hybrid")
    assert found(cpu_offload=True)["optimizer"] == 0


@pytest.mark.parametrize("strategy", ["dp", "pipeline"])
def test_a_strategy_whose_devices_differ_has_no_prediction(strategy: str) -> None:
    with pytest.raises(UnsupportedError, match=strategy):
        estimate_memory(Subject(Deep, {"hardware": {"selected_devices": ["cpu"]}}), gpus=4, strategy=strategy)


@pytest.mark.slow
def test_gpus_that_are_not_here_share_a_global_batch_anew() -> None:
    def found(gpus: int) -> tuple[int, int]:
        training = {"batch_size": 32, "global_batch_size": 512}
        subject = Subject(Deep, {"hardware": {"selected_devices": ["cpu"]}, "training": training})
        estimate = estimate_memory(subject, gpus=gpus)
        return estimate["batch_size"], estimate["accumulate"]

    assert (found(1), found(8), found(64)) == ((32, 16), (32, 2), (8, 1))
    with pytest.raises(UsageError, match="513 devices"):
        found(513)


class Mistaken(Deep):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(model(batch).sum(), len(batch))


def test_a_task_that_cannot_make_a_step_is_one_clear_error() -> None:
    with pytest.raises(TaskError, match=r"\bMistaken\b.*\b32 samples"):
        estimate_memory(Subject(Mistaken, {"hardware": {"selected_devices": ["cpu"]}}))


class Reading(Large):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        return loss if loss.total.item() > 0 else super().loss(model, batch)


def test_a_large_model_that_reads_values_is_refused_and_not_tried() -> None:
    config = Subject("autoencoder", {"hardware": {"selected_devices": ["cpu"]}}).base.config
    batch = (torch.zeros(4, 8), torch.zeros(4, dtype=torch.long))
    with pytest.raises(UnsupportedError, match=r"(?s)\bGB\b.*\.item\(\)"):
        StepCounter(Reading(), config, 4, keep_gradients=True).count(batch)


def test_the_verb_tells_each_strategy_and_the_largest_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "autoencoder", "--gpus", "8", "--memory", "2GB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ddp, fsdp = (found["strategies"][name] for name in ("ddp", "fsdp"))
    assert ddp["total"] == pytest.approx(sum(value for kind, value in ddp.items() if kind != "total"))
    assert fsdp["optimizer"] == pytest.approx(ddp["optimizer"] / 8)
    assert found["chosen"]["strategy"] == "ddp"
    assert found["largest_batch"]["ddp"] == found["most"]


@pytest.mark.parametrize("gpus", ["0", "1000000001"])
def test_a_wrong_wish_is_refused(gpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "autoencoder", "--gpus", gpus]) == 2
    assert f"--gpus: {gpus} " in capsys.readouterr().err


@pytest.mark.long
def test_the_table_names_kinds_and_what_to_take() -> None:
    stream = io.StringIO()
    subject = Subject("autoencoder", {"hardware": {"selected_devices": ["cpu"]}})
    print_memory(estimate_memory(subject, limit=1e6), stream)
    shown = stream.getvalue()
    assert "activations" in shown
    assert "largest batch" in shown
    assert "take single" in shown
