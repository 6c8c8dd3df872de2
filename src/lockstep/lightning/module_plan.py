"""The plan of a ``LightningModule``: sizes of its training loader, decisions that the module makes, and notes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from lockstep.arithmetic import ceil_div
from lockstep.config import RunConfig
from lockstep.errors import ConfigError, UnsupportedError
from lockstep.events import Note
from lockstep.planning import Decision, Plan
from lockstep.planning.conflicts import refuse
from lockstep.planning.decision import decide
from lockstep.planning.notes import changed_keys, unused

#: Decisions about parts of Lockstep's loop that Lightning's Trainer replaces.
_UNUSED = ("warmup", "channels_last", "data_device", "one_message", "weight_decay")
_BY_MODULE = {
    "lr": "the module's configure_optimizers() sets it",
    "schedule": "the module's configure_optimizers() sets it",
    "workers": "the module's DataLoader sets its workers",
}


class LoaderFacts(NamedTuple):
    """The training ``DataLoader`` of a module.

    Attributes:
        whole_steps: the module optimizes manually, so every batch is a step.
        batches: batches of an epoch, for a loader on one device that keeps its order.
    """

    batch_size: int
    shuffle: bool
    drop_last: bool = False
    whole_steps: bool = False
    batches: int | None = None

    def sized(self, config: RunConfig, *, global_batch_size: int | None, devices: int) -> RunConfig:
        """Return ``config`` with the sizes of the loader; raise for settings that the module cannot have."""
        training = config.training
        is_set = {
            "reproducibility: exact": training.reproducibility == "exact",
            "training.compile": training.compile,
            "debug.overfit_batches": config.debug.overfit_batches is not None,
            "debug.trace": config.debug.trace != "off",
            "debug.switch_off": bool(config.debug.switch_off),
            "telemetry.record_samples": config.telemetry.record_samples,
            "data.bucketing on": config.data.bucketing == "on",
        }
        reason = "its steps belong to the module and Lightning's Trainer"
        refused = {name: (applies, reason) for name, applies in is_set.items()}
        refuse("a LightningModule", refused, "remove it, or write a lockstep.Task")
        if self.whole_steps and training.accumulate > 1:
            raise ConfigError(
                "training.accumulate is set, but the module optimizes manually",
                why="with automatic_optimization = False it takes its steps itself",
                fix="leave it out",
            )
        if self.batches is not None and self.batches % training.accumulate:
            raise ConfigError(
                f"training.accumulate={training.accumulate} does not divide the {self.batches} batches of an epoch",
                why="the training loader keeps its order, so its batches are not divided again",
                fix="set it to a divisor",
            )
        batch_size = self.batch_size
        if self.whole_steps and global_batch_size is not None:
            batch_size = ceil_div(global_batch_size, devices)
        sizes = {"batch_size": batch_size, "tail": "drop" if self.drop_last else training.tail}
        return config.with_values(training=sizes, data={"epoch_samples": None})

    def revised(self, plan: Plan, config: RunConfig) -> Plan:
        """Return ``plan`` with the decisions of module and loader, and notes on unused settings of ``config``.

        Raises:
            UnsupportedError: the strategy divides the model, or is ``dp``.
        """
        if plan.strategy.scatters or plan.strategy.divides:
            raise UnsupportedError(
                f"strategy {plan.strategy.name} is not available for a LightningModule",
                why="Lightning's Trainer would divide the batch or the model itself",
                fix="use --strategy auto: it selects ddp on several devices",
            )
        decisions = {key: self._decision(each) for key, each in plan.decisions.items() if key not in _UNUSED}
        notes = [note for note in plan.notes if not note.key.startswith(("lr_", "warmup"))]
        return plan.model_copy(update={"decisions": decisions, "notes": (*notes, *_notes(plan, config))})

    def _decision(self, decision: Decision) -> Decision:
        key = decision.key
        if key in _BY_MODULE:
            return replace(decision, value=None, shown="of the module", reason=_BY_MODULE[key])
        if key == "batch_size" and decision.value == self.batch_size:
            return replace(decision, reason="set by the module's DataLoader")
        if key != "order":
            return decision
        if self.batches is not None:
            reason = "the loader's order, which only one device can keep"
            return replace(decision, value=None, shown="of the loader", reason=reason)
        if self.shuffle:
            return replace(decision, reason="the DataLoader shuffles: Lockstep shuffles again in each epoch")
        return decide(key, (True, "index", "the DataLoader does not shuffle: index order"))


def _notes(plan: Plan, config: RunConfig) -> Iterator[Note]:
    placement: dict[str, Any] = plan.placement
    if placement["accelerator"] == "cpu" and placement["precision"] == "16-mixed":
        yield Note("precision_changed", "On a CPU, Lightning's Trainer uses bf16-mixed instead of 16-mixed.")
    if plan.world_size > 1:
        yield Note(
            "module_means",
            "A module's loss is a mean over the samples of a rank, and DDP weights all ranks equally. If the loss "
            "divides by something else (class weights, ignored targets, tokens), the result depends on the number of "
            "devices; `lockstep verify FILE.py:MODULE` measures by how much.",
        )
    optimizer_keys = [*changed_keys(config, "optimizer"), *changed_keys(config, "scheduler")]
    yield from unused(optimizer_keys, "the module's configure_optimizers() decides", " on a LightningModule")
    data_keys = changed_keys(config, "training", "batch_size")
    if config.training.on_oom == "retry":
        data_keys.append("training.on_oom")
    data_keys += [*changed_keys(config, "data"), *changed_keys(config, "validation", "batch_size")]
    yield from unused(data_keys, "its DataLoaders and data module decide", " on a LightningModule")
