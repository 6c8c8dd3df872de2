"""Nodes that watch each other: signs of life over the store where they have met, and words on their ranks."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from datetime import timedelta

from pydantic import ValidationError
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from lockstep.launch.health.joint_hang import Word
from lockstep.launch.nodes.command import Nodes

#: A node that has been silent for so long is lost.
SILENCE_S = 10.0
#: How often a node gives a sign of life.
PULSE_S = 1.0
#: How long one attempt to connect may take: a stop request is looked at in between.
_CONNECT_S = 5.0
#: How long the end waits until the last word is told.
_LAST_WORD_S = 2.0


class _Sign(Word):
    """A sign of life with a node's word. ``count`` grows with each."""

    host: str
    pid: int
    count: int


_log = logging.getLogger(__name__)


def await_server(nodes: Nodes) -> None:
    """Wait a little until somebody listens where the nodes meet. Raises :class:`OSError`.

    Torch's store tries, too, but tells the terminal of every try that fails.
    """
    socket.create_connection((nodes.host, nodes.port), timeout=_CONNECT_S).close()


def open_store(nodes: Nodes, *, serves: bool) -> TCPStore:
    """The store where nodes meet, served by this process or found. Raises :class:`RuntimeError`."""
    return TCPStore(
        nodes.host,
        nodes.port,
        is_master=serves,
        multi_tenant=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_CONNECT_S),
    )


class NodeHandler(DynamicRendezvousHandler):
    """Torch's rendezvous, asked from another thread whether nodes wait: the store may be out of reach."""

    #: How many the agent shall see.
    waiting = 0

    def num_nodes_waiting(self) -> int:
        return self.waiting

    def look(self) -> int:
        """How many nodes wait now."""
        return super().num_nodes_waiting()


class Peers(threading.Thread):
    """Signs of life, given and heard, over a connection of their own. Start it once; :meth:`begin` a start of ranks."""

    def __init__(self, nodes: Nodes, handler: NodeHandler) -> None:
        super().__init__(name="lockstep-peers", daemon=True)
        self._nodes = nodes
        self._handler = handler
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._round: tuple[str, int, int] | None = None
        self._contact = time.monotonic()
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._word, self._told = Word(), Word()
        self._waiting = 0

    def begin(self, key: str, rank: int, size: int) -> None:
        """From now on listen to the nodes of this start; ``key`` is its own, ``rank`` this node's number."""
        with self._lock:
            now = time.monotonic()
            self._round = (f"lockstep/pulse/{key}", rank, size)
            self._contact = now
            self._waiting = 0
            self._heard = {other: (b"", now) for other in range(size) if other != rank}
            self._word, self._told = Word(), Word()

    def pause(self) -> None:
        """There are no ranks; nobody is missed."""
        with self._lock:
            self._round = None

    def tell(self, word: Word) -> None:
        """Let the other nodes hear ``word`` with the next signs of life."""
        with self._lock:
            self._word = word

    def is_told(self, word: Word) -> bool:
        """Whether ``word`` is in the store, where the others find it."""
        with self._lock:
            return self._told == word

    def others(self) -> list[Word]:
        """The newest word of each other node of this start; an empty one of those not heard yet."""
        with self._lock:
            values = [value for value, _ in self._heard.values()]
        return [_read(value) or Word() for value in values]

    def show_who_waits(self) -> None:
        """Let the agent see how many nodes waited to join when the others were last heard."""
        with self._lock:
            self._handler.waiting = self._waiting

    def end(self) -> None:
        """Give a last sign of life."""
        self._ended.set()
        self.join(_LAST_WORD_S)

    def run(self) -> None:
        store = None
        count = 0
        is_last = False
        while not is_last:
            is_last = self._ended.wait(PULSE_S)
            try:
                if store is None:
                    await_server(self._nodes)
                    store = open_store(self._nodes, serves=False)
                count += 1
                self._pulse(store, count)
            except (RuntimeError, OSError, RendezvousError) as error:
                _log.warning("no sign of life at %s: %s", self._nodes.address, error)
                store = None

    def _pulse(self, store: TCPStore, count: int) -> None:
        with self._lock:
            current, word = self._round, self._word
        if current is None:
            return
        key, rank, size = current
        sign = _Sign(host=socket.gethostname(), pid=os.getpid(), count=count, **dict(word))
        store.set(f"{key}/{rank}", sign.model_dump_json())
        with self._lock:
            if self._round == current:
                self._told = word
        # Before the words: who waits because of a hang has told its own before.
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
                if value != self._heard[other][0]:
                    self._heard[other] = (value, now)

    def cut_off(self) -> str:
        """Says so when the node where all meet has not answered for too long; else empty."""
        with self._lock:
            silence_s = time.monotonic() - self._contact
            if self._nobody_is_missed() or silence_s < SILENCE_S:
                return ""
        return f"{self._nodes.address}, where the nodes meet, has not answered for {silence_s:.0f} s"

    def lost(self) -> str:
        """Names a node that has been silent for too long; empty when all are well."""
        with self._lock:
            if self._nobody_is_missed():
                return ""
            now = time.monotonic()
            for other, (value, at) in self._heard.items():
                if now - at >= SILENCE_S and now - self._contact < SILENCE_S:
                    sign = _read(value)
                    name = sign.host if sign else f"number {other}"
                    return f"node {name} is lost: it has been silent for {now - at:.0f} s"
        return ""

    def _nobody_is_missed(self) -> bool:
        """Whether there are no ranks; or a node is done, so that all may go, with the store that one of them serves."""
        done = any(sign.done for sign in (_read(value) for value, _ in self._heard.values()) if sign)
        return self._round is None or done


def _read(value: bytes) -> _Sign | None:
    """``None`` before the first sign of life, and where another version of Lockstep gives it."""
    try:
        return _Sign.model_validate_json(value)
    except ValidationError:
        return None
