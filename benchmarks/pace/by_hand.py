"""The hand-written loop, and the floor: a loop over batches that lie ready, with nothing else in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count, cycle
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from pace.catalogue import DATASETS, padded, unpacked
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
    if workload.dataset is not None:
        return _of_catalogue(workload)
    dataset = TensorDataset(*workload.data())
    pin = workload.device != "cpu"
    if workload.ranks == 1 or not sharded:
        return DataLoader(dataset, workload.batch, shuffle=True, pin_memory=pin)
    return DataLoader(dataset, workload.batch, sampler=DistributedSampler(dataset), pin_memory=pin)


def _of_catalogue(workload: Workload) -> DataLoader[Any]:
    # A DataLoader would collate the finished batches of our own arrays.
    name = "tensors" if workload.dataset == "arrays" else workload.dataset or ""
    dataset = DATASETS[name][0](workload)
    several = {"sampler": DistributedSampler(dataset)} if workload.ranks > 1 else {"shuffle": True}
    workers = workload.workers or 0
    collate = padded if workload.dataset == "ragged" else None
    return DataLoader(
        dataset, workload.batch, num_workers=workers, persistent_workers=workers > 0, collate_fn=collate, **several
    )


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
    reads = workload.side.startswith("hand")
    for step, batch in zip(range(1, workload.total_steps + 1), batches, strict=False):
        inputs, labels = batch if workload.dataset is None else unpacked(batch)
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
