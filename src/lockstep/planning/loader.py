"""What follows from a training loader that the user brings (a ``LightningModule``'s): it decides batch and order."""

from __future__ import annotations

from dataclasses import replace

from pydantic import BaseModel, ConfigDict

from lockstep.config import RunConfig
from lockstep.config.sections import TrainingConfig
from lockstep.errors import ConfigError, UnsupportedError
from lockstep.planning.decision import Decision


class LoaderFacts(BaseModel):
    """The user's ``DataLoader``: samples per device, whether it shuffles, whether it leaves out a short last batch.

    ``whole_steps``: the module optimizes manually, so that every batch is a step: there is no accumulation.
    ``batches``: of an epoch of a loader that keeps its own order, on one device.
    """

    model_config = ConfigDict(frozen=True)

    batch_size: int
    shuffle: bool
    drop_last: bool = False
    whole_steps: bool = False
    batches: int | None = None


def of_loader(decision: Decision, loader: LoaderFacts) -> Decision:
    """``decision``, or what the module and its ``loader`` decide instead."""
    if decision.key in {"lr", "schedule"}:
        return _its_own(decision, "the module's configure_optimizers() sets it")
    if decision.key == "workers":
        return _its_own(decision, "the module's own DataLoader sets its workers")
    if decision.key == "batch_size" and decision.value == loader.batch_size:
        return replace(decision, reason="set by the module's DataLoader")
    if decision.key == "order" and loader.batches is not None:
        return _its_own(decision, "the loader's own, which only one device can keep")
    if decision.key == "order" and not loader.shuffle:
        reason = "the DataLoader does not shuffle: index order"
        return replace(decision, value="index", shown="index", reason=reason)
    if decision.key == "order":
        return replace(decision, reason="the DataLoader shuffles: Lockstep shuffles again in each epoch")
    return decision


def _its_own(decision: Decision, reason: str) -> Decision:
    return replace(decision, value=None, shown="its own", reason=reason)


def training_of_loader(config: RunConfig, loader: LoaderFacts, *, held: int | None, devices: int) -> TrainingConfig:
    """The training section with the sizes of ``loader``.

    Args:
        held: the global batch that is fixed, if any.
        devices: of all ranks.

    Raises:
        ConfigError, UnsupportedError: settings that a ``LightningModule`` cannot have.
    """
    t = config.training
    refused = {
        "reproducibility: exact": t.reproducibility == "exact",
        "training.compile": t.compile,
        "debug.overfit_batches": config.debug.overfit_batches is not None,
        "debug.trace": config.debug.trace != "off",
        "debug.switch_off": bool(config.debug.switch_off),
        "telemetry.record_samples": config.telemetry.record_samples,
        "data.bucketing on": config.data.bucketing == "on",
    }
    for name, asked in refused.items():
        if asked:
            raise UnsupportedError(
                f"{name} is incompatible with a LightningModule",
                why="its steps belong to the module and Lightning's Trainer",
                fix="remove it, or write a lockstep.Task",
            )
    batch_size = loader.batch_size
    if loader.whole_steps:
        if t.accumulate > 1:
            raise ConfigError(
                "training.accumulate is set, but the module optimizes manually",
                why="with automatic_optimization = False it takes its steps itself",
                fix="leave it out",
            )
        batch_size = batch_size if held is None else -(-held // devices)
    if loader.batches is not None and loader.batches % t.accumulate:
        raise ConfigError(
            f"training.accumulate={t.accumulate} does not divide the {loader.batches} batches of an epoch",
            why="the training loader keeps its own order, so its batches are not divided again",
            fix="set it to a divisor",
        )
    tail = "drop" if loader.drop_last else t.tail
    return t.model_copy(update={"batch_size": batch_size, "tail": tail})
