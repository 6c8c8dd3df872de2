"""A checkpoint of a user's ``LightningModule``, evaluated by the module's own steps on one device."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch

from lockstep.engine.lightning.cluster import quiet_trainer
from lockstep.engine.lightning.dataloaders import defines, evaluation_loader, replaced_loaders
from lockstep.engine.lightning.module_task import ModuleTask
from lockstep.errors import DataError
from lockstep.hardware.world import World
from lockstep.telemetry.scalars import as_row


def evaluate_module(
    task: ModuleTask, split: str, device: torch.device, precision: str, seed: int
) -> tuple[dict[str, float], int | None]:
    """What ``task.module`` logs over ``split``, by the names of rows, and how many samples there were.

    Their number is ``None`` where a loader does not say it: of an iterable data set, or several loaders in one.

    Raises:
        DataError: neither the module nor its data module has such a loader.
    """
    module, data = task.module, task.datamodule
    hook = f"{split}_dataloader"
    owners = [owner for owner in (module, data) if owner is not None]
    if split not in ("val", "test") or not any(defines(owner, hook) for owner in owners):
        raise DataError(
            f"this module has no {split} data",
            why=f"neither it nor its data module defines {hook}()",
            fix=f"write {hook}()" + (", or choose --split val" if split == "test" else ""),
        )
    sizes: list[int | None] = []

    def counted(loader: Any) -> Any:
        sizes.append(_size(loader))
        return evaluation_loader(loader, World(), seed)

    with quiet_trainer(), replaced_loaders([data, module], lambda loader: loader, counted, seed=seed):
        trainer = pl.Trainer(
            accelerator="cpu" if device.type == "cpu" else "cuda",
            devices=1 if device.type == "cpu" else [device.index],
            precision="32-true" if precision == "32" else precision,  # type: ignore[arg-type]
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        run = trainer.validate if split == "val" else trainer.test
        results = run(module, datamodule=data, verbose=False)
    known = [size for size in sizes if size is not None]
    samples = sum(known) if len(known) == len(sizes) else None
    return as_row({name: value for result in results for name, value in result.items()}), samples


def _size(loader: Any) -> int | None:
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError):
        return None
