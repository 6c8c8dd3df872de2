"""How a rank waits for a message: awake while that helps, asleep where others need the core."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from lockstep.engine.distributed.staging import AdaptiveSpin


class Message:
    """A message that has arrived when it was asked about for the ``after``-th time."""

    def __init__(self, after: int | None) -> None:
        self.asked = 0
        self._after = after

    def is_completed(self) -> bool:
        self.asked += 1
        return self._after is not None and self.asked >= self._after


def asked(spin: AdaptiveSpin, messages: list[Any]) -> list[bool]:
    for message in messages:
        spin.spin(message)
    return [message.asked > 0 for message in messages]


def test_messages_that_take_long_are_asked_about_less_and_less() -> None:
    spin = AdaptiveSpin()
    found = asked(spin, [Message(None) for _ in range(300)])
    turns = [place for place, awake in enumerate(found) if awake]
    assert [b - a - 1 for a, b in pairwise(turns)] == [1, 2, 4, 8, 16, 32, 64, 64, 64]


def test_one_that_comes_soon_ends_that() -> None:
    spin = AdaptiveSpin()
    asked(spin, [Message(None) for _ in range(5)])  # awake at 0 and 2, and again at 5
    soon = Message(3)
    assert spin.spin(soon)  # type: ignore[arg-type]
    assert soon.asked == 3
    assert all(asked(spin, [Message(1) for _ in range(20)]))
    assert asked(spin, [Message(None) for _ in range(3)]) == [True, False, True], "patience begins anew"
