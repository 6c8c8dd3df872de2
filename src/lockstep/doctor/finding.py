"""What a check says: a finding, and what becomes of a check that breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from lockstep.errors import LockstepError

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what was looked at.
        status: ``fail``: training cannot work; ``warn``: it works, but badly or not always; ``skip``: not looked at.
        what: what was found.
        why: why it matters for training.
        fix: how to mend it; given with every ``warn`` and ``fail``.
        node: the host on which it was found.
    """

    name: str
    status: Status
    what: str
    why: str
    fix: str = ""
    node: str = ""


def guarded(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The findings of ``check``; one that says so when the check itself breaks."""
    try:
        return list(check())
    except Exception as error:
        return [
            Finding(
                name,
                "warn",
                f"could not be checked: {first_line(error)}",
                "the check itself broke, so nothing is known about it",
                "look yourself, and report this line with the output of `lockstep version`",
            )
        ]


def first_line(error: BaseException) -> str:
    """An error in one line: ``RuntimeError: …``, or a :class:`LockstepError`'s own words."""
    if isinstance(error, LockstepError):
        return f"{error.what.splitlines()[0]} ({error.why})" if error.why else error.what.splitlines()[0]
    return f"{type(error).__name__}: {error}".splitlines()[0]
