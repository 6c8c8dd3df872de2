"""Decisions of the plan: automatic choices with their reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Immutable part of a plan, which can be read again from ``plan.json``."""

    model_config = ConfigDict(frozen=True)


Value = bool | int | float | str | None


@dataclass(frozen=True)
class Decision:
    """One automatic choice and its reason.

    Attributes:
        key: stable name.
        title: name for users.
        value: value for code.
        shown: value for users; default: its text, with ``on`` and ``off`` for a switch.
    """

    key: str
    title: str
    value: Value
    reason: str
    shown: str = ""

    def __post_init__(self) -> None:
        if not self.shown:
            text = f"{self.value:g}" if isinstance(self.value, float) else str(self.value)
            words = {"True": "on", "False": "off", "None": "none"}
            object.__setattr__(self, "shown", words.get(text, text))


#: Decisions by key, in reading order.
Decisions = dict[str, Decision]


#: Titles that differ from the key.
TITLES = {
    "averaging": "averaged weights",
    "channels_last": "layout of convolutions",
    "data_device": "training data",
    "lr": "learning rate",
    "matmul_precision": "float32 products",
    "one_message": "gradients",
    "warmup": "warm-up",
    "workers": "loader",
}


def decide(key: str, *rules: tuple[object, Value, str], shown: Mapping[Value, str] | None = None) -> Decision:
    """Return the decision of the first rule that applies.

    Args:
        rules: (condition, value, reason), the last one unconditional.
        shown: texts of values for users.
    """
    value, reason = next((value, reason) for applies, value, reason in rules if applies)
    title = TITLES.get(key, key.replace("_", " "))
    return Decision(key, title, value, reason, shown=(shown or {}).get(value, ""))


def by_key(decisions: Iterable[Decision]) -> Decisions:
    return {decision.key: decision for decision in decisions}
