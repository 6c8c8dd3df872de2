"""Findings of checks, and of checks that fail themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from lockstep.errors import LockstepError
from lockstep.launch.failure.causes import find_cause

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        name: what was checked.
        status: ``fail``: training cannot work; ``warn``: it works, but badly or not always; ``skip``: not checked.
        what: what was found.
        why: why it matters for training.
        fix: how to fix it; given with every ``warn`` and ``fail``.
        node: the host on which it was found.
    """

    name: str
    status: Status
    what: str
    why: str
    fix: str = ""
    node: str = ""


def guarded(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The findings of ``check``; a warning when the check itself fails."""
    try:
        return list(check())
    except Exception as error:
        return [
            Finding(
                name,
                "warn",
                f"could not be checked: {first_line(error)}",
                "the check itself failed, so its result is not known",
                "check it manually, and report this line with the output of `lockstep version`",
            )
        ]


def first_line(error: BaseException) -> str:
    """An error in one line: ``RuntimeError: …``, or a :class:`LockstepError`'s text."""
    if isinstance(error, LockstepError):
        return f"{error.what.splitlines()[0]} ({error.why})" if error.why else error.what.splitlines()[0]
    return f"{type(error).__name__}: {error}".splitlines()[0]


def failed(name: str, why: str, error: BaseException, fix: str) -> Finding:
    """The finding that an error in the practical part makes; ``fix``: where neither error nor cause has one."""
    text = first_line(error)
    if isinstance(error, LockstepError):
        fix = error.fix or fix
    else:
        cause = find_cause(f"{type(error).__name__}: {error}")
        text, fix = (f"{text} ({cause.title})", cause.advice) if cause else (text, fix)
    return Finding(name, "fail", text, why, fix)
