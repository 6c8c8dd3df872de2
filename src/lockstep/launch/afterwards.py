"""What people do with a finished run: evaluate one of its checkpoints, export its weights."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import ValidationError

from lockstep.checkpoint.store import CheckpointStore, Snapshot
from lockstep.config import RunConfig, resolve
from lockstep.engine.collectives import Collectives
from lockstep.engine.evaluate import evaluate
from lockstep.engine.lightning_task import ModuleTask
from lockstep.engine.precision import Precision
from lockstep.engine.resume import load_weights, restoring
from lockstep.engine.runtime import rank_device
from lockstep.engine.task import Datasets, Task
from lockstep.errors import CheckpointError, DataError, RunFolderError
from lockstep.hardware.world import World
from lockstep.launch.folder import refuse_unknown_code
from lockstep.launch.prepare import place, settle
from lockstep.plan import Plan
from lockstep.telemetry.rundir import RunDir


def evaluate_checkpoint(run: RunDir, *, split: str, devices: str | None, checkpoint: str | int) -> dict[str, Any]:
    """Metrics of one checkpoint on one split, computed on one device in this process."""
    refuse_unknown_code(run)
    wanted = devices.split(",")[0] if devices else None
    config = run.config()
    if wanted is not None or config.hardware.selected_devices:
        first = wanted or (config.hardware.selected_devices or ("cpu",))[0]
        config = resolve(
            config.model_dump(mode="json"), {"hardware": {"selected_devices": [first], "strategy": "auto"}}
        )
    snapshot = find_checkpoint(run, checkpoint)
    task, datasets = reopen(config, snapshot)
    about = {"run": run.read().id, "split": split, "step": snapshot.step}
    if isinstance(task, ModuleTask):
        from lockstep.engine.lightning_evaluate import evaluate_module

        placement = place(config, World())
        load_weights(task.module, snapshot.model, run.path)
        device = rank_device(placement.devices, World())
        values, samples = evaluate_module(task, split, device, placement.precision, config.training.seed)
        return {**about, "samples": samples, "metrics": values}
    dataset = getattr(datasets, split, None)
    if dataset is None:
        raise DataError(f"this task has no {split} data", fix="choose --split val or --split test")
    placement = place(config, World())
    plan = _plan_of(run)
    device = rank_device(placement.devices, World())
    model = task.model()
    load_weights(model, snapshot.model, run.path)
    values = evaluate(
        task,
        model.to(device),
        dataset,
        Collectives(World()),
        batch_size=plan.eval_batch_size,
        device=device,
        precision=Precision(placement.precision, device, 1.0),
        loader=plan.loader,
        seed=plan.seed,
    )
    named = {f"{split}_{name}": value for name, value in values.items()}
    return {**about, "samples": len(dataset), "metrics": named}


def _plan_of(run: RunDir) -> Plan:
    try:
        return Plan.model_validate(run.plan())
    except ValidationError as error:
        raise RunFolderError(
            f"{run.plan_file} is damaged",
            why=str(error)[:300],
            fix=f"copy the newest plan.json of {run.attempts} over it",
        ) from None


def reopen(config: RunConfig, snapshot: Snapshot) -> tuple[Task, Datasets]:
    """A run's task as the checkpoint left it (how it standardised its data, say), and its data."""
    task, _ = settle(config.task.name, config)
    with restoring(f"the checkpoint of step {snapshot.step}"):
        task.load_state_dict(snapshot.trainer["task"])
    task.prepare()
    return task, task.datasets()


def load_model(run: RunDir, checkpoint: str | int = "best") -> tuple[Task, torch.nn.Module]:
    """A run's task and its model in evaluation mode, with the weights of a checkpoint; opens no data.

    Raises:
        CheckpointError: there is no such checkpoint, or it is corrupt.
    """
    refuse_unknown_code(run)
    snapshot = find_checkpoint(run, checkpoint)
    config = run.config()
    task, _ = settle(config.task.name, config)
    with restoring(f"the checkpoint of step {snapshot.step}"):
        task.load_state_dict(snapshot.trainer["task"])
    model = task.model()
    load_weights(model, snapshot.model, run.path)
    return task, model.eval()


def find_checkpoint(run: RunDir, checkpoint: str | int) -> Snapshot:
    """The checkpoint that ``best``, ``last`` or a step number means.

    Raises:
        CheckpointError: there is none, or it is corrupt.
    """
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
    return store.load(step)


def example_batch(task: Task, datasets: Datasets, size: int = 2) -> Any:
    """A small batch of training data, as the task's loss takes it."""
    import numpy as np

    from lockstep.data.loader import fetch

    return fetch(datasets.train, task.collate, 0, 0, np.arange(min(size, len(datasets.train)), dtype=np.int64))


def model_inputs(task: Task, model: torch.nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the task passes to ``model.forward`` for ``batch``, found by watching it.

    Raises:
        DataError: the task's evaluation does not call the model itself; a ``LightningModule`` has no
            ``example_input_array``.
    """
    if isinstance(task, ModuleTask):
        return _example_of(model)
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def watch(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args, kwargs))

    handle = model.register_forward_pre_hook(watch, with_kwargs=True)
    try:
        with torch.inference_mode():
            task.evaluate(model.eval(), batch)
    finally:
        handle.remove()
    if not seen:
        raise DataError(
            "the task's evaluate() does not call the model itself, so there is no program to export",
            fix="export the weights alone (--no-program)",
        )
    args, kwargs = seen[0]
    # Tensors made in inference mode cannot be traced.
    return tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args), kwargs


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
