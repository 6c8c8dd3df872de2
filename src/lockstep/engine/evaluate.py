"""Evaluation that counts each sample once on any number of ranks.

The data set is cut into chunks of fixed size in index order; chunk c goes to rank c mod R. After every R
chunks the rows travel to rank 0, which updates the metrics in index order. So metrics see the same rows
in the same order, and every chunk has the same content, for any R; a rank without a chunk sends nothing.
torchmetrics' own synchronisation is not used: some metrics fail on a rank that has seen no sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lockstep.data.loader import InOrder, Request, Source, make_loader
from lockstep.engine.collectives import Collectives
from lockstep.engine.precision import Precision
from lockstep.engine.strategy import check_loss, to_device
from lockstep.engine.task import Task
from lockstep.errors import TaskError
from lockstep.plan import LoaderPlan

Rows = tuple[Tensor, ...]


def evaluate(
    task: Task,
    model: nn.Module,
    dataset: Any,
    collectives: Collectives,
    *,
    batch_size: int,
    device: torch.device,
    precision: Precision,
    loader: LoaderPlan,
    seed: int,
    chunks: int | None = None,
) -> dict[str, Any]:
    """``{"loss": mean, metric: value, …}`` over ``dataset``, the same on every rank.

    Scalar metrics come back as floats, others (a confusion matrix) as nested lists. Collective.

    Args:
        batch_size: samples of a chunk.
        chunks: evaluate only so many chunks (a sanity check); ``None``: all.
    """
    metrics = _own_metrics(task) if collectives.is_main else None
    total = count = 0.0
    was_training = model.training
    model.eval()
    rounds = list(_rounds(len(dataset), batch_size, collectives, chunks))
    source = Source(dataset, task.collate, seed, InOrder())
    batches = make_loader(source, rounds, loader, collectives.rank)
    try:
        # Not inference_mode: what a model caches on the way (masks, position tables) may meet autograd later.
        with torch.no_grad():
            for request, batch in zip(rounds, batches, strict=True):
                mine = _chunk(task, model, batch, request.size, device, precision)
                for chunk in collectives.gather(mine) or []:
                    if chunk is not None and metrics is not None:
                        total, count = total + chunk[0], count + chunk[1]
                        metrics.update(*chunk[2])
    finally:
        batches.close()
        model.train(was_training)
    result = None
    if metrics is not None:
        result = {
            "loss": total / count if count else float("nan"),
            **{k: _plain(v) for k, v in metrics.compute().items()},
        }
    return collectives.broadcast(result) or {}


def _own_metrics(task: Task) -> MetricCollection:
    """The task's metrics with their own synchronisation off: rank 0 alone has seen rows, and has seen all."""
    metrics = task.metrics()
    for module in metrics.modules():
        if isinstance(module, Metric):
            module.sync_on_compute = module._to_sync = False
    return metrics


def _rounds(samples: int, batch_size: int, collectives: Collectives, chunks: int | None) -> Iterator[Request]:
    """This rank's chunk of every round; an empty one when the round has none for it."""
    number = -(-samples // batch_size)
    number = number if chunks is None else min(number, chunks)
    for first in range(0, number, collectives.size):
        chunk = first + collectives.rank
        start, stop = (chunk * batch_size, min((chunk + 1) * batch_size, samples)) if chunk < number else (0, 0)
        yield Request(0, 0, start, stop)


def _chunk(
    task: Task, model: nn.Module, batch: Any, size: int, device: torch.device, precision: Precision
) -> tuple[float, float, Rows] | None:
    if size == 0:
        return None
    if device.type != "cpu":
        batch = to_device(batch, device)
    with precision.autocast():
        loss, rows = task.validate(model, batch)
    loss = check_loss(loss)
    for row in rows:
        if not isinstance(row, Tensor) or row.dim() == 0 or len(row) != size:
            shape = tuple(row.shape) if isinstance(row, Tensor) else type(row).__name__
            raise TaskError(
                "the task's evaluate() must return tensors with one row per sample",
                why=f"for {size} samples it returned {shape}",
                fix="return for example (logits, labels), each with the batch as its first dimension",
            )
    return float(loss.total), float(loss.count), tuple(row.cpu() for row in rows)


def _plain(value: Tensor) -> Any:
    return value.item() if value.numel() == 1 else value.tolist()
