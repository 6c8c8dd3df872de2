"""Heartbeats between nodes, over the store of the rendezvous."""

from __future__ import annotations

import logging
import socket
import threading
import time
from datetime import timedelta
from typing import Any

from pydantic import ValidationError
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler

from lockstep.launch.nodes.command import Nodes
from lockstep.rundir.files import FileContent

#: A node without a heartbeat for this long is lost.
SILENCE_S = 10.0
#: Time between heartbeats.
HEARTBEAT_S = 1.0
#: How long one attempt to connect may take: stop requests are checked in between.
_CONNECT_S = 5.0
#: How long :meth:`Peers.end` waits until the last heartbeat is sent.
_LAST_S = 2.0


class _Heartbeat(FileContent):
    """A node's; ``count`` grows with each. ``done``: its ranks have ended well, so training is over on all nodes."""

    host: str
    count: int
    done: bool = False


def open_store(nodes: Nodes, *, serves: bool) -> TCPStore:
    """The store of the rendezvous, served by this process or another. Raises :class:`RuntimeError` or ``OSError``."""
    if not serves:  # torch's store tries, too, but prints every try that fails
        socket.create_connection((nodes.host, nodes.port), timeout=_CONNECT_S).close()
    how: dict[str, Any] = {"multi_tenant": True, "wait_for_workers": False, "timeout": timedelta(seconds=_CONNECT_S)}
    return TCPStore(nodes.host, nodes.port, is_master=serves, **how)


class Peers(threading.Thread):
    """Exchanges heartbeats over a separate connection. Start it once; call :meth:`begin` at each start of ranks.

    ``waiting``: how many nodes waited to join at the last heartbeats. This thread asks that, since the store may be
    unreachable. ``done``: whether the ranks of this node have ended well.
    """

    def __init__(self, nodes: Nodes, handler: RendezvousHandler) -> None:
        super().__init__(name="lockstep-peers", daemon=True)
        self._nodes = nodes
        self._handler = handler
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._round: tuple[str, int, int] | None = None
        self._contact = time.monotonic()
        self._received: dict[int, tuple[bytes, float]] = {}
        self.waiting = 0
        self.done = False

    def begin(self, key: str, rank: int, size: int) -> None:
        """From now on exchange heartbeats as node ``rank`` of the ``size`` nodes of the start that ``key`` names."""
        with self._lock:
            self._round = (f"lockstep/heartbeat/{key}", rank, size)
            self._contact = now = time.monotonic()
            self._received = {other: (b"", now) for other in range(size) if other != rank}
            self.waiting, self.done = 0, False

    def pause(self) -> None:
        """There are no ranks; no node counts as lost."""
        with self._lock:
            self._round = None

    def end(self) -> None:
        """Send a last heartbeat."""
        self._ended.set()
        self.join(_LAST_S)

    def run(self) -> None:
        store, count, is_last = None, 0, False
        while not is_last:
            is_last = self._ended.wait(HEARTBEAT_S)
            try:
                store = store or open_store(self._nodes, serves=False)
                count += 1
                self._beat(store, count)
            except (RuntimeError, OSError, RendezvousError) as error:
                logging.getLogger(__name__).warning("no heartbeat sent to %s: %s", self._nodes.address, error)
                store = None

    def _beat(self, store: TCPStore, count: int) -> None:
        with self._lock:
            current = self._round
        if current is None:
            return
        key, rank, size = current
        beat = _Heartbeat(host=socket.gethostname(), count=count, done=self.done)
        store.set(f"{key}/{rank}", beat.model_dump_json())
        waiting = self._handler.num_nodes_waiting()
        keys = {other: f"{key}/{other}" for other in range(size) if other != rank}
        found = {other: store.get(name) for other, name in keys.items() if store.check([name])}
        with self._lock:
            if self._round != current:
                return
            self.waiting = waiting
            self._contact = now = time.monotonic()
            for other, value in found.items():
                if value != self._received[other][0]:
                    self._received[other] = (value, now)

    def cut_off(self) -> str:
        """A message when the rendezvous has not answered for too long; else empty."""
        with self._lock:
            silence_s = time.monotonic() - self._contact
            if self._is_over() or silence_s < SILENCE_S:
                return ""
        return f"the rendezvous at {self._nodes.address} has not answered for {silence_s:.0f} s"

    def lost(self) -> str:
        """A message that names a node without a heartbeat for too long; empty when there is none."""
        with self._lock:
            now = time.monotonic()
            if self._is_over() or now - self._contact >= SILENCE_S:
                return ""
            for other, (value, at) in self._received.items():
                if now - at >= SILENCE_S:
                    beat = _read(value)
                    name = beat.host if beat else f"number {other}"
                    return f"node {name} is lost: no heartbeat for {now - at:.0f} s"
        return ""

    def _is_over(self) -> bool:
        """Whether there are no ranks, or a node is done: then all may end, with the store that one of them serves."""
        beats = (_read(value) for value, _ in self._received.values())
        return self._round is None or any(beat.done for beat in beats if beat)


def _read(value: bytes) -> _Heartbeat | None:
    """``None`` before the first heartbeat, and for that of another version of Lockstep."""
    try:
        return _Heartbeat.model_validate_json(value)
    except ValidationError:
        return None
