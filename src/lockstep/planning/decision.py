"""A decision of the plan: what was chosen for the user, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """What a plan is made of: immutable, and read again from ``plan.json``."""

    model_config = ConfigDict(frozen=True)


Value = bool | int | float | str | None


@dataclass(frozen=True)
class Decision:
    """One automatic choice.

    Attributes:
        key: its stable name, by which code and tests find it.
        title: what users read.
        value: as code uses it.
        reason: why, for users.
        shown: the value as users read it; by default its text, with ``on`` and ``off`` for a switch.
    """

    key: str
    title: str
    value: Value
    reason: str
    shown: str = ""

    def __post_init__(self) -> None:
        if not self.shown:
            object.__setattr__(self, "shown", _shown(self.value))


def _shown(value: Value) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


#: Decisions by key, in reading order.
Decisions = dict[str, Decision]


def by_key(decisions: Iterable[Decision]) -> Decisions:
    return {decision.key: decision for decision in decisions}


#: Titles of 0.1 whose key is another word, and the fields that held the value of a decision then.
_OLD_KEYS = {"learning rate": "lr", "loader": "workers"}
_OLD_FIELDS = {
    "threads": "threads",
    "steps": "total_steps",
    "sync_batchnorm": "sync_batchnorm",
    "reproducibility": "reproducibility",
    "checkpoints": "sharded_checkpoints",
}


def upgraded(plan: Mapping[str, Any]) -> dict[str, Any]:
    """A plan.json in today's form. That of 0.1 has decisions as a list ``choices`` by title, and notes as texts.

    Raises:
        AttributeError, KeyError, TypeError: it is damaged.
    """
    plan = dict(plan)
    if "choices" not in plan:
        return plan
    found = {}
    for old in plan.pop("choices"):
        key = _OLD_KEYS.get(old["name"], old["name"].replace(" ", "_"))
        value = plan.get(_OLD_FIELDS.get(key, ""), old["value"])
        found[key] = {"key": key, "title": old["name"], "value": value, "reason": old["reason"], "shown": old["value"]}
    notes = [{"key": "", "text": note, "level": "info"} for note in plan.get("notes", ())]
    return {**plan, "decisions": found, "notes": notes}
