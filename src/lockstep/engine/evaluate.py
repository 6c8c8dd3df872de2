"""Evaluation and prediction that count each sample once on any number of ranks.

The data set is cut into chunks of fixed size in index order; chunk c goes to rank c mod R, so every chunk has the
same content for any R. After every R chunks the rows travel to rank 0, which updates the metrics in index order: they
see the same rows in the same order. torchmetrics' metrics whose states can be merged are updated on every rank
instead (:class:`_States`), and rows stay where they are. torchmetrics' own synchronisation is not used: some metrics
fail on a rank that has seen no sample.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.data.loader import make_loader
from lockstep.data.requests import BatchRequest, InOrder, Source
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.distributed.staging import to_device, to_host
from lockstep.engine.generators import generators_kept
from lockstep.engine.metrics import make_metrics, values_of
from lockstep.engine.optim.precision import Precision
from lockstep.engine.strategies.base import SeededDraws
from lockstep.engine.task import Task
from lockstep.engine.trained import Callbacks, bare, check_loss
from lockstep.engine.training_data import collate_of
from lockstep.errors import TaskError
from lockstep.planning import LoaderPlan, Plan
from lockstep.rundir.heartbeat import Activity, pulse

#: Sum of the loss over a chunk, its count, and its rows, or states in their place.
_Chunk = tuple[float, float, Any]


@dataclass(frozen=True)
class Evaluator:
    """How a rank goes through data with the others, in chunks of ``batch_size`` samples.

    What is drawn for a chunk depends on ``seed``, the ``step`` of the weights and the chunk's number alone.
    ``ghosts``: a rank without a chunk evaluates a sample that counts nothing (for models whose forward is collective).
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
        together = {"ghosts": plan.sharded, "together": plan.pipelined}
        return cls(collectives, device, precision, plan.loader, plan.eval_batch_size, plan.seed, step, **together)

    def chunks(self, samples: int, *, first: int = 0, most: int | None = None) -> list[BatchRequest]:
        """This rank's chunk of every round from chunk ``first`` on; an empty one, or a ghost, when it has none for it.

        ``most``: chunks of all ranks; ``None``: all of ``samples``.
        """
        rank, ranks = (0, 1) if self.together else (self.collectives.rank, self.collectives.size)
        number, size = -(-samples // self.batch_size), self.batch_size
        number = number if most is None else min(number, most)
        nothing = BatchRequest(0, 0, 0, int(self.ghosts), ghost=self.ghosts)
        starts = (size * (start + rank) for start in range(first, number, ranks))
        return [
            BatchRequest(0, 0, start, min(start + size, samples)) if start < number * size else nothing
            for start in starts
        ]

    @contextlib.contextmanager
    def walk(
        self, model: nn.Module, dataset: Any, collate: Callable[[Any], Any], *, first: int = 0, most: int | None = None
    ) -> Iterator[Iterator[tuple[BatchRequest, Any]]]:
        """This rank's chunks of ``dataset`` and their batches, on its device; inside, ``model`` is in evaluation mode.

        Generators and the training flag of every module are afterwards as they were.
        """
        source = Source(dataset, collate, self.seed, InOrder())
        devices = list(dict.fromkeys((self.device, *(parameter.device for parameter in model.parameters()))))
        batches = self._batches(self.chunks(len(dataset), first=first, most=most), source, devices)
        with generators_kept(), evaluating(model), pulse.during(Activity.EVALUATING), contextlib.closing(batches):
            yield batches

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
) -> dict[str, Any]:
    """``{"loss": mean, metric: value, …}`` over ``dataset``, the same on every rank. Collective.

    Scalar metrics come back as floats, others (a confusion matrix) as nested lists.

    Args:
        chunks: number of chunks to evaluate (a sanity check); ``None``: all.
        forward: called in place of ``model``: the same, compiled.
        report: called with the number of samples before each chunk.
    """
    collectives = evaluator.collectives
    with evaluator.walk(model, dataset, collate_of(task), most=chunks) as batches:
        metrics: Any = make_metrics(task) if collectives.is_main else None
        merges, merged = getattr(task.merge, "__func__", None) is not Task.merge, list[Any]()
        states = None
        if collectives.broadcast(not merges and _States.are_those_of(metrics)):
            states = _States(make_metrics(task) if metrics is None else metrics)
        draw, chunk_number = SeededDraws(evaluator.seed, (), purpose="metrics"), 0

        def update(rows: Iterable[Any]) -> None:
            """With draws of this chunk alone: what was drawn before depends on the number of ranks."""
            draw(evaluator.step, chunk_number)
            _update(metrics, rows)

        take = states.add if states else merged.append if merges else update
        waiting, total, count = list[_Chunk | None](), 0.0, 0.0

        def send() -> None:
            """To rank 0, which gets them in index order. Collective."""
            nonlocal total, count, chunk_number
            for chunk in chain.from_iterable(zip(*collectives.gather(waiting) or (), strict=True)):
                if chunk is not None:
                    total, count = total + chunk[0], count + chunk[1]
                    with _without_sync():
                        take(chunk[2])
                        chunk_number += 1
            waiting.clear()

        # Not inference_mode: what a model caches on the way (masks, position tables) may meet autograd later.
        with torch.no_grad():
            for request, batch in batches:
                report(request.start)
                mine = _chunk(task, forward or bare(model), batch, request, evaluator.precision, checked=not merges)
                waiting.append(mine if states is None else states.update(mine, collectives))
                if states is None or not states.add_up:
                    send()
        if states is not None:
            waiting.append(None if states.add_up is False else (0.0, 0.0, states.take()))
            send()
            states.put()
        if merges and metrics is not None:
            rows = task.merge(merged)
            with _without_sync():
                update(rows)
        result = None
        pulse.at(Activity.COMPUTING_METRICS)  # the others wait for rank 0, maybe on another node
        if metrics is not None:
            draw(evaluator.step, len(dataset))  # no chunk has this number
            with _without_sync():
                result = {"loss": total / count if count else math.nan, **values_of(metrics)}
        return collectives.broadcast(result) or {}


@contextlib.contextmanager
def evaluation(task: Task, model: nn.Module, callbacks: Callbacks) -> Iterator[None]:
    """What surrounds an evaluation: nothing that happens inside changes training."""
    context = task._lockstep_context
    was_training = context.is_training
    with generators_kept(), evaluating(model):
        context.is_training = False
        callbacks.call("on_evaluation_start", context, model)
        yield
        callbacks.call("on_evaluation_end", context, model)
    context.is_training = was_training


@contextlib.contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Each module of ``model`` is afterwards in training or evaluation mode as before."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """``model`` in evaluation mode; afterwards each of its modules has its own mode back."""
    with modes_kept(model):
        model.eval()
        yield


def _update(metrics: Any, rows: Iterable[Any]) -> None:
    """Raises what ``metrics`` raise, with a note on what they were given."""
    given = tuple(rows)
    try:
        metrics.update(*given)
    except Exception as error:
        kinds = [f"{list(one.shape)} {one.dtype}" if isinstance(one, Tensor) else type(one).__name__ for one in given]
        error.add_note(f"raised by the metrics of Task.metrics(), which were given {', '.join(kinds) or 'nothing'}")
        raise


def _without_sync() -> contextlib.AbstractContextManager[None]:
    """Metrics of torchmetrics, also those in a task's own object, do not sync: rank 0 alone has seen rows, and all."""
    if "torchmetrics" not in sys.modules:  # to import it takes longer than many first steps
        return contextlib.nullcontext()
    from lockstep._compat.torchmetrics import without_sync

    return without_sync()


class _States:
    """Metrics of torchmetrics that every rank updates with its own rows, and whose states rank 0 merges.

    That takes ``full_state_update = False``, and states that are summed or of which the least or largest counts.
    Integers are merged once at the end; floating-point numbers chunk by chunk in index order, so that sums are
    rounded alike on any number of ranks.
    """

    def __init__(self, metrics: Any) -> None:
        self._metrics = metrics
        self._merged: list[Tensor] = []
        #: Whether the order of merging makes no difference; ``None`` until all ranks have agreed on it.
        self.add_up: bool | None = None

    @staticmethod
    def are_those_of(metrics: Any) -> bool:
        if not isinstance(metrics, nn.Module):
            return False
        from lockstep._compat.torchmetrics import Metric, MetricCollection, defaults, reductions

        return type(metrics) is MetricCollection and all(
            metric.full_state_update is False
            and not metric.dist_sync_on_step
            and not any(isinstance(module, Metric) for module in [*metric.modules()][1:])
            and all(
                isinstance(defaults(metric)[name], Tensor) and reduction in _merging()
                for name, reduction in reductions(metric).items()
            )
            for metric in metrics.values(copy_state=False)
        )

    def update(self, chunk: _Chunk | None, collectives: Collectives) -> Any:
        """``chunk`` with its states, unless these are taken at the end, in place of its rows. Collective at first."""
        is_first = self.add_up is None
        if not is_first or collectives.is_main:
            self._add(chunk)
        if is_first:
            # Metrics with equal states after their first rows share an update: by those of chunk 0, on every rank.
            from lockstep._compat.torchmetrics import compute_groups

            add_up = not any(state.is_floating_point() for state in self.take())
            groups, self.add_up = collectives.broadcast((compute_groups(self._metrics), add_up))
            compute_groups(self._metrics, groups)
            if not collectives.is_main:
                self._add(chunk)
        return chunk and (*chunk[:2], None if self.add_up else self.take())

    def _add(self, chunk: _Chunk | None) -> None:
        if chunk is not None:
            if not self.add_up:
                self._metrics.reset()
            _update(self._metrics, chunk[2])

    def _names(self) -> Iterator[tuple[Any, str]]:
        from lockstep._compat.torchmetrics import defaults

        for metric in self._metrics.values(copy_state=False):
            for name in defaults(metric):
                yield metric, name

    def take(self) -> list[Tensor]:
        return [getattr(metric, name) for metric, name in self._names()]

    def add(self, states: list[Tensor] | None) -> None:
        if states is not None and self._merged:
            from lockstep._compat.torchmetrics import reductions

            merge = [_merging()[reductions(metric)[name]] for metric, name in self._names()]
            states = [one(old, new) for one, old, new in zip(merge, self._merged, states, strict=True)]
        self._merged = states or self._merged

    def put(self) -> None:
        from lockstep._compat.torchmetrics import mark_updated

        for (metric, name), state in zip(self._names(), self._merged, strict=False):
            setattr(metric, name, state)
            mark_updated(metric)


@cache
def _merging() -> dict[Any, Callable[[Tensor, Tensor], Tensor]]:
    from torchmetrics.utilities import data

    return {data.dim_zero_sum: torch.add, data.dim_zero_max: torch.maximum, data.dim_zero_min: torch.minimum}


def _chunk(
    task: Task, model: nn.Module, batch: Any, request: BatchRequest, precision: Precision, *, checked: bool
) -> _Chunk | None:
    """Sum of the loss, its count, and the rows; ``None`` when the chunk counts nothing."""
    if request.size == 0:
        return None
    with precision.autocast():
        found = task.validate(model, batch)
    if request.ghost or found is None:  # a pipeline's last rank alone has rows
        return None
    loss, rows = check_loss(found[0]), found[1]
    if checked:
        check_rows(rows, request.size, "the task's evaluate()")
    return float(loss.total), float(loss.count), to_host(rows)


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
