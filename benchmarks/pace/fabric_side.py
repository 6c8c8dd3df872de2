"""Lightning Fabric: a hand-written loop whose set-up, backward and clipping are Fabric's."""

from __future__ import annotations

from lightning.fabric import Fabric
from torch import nn

from pace.by_hand import endless, loader
from pace.pacer import Pacer
from pace.workload import INTERVAL, MAX_NORM, Workload


def run(workload: Workload) -> None:
    fabric = Fabric(
        accelerator="cpu" if workload.device == "cpu" else "gpu",
        devices=workload.ranks,
        strategy="ddp" if workload.ranks > 1 else "auto",
    )
    fabric.launch()
    bare = workload.build()
    model, optimizer = fabric.setup(bare, workload.optimizer(bare.parameters()))
    batches = fabric.setup_dataloaders(loader(workload, sharded=False))
    pacer = Pacer(workload, speaks=fabric.is_global_zero)
    for step, (inputs, labels) in zip(range(1, workload.total_steps + 1), endless(batches), strict=False):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        fabric.backward(loss)
        if workload.clip:
            fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
        optimizer.step()
        if step % INTERVAL == 0:
            loss.item()
            pacer.tick(step)
