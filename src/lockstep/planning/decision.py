"""A decision of the plan: what was chosen for the user, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """What a plan is made of: immutable, and read again from ``plan.json``."""

    model_config = ConfigDict(frozen=True)


Value = bool | int | float | str | None


@dataclass(frozen=True)
class Decision:
    """One automatic choice: a stable ``key``, the ``title`` that users read, the ``value`` as code uses it, and why.

    ``shown``: the value as users read it; by default its text, with ``on`` and ``off`` for a switch.
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


#: Where the title is not the key.
TITLES = {
    "averaging": "averaged weights",
    "channels_last": "layout of convolutions",
    "data_device": "training data",
    "layer_decay": "rates by depth",
    "lr": "learning rate",
    "matmul_precision": "float32 products",
    "one_message": "gradients",
    "warmup": "warm-up",
    "workers": "loader",
}


def decide(key: str, *rules: tuple[object, Value, str], shown: Mapping[Value, str] | None = None) -> Decision:
    """The decision of the first rule that applies: (whether it does, the value, the reason).

    ``shown``: values as users read them.
    """
    value, reason = next((value, reason) for applies, value, reason in rules if applies)
    return Decision(key, TITLES.get(key, key.replace("_", " ")), value, reason, (shown or {}).get(value, ""))


def by_key(decisions: Iterable[Decision]) -> Decisions:
    return {decision.key: decision for decision in decisions}
