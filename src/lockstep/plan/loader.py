"""What follows from a training loader that the user brings (a ``LightningModule``'s): it decides batch and order."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from lockstep.config import RunConfig
from lockstep.config.sections import TrainingConfig
from lockstep.errors import ConfigError, UnsupportedError


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


#: Decisions of a plan that such a module takes itself.
ITS_OWN = {
    "learning rate": "the module's configure_optimizers() sets it",
    "schedule": "the module's configure_optimizers() sets it",
    "loader": "the module's own DataLoader says how many workers it has",
}


def reasons_of_loader(loader: LoaderFacts, reasons: dict[str, str]) -> dict[str, str]:
    """``reasons`` of the plan's choices by name, where ``loader`` gives them."""
    own = dict(ITS_OWN)
    if reasons["batch size"] == "as configured":
        own["batch size"] = "the DataLoader's own"
    shuffled = "the DataLoader shuffles: Lockstep's order does, anew each epoch"
    own["order"] = shuffled if loader.shuffle else "the DataLoader does not shuffle: index order"
    if loader.batches is not None:
        own["order"] = "the loader's own, which only one device can keep"
    return {**reasons, **own}


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
                f"{name} does not go together with a LightningModule",
                why="its steps belong to the module and Lightning's Trainer",
                fix="leave it out, or write a lockstep.Task",
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
