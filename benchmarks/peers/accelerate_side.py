"""The experiment in Accelerate: the loops of its guides, written out.

Variants: ``default``; ``gather`` instead of ``gather_for_metrics``; ``variable-size guide`` (the loop of the guide on
gradient accumulation, section on samples of variable size); settings of ``DataLoaderConfiguration`` by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from peers.probe import LR, SEED, VALIDATION_BATCH, Diary, Job, Values, count, subject

SETTINGS = ("even_batches", "split_batches", "use_seedable_sampler", "use_stateful_dataloader")


def run(job: Job) -> dict[str, Any]:
    set_seed(SEED)
    chosen = dict(part.split("=") for part in job.variant.split(", ") if part.partition("=")[0] in SETTINGS)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=job.accumulate,
        dataloader_config=DataLoaderConfiguration(**{name: value == "True" for name, value in chosen.items()}),
    )
    if job.kind == "validation":
        return _validate(accelerator, job)
    model, samples = subject(job.kind, job.samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    batch = job.batch * job.ranks if "split_batches" in chosen else job.batch
    loader = DataLoader(samples, batch_size=batch, shuffle=job.shuffle)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    train = _train_variable if job.variant.startswith("variable-size guide") else _train
    diary = Diary()
    train(accelerator, job, model, optimizer, loader, diary)
    result = diary.result(accelerator.unwrap_model(model))
    accelerator.free_memory()
    return result


def _validate(accelerator: Any, job: Job) -> dict[str, Any]:
    loader = accelerator.prepare(DataLoader(Values(), batch_size=VALIDATION_BATCH))
    gather = accelerator.gather if job.variant == "gather" else accelerator.gather_for_metrics
    values = torch.cat([gather(batch) for batch in loader])
    return {"count": len(values), "mean": values.mean().item()}


def _train(accelerator: Any, job: Job, model: Any, optimizer: Any, loader: Any, diary: Diary) -> None:
    step, first = 0, 0
    if job.resume:
        accelerator.load_state(job.folder)
        step = job.stop_after or 0
        first = step // len(loader)
    for epoch in range(first, job.epochs):
        for batch in _rest_of_epoch(accelerator, job, loader, epoch, step):
            with accelerator.accumulate(model):
                loss = model(batch).mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                reported = accelerator.reduce(loss.detach(), "mean").item()
                diary.note(step, epoch, reported, accelerator.unwrap_model(model))
                if step == job.stop_after and not job.resume:
                    accelerator.save_state(job.folder)
                    return


def _rest_of_epoch(accelerator: Any, job: Job, loader: Any, epoch: int, step: int) -> Any:
    """As the guide on checkpointing says; a stateful loader knows by itself where it was."""
    loader.set_epoch(epoch)
    done = step - epoch * len(loader)
    if job.resume and done > 0 and "use_stateful_dataloader" not in job.variant:
        return accelerator.skip_first_batches(loader, done)
    return loader


def _train_variable(accelerator: Any, job: Job, model: Any, optimizer: Any, loader: Any, diary: Diary) -> None:
    """Counts the samples, or tokens, of a whole window before its first backward, on all ranks."""
    for step, window in enumerate(_windows(loader, job.accumulate), start=1):
        items = torch.tensor(sum(map(count, window)))
        items = accelerator.gather(items).sum().item()
        for place, batch in enumerate(window):
            waits = place < len(window) - 1 and accelerator.num_processes > 1
            with model.no_sync() if waits else contextlib.nullcontext():
                total = model(batch).sum()
                accelerator.backward(total * job.accumulate * accelerator.num_processes / items)
        optimizer.step()
        optimizer.zero_grad()
        reported = accelerator.reduce(total.detach(), "sum").item() / items
        diary.note(step, 0, reported, accelerator.unwrap_model(model))


def _windows(loader: Any, accumulate: int) -> Iterator[list[Any]]:
    batches = iter(loader)
    while window := list(islice(batches, accumulate)):
        yield window
