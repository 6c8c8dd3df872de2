"""Stop requests: SIGINT and SIGTERM ask a run to end with a checkpoint. SIGHUP, of a closed terminal, is SIGTERM.

The run's loop reads :attr:`StopRequest.requested` between steps; nothing is interrupted. The caller's handlers are
restored afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def exit_code(signum: int) -> int:
    """Return the exit code of a process that a signal stopped: 130 for SIGINT, 143 for SIGTERM (POSIX shells)."""
    return 128 + signum


#: Exit codes of ranks that were stopped.
STOPPED = (exit_code(signal.SIGINT), exit_code(signal.SIGTERM))


class Stopped(SystemExit):
    """Ends the function of a rank that has stopped in good order; ``code`` is the exit code of the process."""


class StopRequest:
    """Remembers the first stop signal as ``requested``; a second SIGINT raises :class:`KeyboardInterrupt`.

    It is raised once: further ones are ignored, so that they do not interrupt what ends the ranks. SIGINT that is
    ignored, as of a shell's background job, stays so.

    A context manager; outside the main thread, where Python allows no handlers, only :meth:`request` asks for a stop.
    One may be installed inside another: a signal that the outer one had received counts for the inner one, and
    the other way round once the inner one is restored.
    """

    #: The handled signals, and the SIGINT that raises.
    _signals: tuple[signal.Signals, ...] = STOP_SIGNALS
    _limit = 2

    def __init__(self) -> None:
        self.requested: int | None = None
        self._on_request: Callable[[int], object] | None = None
        self._interrupts = 0
        self._has_raised = False
        self._previous: dict[signal.Signals, Any] = {}

    def request(self, signum: int = signal.SIGTERM) -> None:
        """Ask for a stop as if ``signum`` had arrived; only the first request counts."""
        if self.requested is None:
            self.requested = int(signum)
            self._notify()

    def notify(self, on_request: Callable[[int], object]) -> None:
        """Call ``on_request(signum)`` once: when a stop is requested (from the handler), or now if it has been."""
        self._on_request = on_request
        self._notify()

    def _notify(self) -> None:
        if self.requested is not None and self._on_request is not None:
            on_request = self._on_request
            self._on_request = None
            on_request(self.requested)

    def install(self) -> Self:
        """Handle the stop signals. May be called again, after a library has replaced the handlers."""
        if threading.current_thread() is not threading.main_thread():
            return self
        _end_forks_at_sigterm()
        for signum in self._signals:
            handler = signal.getsignal(signum)
            if handler is None:
                continue  # a handler from outside Python: it could not be restored
            is_ignored = handler == signal.SIG_IGN and signum not in self._previous
            if is_ignored and signum in (signal.SIGINT, signal.SIGHUP):
                continue  # a shell's background job; nohup
            previous = signal.signal(signum, self._receive)
            if signum not in self._previous:
                self._previous[signum] = previous
                outer = _owner(previous)
                if outer is not None and outer is not self:
                    outer._pass_to(self)
        return self

    def restore(self) -> None:
        """Restore the handlers from before :meth:`install`."""
        while self._previous:
            signum, previous = self._previous.popitem()
            signal.signal(signum, previous)
            outer = _owner(previous)
            if outer is not None:
                self._pass_to(outer)

    def _pass_to(self, other: StopRequest) -> None:
        other._interrupts = max(self._interrupts, other._interrupts)
        other._has_raised = self._has_raised or other._has_raised
        if self.requested is not None:
            other.request(self.requested)

    def __enter__(self) -> Self:
        return self.install()

    def __exit__(self, *_: object) -> None:
        self.restore()

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT:
            self._interrupts += 1
            if self._has_raised:
                return
            if self._interrupts >= self._limit:
                self._has_raised = True
                raise KeyboardInterrupt
        self.request(signal.SIGTERM if signum == signal.SIGHUP else signum)


class CommandInterrupt(StopRequest):
    """Of a whole command, around its stop requests: the first SIGINT that none of them handles raises, once."""

    _signals = (signal.SIGINT,)
    _limit = 1

    #: Whether it has ended the command: objects that it left half made complain when they are deleted.
    has_ended = False

    def ignore(self) -> None:
        """Ignore SIGINT from now on: the command has ended.

        The handler of a finalized interpreter would be the default one, which ends the process with the signal.
        """
        self._has_raised = True
        if _owner(signal.getsignal(signal.SIGINT)) is not None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def report_unraisable(self, unraisable: Any) -> None:
        """Report as ``sys.unraisablehook`` does; after an interrupt where Python cannot raise, the next one raises."""
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            owner = _owner(signal.getsignal(signal.SIGINT)) or self
            owner._has_raised = False
        elif not self.has_ended:
            sys.__unraisablehook__(unraisable)


@functools.cache
def _end_forks_at_sigterm() -> None:
    """Let SIGTERM end forks, such as those of a task's ``multiprocessing.Pool``, which ends them so and waits."""
    masks = threading.local()  # one that is sent at once waits
    ending = (signal.SIGTERM, signal.SIGHUP)

    def before() -> None:
        masks.previous = signal.pthread_sigmask(signal.SIG_BLOCK, ending)

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.previous)

    def after_in_child() -> None:
        for signum in ending:
            if _owner(signal.getsignal(signum)) is not None:
                signal.signal(signum, signal.SIG_DFL)
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=after_in_child)


def _owner(handler: Any) -> StopRequest | None:
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, StopRequest) else None


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Block the stop signals in this thread and in processes that it starts, until they call :func:`accept`.

    So a signal does not end a process that has no handlers yet.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def accept() -> None:
    """Unblock the signals that the parent process blocked with :func:`held_back`."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
