"""Heartbeats between nodes, over the store of the rendezvous, and hangs of all nodes, on which they agree with them."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Collection
from datetime import timedelta
from typing import Any

from pydantic import ValidationError
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from lockstep.launch.health.hang import HangReport, HangWatch, Standstill
from lockstep.launch.nodes.command import Nodes
from lockstep.telemetry.files import FileContent

#: A node without a heartbeat for this long is lost.
SILENCE_S = 10.0
#: Time between heartbeats.
HEARTBEAT_S = 1.0
#: How long one attempt to connect may take: stop requests are checked in between.
_CONNECT_S = 5.0
#: How long :meth:`Peers.end` waits until the last heartbeat is sent.
_LAST_S = 2.0


class NodeStatus(FileContent):
    """The state of a node's ranks, sent with its heartbeat.

    Attributes:
        hangs: none of them makes progress.
        ranks: where they are, once those of all nodes hang.
        knows: the node has received that from all the others.
        done: they have ended well, so training is over on all nodes.
    """

    hangs: bool = False
    ranks: tuple[Standstill, ...] = ()
    knows: bool = False
    done: bool = False


class _Heartbeat(NodeStatus):
    """A node's heartbeat, with its status. ``count`` grows with each."""

    host: str
    pid: int
    count: int


_log = logging.getLogger(__name__)


def await_server(nodes: Nodes) -> None:
    """Wait a little until a process listens at the rendezvous address. Raises :class:`OSError`.

    Torch's store tries, too, but prints every try that fails.
    """
    socket.create_connection((nodes.host, nodes.port), timeout=_CONNECT_S).close()


def open_store(nodes: Nodes, *, serves: bool) -> TCPStore:
    """The store of the rendezvous, served by this process or another. Raises :class:`RuntimeError`."""
    return TCPStore(
        nodes.host,
        nodes.port,
        is_master=serves,
        multi_tenant=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_CONNECT_S),
    )


class NodeHandler(DynamicRendezvousHandler):
    """Torch's rendezvous; another thread asks it whether nodes wait, since the store may be unreachable."""

    #: The number that the agent sees.
    waiting = 0

    def num_nodes_waiting(self) -> int:
        return self.waiting

    def look(self) -> int:
        """How many nodes wait now."""
        return super().num_nodes_waiting()


class Peers(threading.Thread):
    """Exchanges heartbeats over a separate connection. Start it once; call :meth:`begin` at each start of ranks."""

    def __init__(self, nodes: Nodes, handler: NodeHandler) -> None:
        super().__init__(name="lockstep-peers", daemon=True)
        self._nodes = nodes
        self._handler = handler
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._round: tuple[str, int, int] | None = None
        self._contact = time.monotonic()
        self._received: dict[int, tuple[bytes, float]] = {}
        self._status, self._sent = NodeStatus(), NodeStatus()
        self._waiting = 0

    def begin(self, key: str, rank: int, size: int) -> None:
        """From now on exchange heartbeats with the nodes of this start.

        Args:
            key: names the start.
            rank: this node's number.
            size: how many nodes.
        """
        with self._lock:
            now = time.monotonic()
            self._round = (f"lockstep/heartbeat/{key}", rank, size)
            self._contact = now
            self._waiting = 0
            self._received = {other: (b"", now) for other in range(size) if other != rank}
            self._status, self._sent = NodeStatus(), NodeStatus()

    def pause(self) -> None:
        """There are no ranks; no node counts as lost."""
        with self._lock:
            self._round = None

    def send(self, status: NodeStatus) -> None:
        """Send ``status`` with the next heartbeats."""
        with self._lock:
            self._status = status

    def is_sent(self, status: NodeStatus) -> bool:
        """Whether ``status`` is in the store, where the others find it."""
        with self._lock:
            return self._sent == status

    def others(self) -> list[NodeStatus]:
        """The newest status of each other node of this start; the default one of those not received yet."""
        with self._lock:
            values = [value for value, _ in self._received.values()]
        return [_read(value) or NodeStatus() for value in values]

    def show_who_waits(self) -> None:
        """Let the agent see how many nodes waited to join at the last heartbeats of the others."""
        with self._lock:
            self._handler.waiting = self._waiting

    def end(self) -> None:
        """Send a last heartbeat."""
        self._ended.set()
        self.join(_LAST_S)

    def run(self) -> None:
        store = None
        count = 0
        is_last = False
        while not is_last:
            is_last = self._ended.wait(HEARTBEAT_S)
            try:
                if store is None:
                    await_server(self._nodes)
                    store = open_store(self._nodes, serves=False)
                count += 1
                self._beat(store, count)
            except (RuntimeError, OSError, RendezvousError) as error:
                _log.warning("no heartbeat sent to %s: %s", self._nodes.address, error)
                store = None

    def _beat(self, store: TCPStore, count: int) -> None:
        with self._lock:
            current, status = self._round, self._status
        if current is None:
            return
        key, rank, size = current
        beat = _Heartbeat(host=socket.gethostname(), pid=os.getpid(), count=count, **dict(status))
        store.set(f"{key}/{rank}", beat.model_dump_json())
        with self._lock:
            if self._round == current:
                self._sent = status
        # Before the heartbeats: a node that waits because of a hang has sent its status before.
        waiting = self._handler.look()
        found = {
            other: store.get(f"{key}/{other}")
            for other in range(size)
            if other != rank and store.check([f"{key}/{other}"])
        }
        with self._lock:
            if self._round != current:
                return
            self._waiting = waiting
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
            if self._is_over():
                return ""
            now = time.monotonic()
            for other, (value, at) in self._received.items():
                if now - at >= SILENCE_S and now - self._contact < SILENCE_S:
                    beat = _read(value)
                    name = beat.host if beat else f"number {other}"
                    return f"node {name} is lost: no heartbeat for {now - at:.0f} s"
        return ""

    def _is_over(self) -> bool:
        """Whether there are no ranks, or a node is done: then all may end, with the store that one of them serves."""
        done = any(beat.done for beat in (_read(value) for value, _ in self._received.values()) if beat)
        return self._round is None or done


def _read(value: bytes) -> _Heartbeat | None:
    """``None`` before the first heartbeat, and for that of another version of Lockstep."""
    try:
        return _Heartbeat.model_validate_json(value)
    except ValidationError:
        return None


class JointWatch(HangWatch):
    """Checks the ranks of one of several nodes until those of all nodes have been without progress for too long.

    A node whose ranks make no progress may only be waiting for a node that saves, evaluates or compiles. So each
    launcher sends with its heartbeat whether its ranks hang. When those of all nodes do, each requests the stacks of
    its ranks and sends them, so that every node names the same rank.

    Args:
        peers: the exchange with the other nodes.
    """

    def __init__(self, *args: Any, peers: Peers, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._peers = peers
        self._ranks: tuple[Standstill, ...] = ()

    def look(self, alive: Collection[int]) -> HangReport | None:
        """A report on the ranks of all nodes, when all nodes have it or can make it; ``verdict`` may be earlier."""
        hangs = self.hangs(alive)
        others = self._peers.others() if hangs else []
        if not hangs or not all(other.hangs for other in others):
            self._ranks, self.verdict = (), None
        elif not self._ranks:
            node = socket.gethostname() if others else ""
            self._ranks = tuple(rank.model_copy(update={"node": node}) for rank in self.locate(alive))
        if self._ranks and all(other.ranks for other in others):
            ranks = [*self._ranks, *(rank for other in others for rank in other.ranks)]
            self.verdict = HangReport(timeout_s=self._timeout_s, ranks=tuple(sorted(ranks, key=lambda r: r.rank)))
        status = NodeStatus(hangs=hangs, ranks=self._ranks, knows=self.verdict is not None)
        self._peers.send(status)
        # A node that returns it ends its ranks and meets the others again; to them that looks like a node that joins.
        return self.verdict if self._peers.is_sent(status) and all(other.knows for other in others) else None
