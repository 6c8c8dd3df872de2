"""A sink that runs in the background: the run continues while it sends data to a server."""

from __future__ import annotations

import contextlib
import threading
from queue import SimpleQueue
from typing import Protocol

from lockstep.events import Event, Sink

#: How long the end of a run waits for a logger.
CLOSE_TIMEOUT_S = 20.0
#: Events that may wait for it: a server that does not answer must not fill the memory of a long run.
MAX_WAITING = 10_000


class NamedSink(Sink, Protocol):
    """A sink with a name for messages."""

    name: str


class BackgroundSink:
    """Passes events on to ``sink`` in a daemon thread, in order.

    What ``sink`` raises ends the thread and is raised here, by the next :meth:`emit` or by :meth:`close`; so is a
    :class:`TimeoutError` where :data:`MAX_WAITING` events wait.

    Args:
        close_timeout_s: how long :meth:`close` waits for the events that are still to be passed on.
    """

    def __init__(self, sink: NamedSink, *, close_timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        self.name = sink.name
        self._sink, self._close_timeout_s = sink, close_timeout_s
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def emit(self, event: Event) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._events.qsize() >= MAX_WAITING:
            raise TimeoutError(f"{MAX_WAITING:,} events wait for it")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"lockstep-{self.name}", daemon=True)
            self._thread.start()
        self._events.put(event)

    def close(self) -> None:
        """Wait for what is still to be passed on.

        Raises:
            TimeoutError: that took longer than ``close_timeout_s``; the thread is left behind.
        """
        if self._thread is None:
            return
        self._events.put(None)
        self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"it had not finished {self._close_timeout_s:g} s after the run's end")
        self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self) -> None:
        try:
            while (event := self._events.get()) is not None:
                self._sink.emit(event)
            self._sink.close()
        except Exception as error:  # any library's failure; raised by the next `emit`
            self._error = error
            with contextlib.suppress(Exception):
                self._sink.close()
