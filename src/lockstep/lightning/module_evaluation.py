"""The checkpoint of a module's run on Lightning's Trainer: the values that it logs, and its predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.loggers.logger import DummyLogger

from lockstep.engine.predict import Row, table_rows
from lockstep.engine.reopened import Reopened
from lockstep.engine.resume import load_weights
from lockstep.errors import DataError, TaskError
from lockstep.hardware.world import World
from lockstep.lightning.cluster import quiet_trainer, rank_arguments
from lockstep.lightning.dataloaders import SharedBatches, defines, evaluation_loader, replaced_loaders
from lockstep.lightning.module_task import ModuleTask
from lockstep.telemetry.loggers import as_row


def evaluate_checkpoint(task: ModuleTask, reopened: Reopened) -> dict[str, Any]:
    """Return ``samples`` and ``metrics`` of a checkpoint."""
    request = reopened.evaluation
    with _weights_of_checkpoint(task, reopened):
        metrics, samples = evaluate_module(task, request.split, request.plan.placement, request.config.training.seed)
    return {"samples": samples, "metrics": metrics}


@contextmanager
def _weights_of_checkpoint(task: ModuleTask, reopened: Reopened) -> Iterator[None]:
    """Give the module the weights of the checkpoint in the body. Afterwards a user's object has those of before."""
    module = task.module
    before = deepcopy(module.state_dict()) if task.module_class is None else None
    load_weights(module, reopened.snapshot.model, reopened.evaluation.run.path)
    try:
        yield
    finally:
        if before is not None:
            module.load_state_dict(before)


def evaluate_module(
    task: ModuleTask, split: str, placement: Mapping[str, Any], seed: int
) -> tuple[dict[str, float], int | None]:
    """Evaluate ``task.module`` on ``split``: its logged values, by the names of rows, and the number of samples.

    Their number is ``None`` if a loader does not say it: of an iterable data set, or several loaders in one.
    """
    module = task.module
    step = {"val": "validation_step", "test": "test_step"}.get(split)
    if step is None:
        reason = "a LightningModule has steps for validation and test data"
        raise DataError(f"a module is not evaluated on its {split} data", why=reason, fix="name val or test")
    _check_data(task, split)
    if not defines(module, step):
        reason = f"evaluation on the {split} data calls it for each batch"
        fix = f"write {step}(){_other(split)}"
        raise TaskError(f"{type(module).__name__} has no {step}()", why=reason, fix=fix)
    sizes: list[int | None] = []

    def counted(loader: Any) -> Any:
        shared = evaluation_loader(loader, World(), seed)
        batches = getattr(shared, "batch_sampler", None)
        try:
            sizes.append(batches.samples if isinstance(batches, SharedBatches) else len(loader.dataset))
        except (AttributeError, TypeError):
            sizes.append(None)
        return shared

    with quiet_trainer(), replaced_loaders([task.datamodule, module], counted, seed=seed):
        trainer = _trainer(placement, World())
        run = trainer.validate if split == "val" else trainer.test
        results = run(module, datamodule=task.datamodule, verbose=False)
    samples = None if None in sizes else sum(filter(None, sizes))
    return as_row({name: value for result in results for name, value in result.items()}), samples


class Predictions(BasePredictionWriter):
    """Keeps the results of ``predict_step`` for the batches of this rank, by loader, and the indices of their samples.

    A loader that does not say its indices has none.
    """

    def __init__(self) -> None:
        super().__init__("epoch")
        self.outputs: list[list[Any]] = []
        self.indices: list[list[list[int]]] = []

    def write_on_epoch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, predictions: Sequence[Any], batch_indices: Any
    ) -> None:
        self.outputs = [list(predictions)] if len(batch_indices) == 1 else list(predictions)
        self.indices = batch_indices


def predict_checkpoint(task: ModuleTask, reopened: Reopened) -> Iterator[list[list[Row]]]:
    """Yield rows in index order, as many batches as there are ranks at a time, on rank 0. Collective.

    The loaders' batches are dealt whole to the ranks in turn, and the predictions of a rank are in its memory.
    """
    collectives = reopened.collectives
    _check_data(task, reopened.evaluation.split)
    with _weights_of_checkpoint(task, reopened):  # predictions may be views of them
        predictions = _predicted(task, reopened)
        number_of_loaders = int(*collectives.max(float(len(predictions.outputs))))
        for loader in range(number_of_loaders):
            rows = _rows_of_batches(predictions, loader)
            batches = len(predictions.outputs[loader]) if predictions.outputs else 0
            for _ in range(int(*collectives.max(float(batches)))):
                gathered = collectives.gather(next(rows, [])) or []
                if number_of_loaders > 1:
                    gathered = [[{"dataloader": loader, **row} for row in batch] for batch in gathered]
                yield gathered


def _predicted(task: ModuleTask, reopened: Reopened) -> Predictions:
    """Predict this rank's batches. Collective."""
    request = reopened.evaluation
    seed = request.config.training.seed
    module = task.module
    if reopened.world.size > 1:  # there may be fewer batches than ranks, which have copies of a user's object
        module.allow_zero_length_dataloader_with_multiple_devices = True

    def shared(loader: Any) -> Any:
        return evaluation_loader(loader, reopened.world, seed, predicts=True)

    predictions = Predictions()
    loaders = replaced_loaders([task.datamodule, module], shared, seed=seed, predicted=request.split)
    with quiet_trainer(), loaders:
        trainer = _trainer(request.plan.placement, reopened.world, callbacks=[predictions])
        trainer.predict(module, datamodule=task.datamodule, return_predictions=False)
    return predictions


def _rows_of_batches(predictions: Predictions, loader: int) -> Iterator[list[Row]]:
    """Yield the rows of each batch of a loader on this rank, numbered if the loader does not say its indices."""
    done = 0
    for number, output in enumerate(predictions.outputs[loader] if predictions.outputs else []):
        columns = output if isinstance(output, Mapping) else _columns(output)
        indices: Sequence[int]
        if predictions.indices[loader]:
            indices = predictions.indices[loader][number]
        else:
            first = next(iter(columns.values()), ())
            indices = range(done, done + (len(first) if hasattr(first, "__len__") else 0))
        rows = table_rows(columns, indices, "predict_step()")
        done += len(rows)
        yield rows


def _columns(output: Any) -> dict[str, Any]:
    outputs = output if isinstance(output, tuple) else (output,)
    return {f"output_{number}": column for number, column in enumerate(outputs)}


def _check_data(task: ModuleTask, split: str) -> None:
    """Raise :class:`DataError` where neither module nor data module has a loader of ``split``."""
    hook = f"{split}_dataloader"
    if not any(defines(owner, hook) for owner in (task.module, task.datamodule) if owner is not None):
        reason = f"neither it nor its data module defines {hook}()"
        raise DataError(f"this module has no {split} data", why=reason, fix=f"write {hook}(){_other(split)}")


def _other(split: str) -> str:
    return {"test": ", or choose --split val", "predict": ", or name the data: test, val or train"}.get(split, "")


def _trainer(placement: Mapping[str, Any], world: World, **arguments: Any) -> pl.Trainer:
    return pl.Trainer(
        **rank_arguments(placement, world),
        **arguments,
        logger=DummyLogger(),  # modules log pictures to self.logger.experiment
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
