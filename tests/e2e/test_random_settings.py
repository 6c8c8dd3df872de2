"""Runs of random settings against a loop of plain PyTorch in float64: each loss, each gradient norm, the last weights.

The loop reads from the run folder which samples a step took, and its learning rate. About half of the runs end at a
random step, by SIGTERM or SIGKILL, and go on with another number of ranks. A test's name ends with its seed.
"""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from lockstep import Datasets, Loss, Task, TaskConfig
from lockstep.rundir.folder import RunDir
from tests.e2e.test_train import finish, start
from tests.samples import samples_by_step

CLASSES, FEATURES, TOKENS, IGNORED = 5, 8, 17, -100
CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5, 2.0], dtype=torch.float64)


class Shared(nn.Module):
    """Two layers with one weight, and a parameter without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.head = nn.Linear(FEATURES, CLASSES)
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return logits


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES)),
    "conv": lambda: nn.Sequential(
        nn.Unflatten(1, (1, FEATURES)), nn.Conv1d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(24, CLASSES)
    ),
    "shared": Shared,
    "tokens": lambda: nn.Sequential(nn.Embedding(TOKENS, 8), nn.Tanh(), nn.Linear(8, CLASSES)),
}


class Varied(Task):
    class Config(TaskConfig):
        model: str = "mlp"
        loss: str = "mean"
        samples: int = 64
        end_at: int = 0
        end_by: int = signal.SIGTERM

    def rows(self, samples: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(samples)
        if self.config.model != "tokens":
            inputs = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)
            return inputs, torch.randint(CLASSES, (samples,), generator=generator)
        targets = torch.randint(CLASSES, (samples, 6), generator=generator)
        targets[torch.rand(samples, 6, generator=generator) < 0.3] = IGNORED
        return torch.randint(TOKENS, (samples, 6), generator=generator), targets

    def datasets(self) -> Datasets:
        return Datasets(TensorDataset(*self.rows(self.config.samples)))

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return MODELS[self.config.model]().double()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        inputs, targets = batch
        outputs = model(inputs)
        if self.config.model == "tokens":
            total = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")
            return Loss(total, (targets != IGNORED).sum())
        if self.config.loss == "weighted":
            total = F.cross_entropy(outputs, targets, CLASS_WEIGHTS, reduction="sum")
            return Loss(total, CLASS_WEIGHTS[targets].sum())
        if self.config.loss == "squares":
            total = F.mse_loss(outputs, F.one_hot(targets, CLASSES).double(), reduction="sum")
            return Loss(total, outputs.numel())
        return Loss(F.cross_entropy(outputs, targets, reduction="sum"), len(targets))

    def hooks(self) -> Any:
        def end(step: Any, model: nn.Module) -> None:
            has_ended = Path("ended")  # in the first attempt
            is_main = os.environ.get("RANK", "0") == "0"
            if is_main and step.step == self.config.end_at and not has_ended.exists():
                has_ended.touch()
                os.kill(os.getpid(), self.config.end_by)

        return [(end, 1)]


OPTIMIZERS: list[dict[str, Any]] = [
    {"name": "sgd", "momentum": 0.9, "nesterov": True},
    {"name": "sgd", "momentum": 0.0},
    {"name": "adam"},
    {"name": "adamw"},
    {"name": "adamw", "options": {"amsgrad": True}},
    {"name": "torch.optim:RMSprop"},
    {"name": "torch.optim:Adagrad"},
]
SCHEDULES: list[dict[str, Any]] = [
    *({"name": name} for name in ("cosine", "constant", "wsd", "onecycle")),
    {"name": "poly", "power": 2.0},
    {"name": "step", "step_epochs": 0.5},
    {"name": "exponential", "decay_steps": 3},
]
AVERAGES: list[dict[str, Any]] = [
    {"name": "none"},
    {"name": "ema", "decay": 0.9, "warmup": True},
    {"name": "ema", "decay": 0.8, "warmup": False},
    {"name": "swa", "start_share": 0.5},
]


def draw(chance: random.Random) -> dict[str, Any]:
    """Draw a configuration, and the devices of two attempts as ``ranks``."""
    reproducibility = chance.choice(["fast", "exact"])
    counts = [1, 2, 4] if reproducibility == "exact" else [1, 2, 3]
    training: dict[str, Any] = {
        "epochs": chance.randint(1, 3),
        "batch_size": chance.choice([3, 4, 5, 8]),
        "max_grad_norm": chance.choice([None, 0.05, 0.5]),
        "reproducibility": reproducibility,
        "tail": chance.choice(["spread", "merge"]),
        "seed": chance.randint(0, 99),
        **({"lanes": chance.choice([4, 8])} if reproducibility == "exact" else {}),
        **chance.choice([{}, {"accumulate": 2}, {"accumulate": 3}, {"global_batch_size": 24}]),
    }
    task = {
        "model": chance.choice([*MODELS]),
        "loss": chance.choice(["mean", "weighted", "squares"]),
        "samples": chance.randint(30, 150),
        "end_at": chance.choice([0, chance.randint(1, 9)]),
        "end_by": int(chance.choice([signal.SIGTERM, signal.SIGKILL])),
    }
    return {
        "task": task,
        "training": training,
        "optimizer": {
            **chance.choice(OPTIMIZERS),
            "lr": 0.05,
            "weight_decay": chance.choice([0.0, 0.1]),
            "weight_decay_on": chance.choice(["all", "matrices"]),
        },
        "scheduler": chance.choice(SCHEDULES) | chance.choice([{}, {"warmup_steps": 0}, {"warmup_steps": 5}]),
        "averaging": chance.choice(AVERAGES),
        "hardware": {"precision": "32"},
        "checkpoint": {"every_steps": chance.choice([1, 2, 4])},
        "telemetry": {"log_interval": 1, "record_samples": True, "progress": "off", "tensorboard": "off"},
        "ranks": [chance.choice(counts), chance.choice(counts)],
    }


def optimizer_of(config: dict[str, Any], parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    settings = dict(config)
    name = settings.pop("name")
    weight_decay = settings.pop("weight_decay")
    matrices = [p for p in parameters if p.dim() >= 2]
    decays_all = settings.pop("weight_decay_on") == "all"
    decayed = parameters if decays_all else matrices
    plain = [] if decays_all else [p for p in parameters if p.dim() < 2]
    classes: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    kind = classes.get(name) or getattr(torch.optim, name.rpartition(":")[2])
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer: torch.optim.Optimizer = kind(groups, **settings.pop("options", {}), **settings)
    return optimizer


def check(run: RunDir, config: dict[str, Any]) -> dict[str, Tensor]:
    """Repeat the run in plain PyTorch, compare each step, and return the last weights, averaged as configured."""
    task = Varied(Varied.Config(**config["task"]))
    inputs, targets = task.rows(config["task"]["samples"])
    model = task.model()
    parameters = list(model.parameters())
    optimizer = optimizer_of(config["optimizer"], parameters)
    averaging = config["averaging"]
    averages = [p.detach().clone() for p in parameters]
    updates = 0
    rows = {row["step"]: row for row in run.steps()}
    samples = samples_by_step(run)
    assert list(samples) == list(rows) == list(range(1, len(rows) + 1))
    for step, (_, counts) in samples.items():
        indices = torch.tensor(sorted(counts.elements()))
        optimizer.zero_grad()
        total, count = task.loss(model, (inputs[indices], targets[indices]))
        loss = total / count
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        assert rows[step]["loss"] == pytest.approx(loss.item(), rel=1e-9), step
        assert rows[step]["grad_norm"] == pytest.approx(norm.item(), rel=1e-6), step
        if config["training"]["max_grad_norm"] is not None:
            torch.nn.utils.clip_grad_norm_(parameters, config["training"]["max_grad_norm"])
        for group in optimizer.param_groups:
            group["lr"] = rows[step]["lr"]
        optimizer.step()
        share = 0.0
        if averaging["name"] == "ema":
            share = (
                min(averaging["decay"], (1 + updates) / (10 + updates)) if averaging["warmup"] else averaging["decay"]
            )
            updates += 1
        elif averaging["name"] == "swa" and step > round(averaging["start_share"] * len(rows)):
            share = updates / (updates + 1)
            updates += 1
        for average, parameter in zip(averages, parameters, strict=True):
            average.mul_(share).add_(parameter.detach(), alpha=1 - share)
    return {name: average for (name, _), average in zip(model.named_parameters(), averages, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, *(pytest.param(seed, marks=pytest.mark.drill) for seed in range(100, 160))])
def test_each_step_is_that_of_plain_pytorch(tmp_path: Path, seed: int) -> None:
    config = draw(random.Random(seed))
    first, second = config.pop("ranks")
    (tmp_path / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    named = ("--set", f"optimizer.name={config['optimizer']['name']}")  # a class is code: a file alone may not name it
    command = ("train", f"{__file__}:Varied", "--config", "config.yaml", "--save-dir", "run", *named)
    process = start(*command, "--devices", ",".join(["cpu"] * first), cwd=tmp_path)
    output, _ = process.communicate(timeout=90)
    run = RunDir(tmp_path / "run")
    if process.returncode:
        assert Path(tmp_path, "ended").exists(), output
        finish(start("resume", "run", "--devices", ",".join(["cpu"] * second), cwd=tmp_path))
    assert run.status() == "completed"
    trained = lockstep.Run(run.path).load_model("last")
    expected = check(run, config)
    for name, parameter in trained.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-8, atol=1e-9, msg=name)
