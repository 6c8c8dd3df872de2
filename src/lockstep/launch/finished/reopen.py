"""Opening a finished run again: its checkpoints, its task, its model and what the model takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lockstep._compat.torch import tree_map
from lockstep.checkpoint.store import CheckpointStore, Snapshot
from lockstep.config import RunConfig
from lockstep.engine.lightning.module_task import ModuleTask
from lockstep.engine.resume import load_weights, restoring
from lockstep.engine.task import Datasets, Task
from lockstep.engine.trained import bare, build_model
from lockstep.engine.training_data import open_datasets
from lockstep.errors import CheckpointError, DataError
from lockstep.launch.run_claim import task_again
from lockstep.telemetry.rundir import RunDir


def restore(task: Task, model: torch.nn.Module, snapshot: Snapshot, source: Path) -> None:
    """The weights, then the task's own state, as a resumed training restores them: both after ``task.model()``."""
    load_weights(model, snapshot.model, source)
    with restoring(f"the checkpoint of step {snapshot.step}"):
        task.load_state_dict(snapshot.trainer["task"])


def as_restored(task: Task, config: RunConfig, datasets: Datasets) -> Datasets:
    """``datasets`` as a restored task opens them: its state may say how they are standardised."""
    return datasets if type(task).load_state_dict is Task.load_state_dict else open_datasets(task, config)


def load_model(
    run: RunDir, checkpoint: str | int = "best", *, task: Task | type[Task] | None = None
) -> tuple[Task, torch.nn.Module]:
    """A run's task and its model in evaluation mode, with the weights of a checkpoint; opens no data.

    Args:
        task: the run's task; ``None``: made from its settings.

    Raises:
        CheckpointError: there is no such checkpoint, or it is corrupt.
    """
    built = task_again(run, run.config(), task)
    snapshot = find_checkpoint(run, checkpoint)
    model = build_model(built)
    restore(built, model, snapshot, run.path)
    return built, bare(model.eval())


def find_checkpoint(run: RunDir, checkpoint: str | int) -> Snapshot:
    """The checkpoint that ``best``, ``last`` or a step number means.

    Raises:
        CheckpointError: there is none, or it is corrupt.
    """
    return CheckpointStore(run.checkpoints).load(find_step(run, checkpoint))


def find_step(run: RunDir, checkpoint: str | int) -> int:
    """The step that ``best``, ``last`` or a step number means. Raises :class:`CheckpointError`: there is none."""
    store = CheckpointStore(run.checkpoints)
    text = str(checkpoint)
    step = int(text) if text.isdigit() else store.step_of(text)
    if step is None and text == "best":
        step = store.step_of("last")
    if step is None or step not in store.steps():
        have = ", ".join(str(s) for s in store.steps()) or "none"
        raise CheckpointError(
            f"run {run.read().id} has no checkpoint {checkpoint!r}",
            why=f"its steps are: {have}",
            fix="name one, or best, or last",
        )
    return step


def _example_batch(task: Task, datasets: Datasets, size: int = 2) -> Any:
    """A small batch of training data, as the task's loss takes it."""
    import numpy as np

    from lockstep.data.requests import fetch

    return fetch(datasets.train, task.collate, 0, 0, np.arange(min(size, len(datasets.train)), dtype=np.int64))


def model_inputs(task: Task, model: torch.nn.Module, datasets: Datasets) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the task passes to ``model.forward`` for a small batch, found by watching it.

    Raises:
        DataError: the task's evaluation does not call the model itself; a ``LightningModule`` has no
            ``example_input_array``.
    """
    if isinstance(task, ModuleTask):
        return _example_of(model)
    batch = _example_batch(task, datasets)
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def watch(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args, kwargs))

    handle = model.register_forward_pre_hook(watch, with_kwargs=True)
    try:
        with torch.inference_mode():
            task.evaluate(model.eval(), batch)
            if not seen:  # it may have no evaluate()
                task.loss(model, batch)
    finally:
        handle.remove()
    if not seen:
        raise DataError(
            "neither evaluate() nor loss() of the task calls the model itself, so there is no program to export",
            fix="export the weights alone (--no-program)",
        )
    # Tensors made in inference mode cannot be traced.
    args, kwargs = tree_map(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, seen[0])
    return args, kwargs


def _example_of(module: torch.nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    example = getattr(module, "example_input_array", None)
    if example is None:
        raise DataError(
            "the module does not say what its forward() takes",
            why="it has no example_input_array",
            fix="set self.example_input_array in its __init__, or export the weights alone (--no-program)",
        )
    if isinstance(example, dict):
        return (), example
    return (tuple(example) if isinstance(example, (list, tuple)) else (example,)), {}
