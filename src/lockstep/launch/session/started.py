"""The session of a process, and the rank that Lockstep's launcher has started for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.launch.local.worker import Rank

#: The session that is open in this process: at most one.
open_sessions: list[Any] = []


def close_open_session(error: BaseException | None) -> None:
    """Close the session that is open, if there is one; ``error``: what ended its loop."""
    for session in [*open_sessions]:
        session.close(error)


@dataclass
class Started:
    """A rank that Lockstep's launcher has started for a session, in the run's folder.

    ``given`` are settings of the command line, which override those of the script; ``resumes``: whether the run has an
    attempt already; ``on_session`` is called when a session joins.
    """

    rank: Rank
    settings: Mapping[str, Any]
    resumes: bool
    has_session: bool = False
    on_session: Callable[[], None] = lambda: None


#: The rank of this process, if Lockstep's launcher has started it for a session.
started: list[Started] = []
