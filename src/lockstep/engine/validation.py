"""Evaluations of the weights that are being trained."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import signature
from typing import Any

import torch

from lockstep.engine.confusion import ConfusedSamples
from lockstep.engine.evaluate import Evaluator, evaluate, evaluation
from lockstep.engine.parts import Parts
from lockstep.engine.rank_context import RankContext
from lockstep.engine.run_log import unreported
from lockstep.engine.task import Datasets, Task
from lockstep.errors import TaskError, UnsupportedError
from lockstep.events import PictureDrawn, Remarked
from lockstep.rundir.files import write_json, write_text
from lockstep.telemetry.sinks import check_picture


class Validation:
    """Evaluates the weights that are being trained: the sanity check, validation, and the test. Methods are collective.

    Refuses a task that shows something of the model after evaluations, where no rank has all of it.
    """

    def __init__(self, rank: RankContext, task: Task, datasets: Datasets, parts: Parts) -> None:
        self._rank = rank
        self._task = task
        self._datasets = datasets
        self._parts = parts
        self._module = parts.strategy.module
        precision = parts.update.precision
        self._evaluator = Evaluator.of_plan(rank.plan, rank.collectives, rank.device, precision)
        for method in (task.remarks, task.pictures):
            if rank.plan.strategy.divides and any(p.default is p.empty for p in signature(method).parameters.values()):
                raise UnsupportedError(
                    f"the task's {method.__name__}() takes the model, which strategy "
                    f"{rank.plan.placement['strategy']} divides",
                    why="it is called on one rank, which has only a part of the model",
                    fix="keep the values that it shows in evaluate(), or train with --strategy ddp",
                )

    def settle_loader(self, workers: int, text: str) -> None:
        """Evaluate with at most ``workers`` loader processes, which is what training measured to be best."""
        loader = self._evaluator.loader.model_copy(update={"most_workers": workers})
        self._evaluator = replace(self._evaluator, loader=loader)
        self._rank.note("loader", text)

    def sanity_check(self) -> None:
        """Evaluate a few batches before the first step. Remarks and pictures of untrained weights are not emitted."""
        steps = self._rank.config.validation.sanity_steps
        if steps and self._datasets.val is not None and self._parts.state.step == 0:
            with evaluation(self._task, self._module, self._parts.callbacks):
                metrics = self._evaluate(self._datasets.val, steps * self._rank.collectives.size)
                self._show(emits=False)
            self._check_monitor(metrics)

    def _check_monitor(self, metrics: Mapping[str, Any]) -> None:
        """Raise :class:`ConfigError` if the monitored metric is not among those of an evaluation."""
        monitor = self._rank.plan.monitor
        sets = ["", *(f"{name}_" for name in self._datasets.named)]
        names = _by_row_name(dict.fromkeys(sets, metrics))
        if monitor not in names and monitor != Task.monitor[0]:
            error = unreported(monitor, names)
            error.fix += "; if only later evaluations report it, set validation.sanity_steps=0"
            raise error

    def run(self) -> dict[str, float]:
        """Evaluate the validation data; return its numbers, named ``val_…``, and emit the task's remarks."""
        self._parts.strategy.passes.buffers.check()
        with self._parts.update.averages.in_use(), evaluation(self._task, self._module, self._parts.callbacks):
            rest = [*self._datasets.named.items()][1:]  # the first one is the last evaluated, and shown
            evaluations = {f"{name}_": self._evaluate(dataset, self._chunks) for name, dataset in rest}
            values = self._evaluate(self._datasets.val, self._chunks)
            self._show()
        evaluations = {f"{name}_": values for name in [*self._datasets.named][:1]} | evaluations | {"": values}
        return _by_row_name(evaluations)

    def test(self, step: int) -> dict[str, float]:
        """Evaluate the test set with the weights of ``step``; return numbers, write others to ``tables.json``.

        The samples behind the cells of a confusion matrix among them go to ``confused.json``.
        """
        confused = ConfusedSamples()
        dataset = self._datasets.test
        with evaluation(self._task, self._module, self._parts.callbacks):
            metrics = self._evaluate(dataset, self._chunks, step, confused.add)
        values = {f"test_{name}": value for name, value in metrics.items()}
        numbers = {name: float(value) for name, value in _numbers(values).items()}
        tables = {name: value for name, value in values.items() if name not in numbers}
        if tables and self._rank.collectives.is_main:
            names = self._task.class_names
            tables |= {"class_names": list(names)} if names else {}
            folder = self._rank.run_dir.path
            write_json(folder / "tables.json", tables)
            cells = confused.cells(tables, getattr(dataset, "names", None))
            write_text(folder / "confused.json", json.dumps(cells, ensure_ascii=False))
        return numbers

    @property
    def _chunks(self) -> int | None:
        """How many batches an evaluation takes; ``None``: all."""
        debug = self._rank.config.debug
        return self._rank.collectives.size if debug.fast_dev_run else debug.limit_eval_batches

    def _evaluate(
        self, dataset: Any, chunks: int | None, step: int | None = None, add_rows: Callable[[Any], None] | None = None
    ) -> dict[str, Any]:
        evaluator = replace(self._evaluator, step=self._parts.state.step if step is None else step)
        task = self._parts.strategy.evaluating(self._task)
        forward = self._parts.strategy.compiled
        return evaluate(evaluator, task, self._module, dataset, chunks=chunks, forward=forward, add_rows=add_rows)

    def _show(self, *, emits: bool = True) -> None:
        """Emit the task's remarks and pictures of an evaluation, whose metrics only rank 0 has."""
        if not self._rank.collectives.is_main:
            return
        with torch.no_grad():
            remarks = self._asked(self._task.remarks)
            pictures = self._asked(self._task.pictures) if emits else {}
        if not emits:
            return
        position = self._rank.attempt, self._parts.state.epoch + 1, self._parts.state.step
        if remarks:
            self._rank.sink.emit(Remarked(*position, remarks))
        for remark in remarks:
            self._rank.note("task_remark", str(remark))
        for name, pixels in pictures.items():
            check_picture(name, pixels)
            self._rank.sink.emit(PictureDrawn(*position, name, pixels))

    def _asked(self, method: Callable[..., Any]) -> Any:
        takes_model = signature(method).parameters and not self._rank.plan.strategy.divides
        return method(self._parts.model) if takes_model else method()


def _by_row_name(evaluations: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Name the numbers of ``evaluations`` by the prefix of their set, as in rows. Raises :class:`TaskError`."""
    row: dict[str, float] = {}
    for prefix, metrics in evaluations.items():
        for metric, value in _numbers(metrics).items():
            name = f"val_{prefix}{metric}"
            if name in row:
                raise TaskError(
                    f"two values of an evaluation are called {name}",
                    why="one is of the validation set of that name, the other a metric's",
                    fix="rename the metric, or the set in Datasets(val={…})",
                )
            row[name] = value
    return row


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float | int]:
    return {name: value for name, value in metrics.items() if isinstance(value, float | int)}
