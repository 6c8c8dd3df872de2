"""The session that is open in this process: there is at most one."""

from __future__ import annotations

from typing import Protocol


class Closable(Protocol):
    def close(self, error: BaseException | None = None) -> None: ...


class Stopped(SystemExit):
    """A loop of the user's ends here, after a checkpoint; ``code`` is the exit code of the process."""


_open: list[Closable] = []


def opened(session: Closable) -> None:
    """``session`` is open from now on."""
    _open.append(session)


def closed(session: Closable) -> bool:
    """``session`` is closed from now on; whether it was open."""
    found = any(session is one for one in _open)
    _open[:] = [one for one in _open if one is not session]
    return found


def close_open_session(error: BaseException | None) -> None:
    """Close the session that is open, if there is one; ``error``: what ended its loop."""
    for session in [*_open]:
        session.close(error)
