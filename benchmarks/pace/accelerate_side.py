"""Accelerate: the loop of its guides."""

from __future__ import annotations

from accelerate import Accelerator
from torch import nn

from pace.by_hand import endless, loader
from pace.pacer import Pacer
from pace.workload import INTERVAL, MAX_NORM, Workload


def run(workload: Workload) -> None:
    accelerator = Accelerator(cpu=workload.device == "cpu")
    bare = workload.build()
    model, optimizer, batches = accelerator.prepare(
        bare, workload.optimizer(bare.parameters()), loader(workload, sharded=False)
    )
    pacer = Pacer(workload, speaks=accelerator.is_main_process)
    for step, (inputs, labels) in zip(range(1, workload.total_steps + 1), endless(batches), strict=False):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        if workload.clip:
            accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        if step % INTERVAL == 0:
            loss.item()
            pacer.tick(step)
