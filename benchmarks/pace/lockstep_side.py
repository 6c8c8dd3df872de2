"""Lockstep as a user starts it: ``lockstep.train`` with its defaults; log, heartbeat and monitor are on."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

import lockstep
from lockstep import Datasets, Loss, Task, TaskConfig
from pace.catalogue import DATASETS, padded, unpacked
from pace.pacer import Pacer
from pace.workload import CLASSES, INTERVAL, LR, MAX_NORM, Workload, read_workload


class Paced(Task):
    class Config(TaskConfig):
        workload: str = ""

    def datasets(self) -> Datasets:
        workload = read_workload(self.config.workload)
        if workload.dataset is None:
            return Datasets(TensorDataset(*workload.data()))
        return Datasets(DATASETS[workload.dataset][0](workload))

    def model(self) -> nn.Module:
        return read_workload(self.config.workload).build()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        inputs, labels = unpacked(batch)
        return Loss(nn.functional.cross_entropy(model(inputs), labels, reduction="sum"), labels.numel())

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
        return model(batch[0]), batch[1]

    def metrics(self) -> MetricCollection:
        return MetricCollection({"accuracy": MulticlassAccuracy(CLASSES)})

    def hooks(self) -> Any:
        # Only in training: the plan is made from a task too, and in another process.
        pacer = Pacer(read_workload(self.config.workload), speaks=os.environ.get("RANK", "0") == "0")
        return [(lambda result, model: pacer.tick(result.step), INTERVAL)]


class Padded(Paced):
    def collate(self, samples: Any) -> Any:
        return padded(samples)


def run(workload: Workload) -> None:
    lockstep.train(
        "pace.lockstep_side:Padded" if workload.dataset == "ragged" else "pace.lockstep_side:Paced",
        {
            "save_dir": f"{workload.folder}/run",
            "task": {"workload": workload.as_json()},
            "hardware": {"selected_devices": [workload.device] * workload.ranks},
            "data": {"num_workers": workload.workers},
            "training": {
                "epochs": 10**6,
                "max_steps": workload.total_steps,
                "batch_size": workload.batch,
                "threads": 1,
                "max_grad_norm": MAX_NORM if workload.clip else None,
            },
            "optimizer": {"name": "adamw", "lr": LR, "weight_decay": 1e-2},  # AdamW's own default
            # The peers' BatchNorm is each rank's own: torch has no synchronised one for CPUs.
            "distributed": {"sync_batchnorm": "off"},
            "telemetry": {"progress": "off", "log_interval": INTERVAL, "tensorboard": "off"},
            "launch": {"hang_timeout_s": 3600.0},  # standing still is part of the contest
        },
    )
