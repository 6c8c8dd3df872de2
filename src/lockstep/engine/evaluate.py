"""Evaluation and prediction that count each sample once on any number of ranks.

The data set is cut into chunks of fixed size in index order; chunk c goes to rank c mod R, so every chunk has the
same content for any R. After every R chunks the rows travel to rank 0, which updates the metrics in index order: they
see the same rows in the same order. torchmetrics' synchronisation is not used: some metrics fail on a rank that has
seen no sample.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.data.loader import make_loader
from lockstep.data.requests import BatchRequest, InOrder, Source
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.distributed.staging import to_device, to_host
from lockstep.engine.generators import generators_kept
from lockstep.engine.loss import check_loss
from lockstep.engine.metrics import make_metrics, update_metrics, values_of, without_sync
from lockstep.engine.optim.precision import Precision
from lockstep.engine.strategies.base import SeededDraws
from lockstep.engine.task import Task
from lockstep.engine.trained import Callbacks, bare
from lockstep.engine.training_data import collate_of
from lockstep.errors import TaskError
from lockstep.planning import LoaderPlan, Plan
from lockstep.rundir.heartbeat import Activity, pulse


@dataclass(frozen=True)
class Evaluator:
    """How a rank goes through data with the others, in chunks of ``batch_size`` samples.

    The random numbers of a chunk depend on ``seed``, the ``step`` of the weights and the chunk's number alone.
    ``ghosts``: a rank without a chunk evaluates the first one, uncounted (for models whose forward is collective).
    ``together``: all ranks take part in every chunk, and one of them has its rows.
    """

    collectives: Collectives
    device: torch.device
    precision: Precision
    loader: LoaderPlan
    batch_size: int
    seed: int
    step: int = 0
    ghosts: bool = False
    together: bool = False

    @classmethod
    def of_plan(
        cls, plan: Plan, collectives: Collectives, device: torch.device, precision: Precision, step: int = 0
    ) -> Evaluator:
        return cls(
            collectives,
            device,
            precision,
            plan.loader,
            plan.eval_batch_size,
            plan.seed,
            step,
            ghosts=plan.sharded,
            together=plan.pipelined,
        )

    def chunks(self, samples: int, *, limit: int | None = None) -> list[BatchRequest]:
        """Return this rank's chunk of every round; an empty one, or a ghost, when it has none for it.

        ``limit``: chunks of all ranks; ``None``: all of ``samples``.
        """
        rank, ranks = (0, 1) if self.together else (self.collectives.rank, self.collectives.size)
        size = self.batch_size
        number = len(range(0, samples, size))
        number = number if limit is None else min(number, limit)
        replayed = min(size, samples) if self.ghosts else 0  # the first chunk: a model may need several samples
        nothing = BatchRequest(0, 0, 0, replayed, ghost=self.ghosts)
        starts = (size * (start + rank) for start in range(0, number, ranks))
        return [
            BatchRequest(0, 0, start, min(start + size, samples)) if start < number * size else nothing
            for start in starts
        ]

    def rounds(
        self,
        model: nn.Module,
        dataset: Any,
        collate: Callable[[Any], Any],
        compute: Callable[[Any, BatchRequest], Any],
        *,
        limit: int | None = None,
        on_all_ranks: bool = False,
    ) -> Iterator[list[Any]]:
        """Yield the results of ``compute(batch, chunk)`` for as many chunks as there are ranks, in order. Collective.

        ``model`` is in evaluation mode. Generators and the training flags of its modules are afterwards as they were.

        Args:
            limit: chunks of all ranks; ``None``: all.
            on_all_ranks: whether all ranks get the results; else rank 0 does, and the lists of the others are empty.
        """
        send = self.collectives.all_gather if on_all_ranks else self.collectives.gather
        source = Source(dataset, collate, self.seed, InOrder())
        devices = list(dict.fromkeys((self.device, *(parameter.device for parameter in model.parameters()))))
        batches = self._batches(self.chunks(len(dataset), limit=limit), source, devices)
        with generators_kept(), evaluating(model), pulse.during(Activity.EVALUATING), contextlib.closing(batches):
            for request, batch in batches:
                result = None
                if request.size:
                    # Not inference_mode: caches of a model (masks, position tables) may meet autograd later.
                    with torch.no_grad(), self.precision.autocast():
                        result = compute(batch, request)
                results = send(None if request.ghost else result) or ()
                yield [result for result in results if result is not None]

    def _batches(
        self, chunks: Sequence[BatchRequest], source: Source, devices: Sequence[torch.device]
    ) -> Generator[tuple[BatchRequest, Any], None, None]:
        loader = self.loader
        if source.is_at_hand or source.reader.gathers:  # to start processes for it takes longer than its rows
            loader = loader.model_copy(update={"num_workers": 0, "most_workers": 0})
        draw = SeededDraws(self.seed, devices, purpose="evaluation")
        batches = make_loader(source, chunks, loader, self.collectives.rank, largest=self.batch_size)
        with contextlib.closing(batches):
            for chunk, batch in zip(chunks, batches, strict=True):
                pulse.at(Activity.EVALUATING)
                draw(self.step, chunk.start // self.batch_size)
                yield chunk, to_device(batch, self.device) if chunk.size and self.device.type != "cpu" else batch


def evaluate(
    evaluator: Evaluator,
    task: Task,
    model: nn.Module,
    dataset: Any,
    *,
    chunks: int | None = None,
    forward: nn.Module | None = None,
    report: Callable[[int], None] = lambda done: None,
    add_rows: Callable[[Any], None] | None = None,
) -> dict[str, Any]:
    """Compute ``{"loss": mean, metric: value, …}`` over ``dataset``, the same on every rank. Collective.

    Scalar metrics come back as floats, others (a confusion matrix) as nested lists.

    Args:
        chunks: number of chunks to evaluate (a sanity check); ``None``: all.
        forward: called in place of ``model``: the same, compiled.
        report: called with the number of samples before each chunk.
        add_rows: called with the rows of each chunk, on rank 0.
    """
    collectives = evaluator.collectives
    metrics: Any = make_metrics(task) if collectives.is_main else None
    merges = getattr(task.merge, "__func__", None) is not Task.merge
    merged = list[Any]()
    draw = SeededDraws(evaluator.seed, (), purpose="metrics")
    chunk_number = 0
    total = 0.0
    count = 0.0

    def compute(batch: Any, request: BatchRequest) -> Chunk | None:
        report(request.start)
        return _chunk(task, forward or bare(model), batch, request, checked=not merges)

    def update(rows: Iterable[Any]) -> None:
        """Update with random numbers of this chunk alone: a model's draws depend on the number of ranks."""
        draw(evaluator.step, chunk_number)
        with without_sync():
            update_metrics(metrics, rows)

    rounds = evaluator.rounds(model, dataset, collate_of(task), compute, limit=chunks)
    with generators_kept(), pulse.during(Activity.EVALUATING):
        with torch.no_grad():
            for chunk in chain.from_iterable(rounds):
                total += chunk.total
                count += chunk.count
                merged.append(chunk.rows) if merges else update(chunk.rows)
                if add_rows is not None and not merges:
                    add_rows(chunk.rows)
                chunk_number += 1
        if merges and metrics is not None:
            update(task.merge(merged))
        result = None
        pulse.at(Activity.COMPUTING_METRICS)  # the others wait for rank 0, maybe on another node
        if metrics is not None:
            draw(evaluator.step, len(dataset))  # no chunk has this number
            with without_sync():
                result = {"loss": total / count if count else math.nan, **values_of(metrics, task.class_names)}
        return collectives.broadcast(result) or {}


@contextlib.contextmanager
def evaluation(task: Task, model: nn.Module, callbacks: Callbacks) -> Iterator[None]:
    """Surround an evaluation: nothing that happens inside changes training."""
    context = task._lockstep_context
    was_training = context.is_training
    with generators_kept(), evaluating(model):
        context.is_training = False
        callbacks.call("on_evaluation_start", context, model)
        yield
        callbacks.call("on_evaluation_end", context, model)
    context.is_training = was_training


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put ``model`` in evaluation mode; each of its modules returns to its mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


class Chunk(NamedTuple):
    """The sum of the loss over a chunk of samples, its count, and the rows."""

    total: float
    count: float  # type: ignore[assignment]  # hides tuple.count()
    rows: Any


def _chunk(task: Task, model: nn.Module, batch: Any, request: BatchRequest, *, checked: bool) -> Chunk | None:
    """Evaluate a chunk; ``None`` when it counts nothing."""
    outputs = task.validate(model, batch)
    if request.ghost or outputs is None:  # a pipeline's last rank alone has rows
        return None
    loss = check_loss(outputs[0])
    rows = outputs[1]
    if checked:
        check_rows(rows, request.size, "the task's evaluate()")
    return Chunk(float(loss.total), float(loss.count), to_host(rows))


def check_rows(rows: Any, size: int, source: str) -> None:
    """Raise :class:`TaskError` unless each of ``rows``, which ``source`` returned, has ``size`` rows or entries."""
    wrong = [row for row in rows if not has_rows(row, size)] if isinstance(rows, (tuple, list)) else [rows]
    if wrong:
        shape = (
            f"a tensor of shape {tuple(wrong[0].shape)}" if isinstance(wrong[0], Tensor) else type(wrong[0]).__name__
        )
        raise TaskError(
            f"{source} must return a tuple of tensors with one row per sample, or lists with one entry",
            why=f"for {size} samples it returned {shape}",
            fix="return for example (logits, labels), each with the batch as its first dimension; keep the rows that "
            "the metric must leave out, and mark them (NaN, or a label for its ignore_index)"
            + (", or override merge() to return something else" if "evaluate" in source else ""),
        )


def has_rows(column: Any, size: int) -> bool:
    if isinstance(column, (Tensor, np.ndarray)):
        return column.ndim > 0 and len(column) == size
    return isinstance(column, (list, tuple)) and len(column) == size
