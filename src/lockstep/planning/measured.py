"""Choices that are measured on the devices when a run starts: the layout of convolutions, and where arrays are.

The plan has ``None`` for them, until the ranks have agreed on a value (``engine/measured.py``). A run keeps it on the
same devices: :class:`.Measured` is what a resume knows of an earlier attempt.
"""

from __future__ import annotations

from lockstep.config import RunConfig
from lockstep.hardware.resolve import Placement
from lockstep.planning.decision import Decision
from lockstep.planning.plan import DATA_DEVICE, LAYOUT, Measured, TaskFacts

#: Where ``auto`` measures.
ACCELERATORS: tuple[str, ...] = ("gpu",)
_PENDING = "auto: measured before the first step"


def measured_choices(
    config: RunConfig, placement: Placement, facts: TaskFacts, before: Measured | None
) -> list[Decision]:
    """The decisions as set, by rule, as measured before on these devices, or still to be measured."""
    if facts.loader is not None:  # a LightningModule's steps and data are its own
        return []
    known = {} if before is None else before.decisions
    if before is None or (before.devices, before.gpu) != (placement.devices, placement.gpu):
        known = {}
    choices = [*_layout(config, placement, facts), *_data_device(config, placement, facts)]
    return [known.get(choice.key, choice) if choice.value is None else choice for choice in choices]


def _layout(config: RunConfig, placement: Placement, facts: TaskFacts) -> list[Decision]:
    setting, training = config.hardware.channels_last, config.training
    if not facts.convolutions:
        return []
    value: bool | None = setting == "on"
    reason = "as set"
    if placement.spec.divides or placement.spec.scatters:
        value, reason = False, f"{placement.strategy} distributes weights row by row"
    elif setting == "auto":
        reasons = {
            "exact mode: as the model has it": training.reproducibility == "exact",
            "auto: torch.compile chooses layouts itself": training.compile,
            "auto: as the model has it; measured on GPUs only": placement.accelerator not in ACCELERATORS,
            "auto: as the model has it; a stream has no batch to measure with": facts.streams,
        }
        found = next((text for text, applies in reasons.items() if applies), None)
        value, reason = (None, _PENDING) if found is None else (False, found)
    shown = {None: "to be measured", True: "channels_last", False: "as the model has it"}[value]
    return [Decision(LAYOUT, "layout of convolutions", value, reason, shown)]


def _data_device(config: RunConfig, placement: Placement, facts: TaskFacts) -> list[Decision]:
    setting, exact = config.data.device, config.training.reproducibility == "exact"
    if placement.accelerator not in ACCELERATORS or not facts.array_bytes:
        return []
    if setting != "auto":
        return [Decision(DATA_DEVICE, "training data", setting, "as set")]
    if exact or config.training.compile or config.debug.trace != "off":
        # Values are the same either way. Compiled code would be compiled for the measurement.
        return [Decision(DATA_DEVICE, "training data", "auto", "on the GPU if they fill at most a fifth of its memory")]
    return [Decision(DATA_DEVICE, "training data", None, _PENDING, "to be measured")]
