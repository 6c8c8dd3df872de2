"""The hand-written loop, and the floor: a loop over batches that lie ready, with nothing else in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count, cycle
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from pace.pacer import Pacer
from pace.workload import INTERVAL, MAX_NORM, Workload, is_main


def run(workload: Workload) -> None:
    model = workload.build().to(workload.torch_device)
    if workload.ranks > 1:
        dist.init_process_group("gloo" if workload.device == "cpu" else "nccl")
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    batches = _ready(workload) if workload.side == "floor" else endless(loader(workload))
    _train(workload, model, batches)


def loader(workload: Workload, *, sharded: bool = True) -> DataLoader[Any]:
    """The usual one. ``sharded``: with a sampler for several ranks, where no library brings its own."""
    dataset = TensorDataset(*workload.data())
    pin = workload.device != "cpu"
    if workload.ranks == 1 or not sharded:
        return DataLoader(dataset, workload.batch, shuffle=True, pin_memory=pin)
    return DataLoader(dataset, workload.batch, sampler=DistributedSampler(dataset), pin_memory=pin)


def endless(batches: DataLoader[Any]) -> Iterator[Any]:
    for epoch in count():
        if isinstance(batches.sampler, DistributedSampler):
            batches.sampler.set_epoch(epoch)
        yield from batches


def _ready(workload: Workload) -> Iterator[Any]:
    inputs, labels = (tensor.to(workload.torch_device) for tensor in workload.data())
    return cycle(list(zip(inputs.split(workload.batch), labels.split(workload.batch), strict=True)))


def _train(workload: Workload, model: nn.Module, batches: Iterable[Any]) -> None:
    optimizer = workload.optimizer(model.parameters())
    pacer = Pacer(workload, speaks=is_main())
    device, moves = workload.torch_device, workload.device != "cpu"
    reads = workload.side == "hand"
    for step, (inputs, labels) in zip(range(1, workload.total_steps + 1), batches, strict=False):
        if moves:
            inputs, labels = inputs.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        if workload.clip:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        if step % INTERVAL == 0:
            if reads:
                loss.item()
            pacer.tick(step)
