"""The experiment in Lockstep: a task and a few settings. Nothing in the task knows of ranks or batches."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric

import lockstep
from lockstep import Datasets, LockstepError, Loss, Task, TaskConfig
from peers.probe import LR, SEED, VALIDATION_SAMPLES, Diary, Job, Samples, Stopped, flat_weights, subject

TASK = "peers.lockstep_side:ProbeTask"
#: In the job's folder: what came of each step, and the step after which the job is to fail.
DIARY, STOP = "diary.jsonl", "stop"


class ProbeTask(Task):
    class Config(TaskConfig):
        samples: int = 1
        kind: str = ""
        folder: str = ""

    def datasets(self) -> Datasets:
        val = None if self.config.kind == "tokens" else Samples(VALIDATION_SAMPLES)
        return Datasets(subject(self.config.kind, self.config.samples)[1], val)

    def model(self) -> nn.Module:
        return subject(self.config.kind, self.config.samples)[0]

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        losses = model(batch)
        return Loss(losses.sum(), len(losses))

    def validate(self, model: nn.Module, batch: Any) -> tuple[Loss, tuple[Tensor, ...]]:
        values = batch[0].float()
        return Loss(values.sum(), len(values)), (values,)

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
        return (batch[0].float(),)

    def metrics(self) -> MetricCollection:
        return MetricCollection({"mean": MeanMetric(), "sum": SumMetric()})

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=LR)

    def hooks(self) -> Any:
        return [(self._note, 1)]

    def _note(self, result: Any, model: Any) -> None:
        if os.environ.get("RANK", "0") == "0":
            diary = Diary()
            diary.note(result.step, result.window.epoch, float(result.loss_total) / float(result.loss_count), model)
            row = {**diary.rows[0], "weights": flat_weights(model)}
            with (Path(self.config.folder) / DIARY).open("a") as file:
                file.write(json.dumps(row) + "\n")
        stop = Path(self.config.folder) / STOP
        if stop.exists() and result.step > int(stop.read_text()):
            raise Stopped


def run(job: Job) -> dict[str, Any]:
    folder = Path(job.folder)
    diary, stop = folder / DIARY, folder / STOP
    diary.unlink(missing_ok=True)
    stop.unlink(missing_ok=True)
    config = _config(job)
    if job.stop_after and not job.resume:
        stop.write_text(str(job.stop_after))
        with contextlib.suppress(Stopped, LockstepError):
            lockstep.train(TASK, config)
    else:
        metrics = lockstep.train(TASK, config, resume=job.resume).metrics
        if job.kind == "validation":
            return {"count": metrics["val_sum"] / metrics["val_mean"], "mean": metrics["val_mean"]}
    rows = [json.loads(line) for line in diary.read_text().splitlines()]
    return {"steps": rows, "weights": rows[-1]["weights"]}


def _config(job: Job) -> dict[str, Any]:
    return {
        "save_dir": str(Path(job.folder) / "run"),
        "task": {"samples": job.samples, "kind": job.kind, "folder": job.folder},
        "hardware": {"selected_devices": ["cpu"] * job.ranks},
        "training": {
            "epochs": job.epochs,
            "batch_size": job.batch,
            "accumulate": job.accumulate,
            "max_grad_norm": None,
            "seed": SEED,
            "threads": 1,
            "reproducibility": "exact" if job.variant == "reproducibility=exact" else "fast",
        },
        "optimizer": {"lr": LR},
        "scheduler": {"name": "constant", "warmup_epochs": 0},
        "checkpoint": {"every_steps": job.stop_after},
        "telemetry": {"progress": "off", "tensorboard": "off"},
    }
