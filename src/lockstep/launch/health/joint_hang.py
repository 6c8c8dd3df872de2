"""Hangs on several nodes: each launcher sees only its own ranks, so the launchers decide together.

A node whose ranks make no progress may only be waiting for a node that saves, evaluates or compiles. So each launcher
sends with its heartbeat whether its ranks hang. When those of all nodes do, each requests the stacks of its ranks and
sends them, so that every node names the same rank.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence
from typing import Protocol

from lockstep.launch.health.hang import HangReport, HangWatch, Standstill
from lockstep.telemetry.files import FileContent


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


class Exchange(Protocol):
    """How nodes exchange their states; see :class:`lockstep.launch.nodes.liveness.Peers`."""

    def send(self, status: NodeStatus) -> None:
        """Send ``status`` with every heartbeat from now on."""

    def is_sent(self, status: NodeStatus) -> bool:
        """Whether the others can read ``status``, even if this node sends nothing more."""

    def others(self) -> Sequence[NodeStatus]:
        """The newest status of each other node of this start; the default one of those not received yet."""


class JointWatch:
    """Checks the ranks of one of several nodes until those of all nodes have been without progress for too long.

    Args:
        own: checks this node's ranks.
        exchange: with the other nodes.
        timeout_s: how long all ranks may be without progress.
    """

    def __init__(self, own: HangWatch, exchange: Exchange, *, timeout_s: float) -> None:
        self._own = own
        self._exchange = exchange
        self._timeout_s = timeout_s
        self._ranks: tuple[Standstill, ...] = ()
        #: The hang as this node knows it. The others know it, too, only when :meth:`look` returns it.
        self.verdict: HangReport | None = None

    def look(self, alive: Collection[int]) -> HangReport | None:
        """A report on the ranks of all nodes, when all nodes have it or can make it."""
        hangs = self._own.hangs(alive)
        others = self._exchange.others() if hangs else ()
        if not hangs or not all(other.hangs for other in others):
            self._ranks, self.verdict = (), None
        elif not self._ranks:
            node = socket.gethostname() if others else ""
            self._ranks = tuple(rank.model_copy(update={"node": node}) for rank in self._own.locate(alive))
        if self._ranks and all(other.ranks for other in others):
            ranks = [*self._ranks, *(rank for other in others for rank in other.ranks)]
            self.verdict = HangReport(timeout_s=self._timeout_s, ranks=tuple(sorted(ranks, key=lambda r: r.rank)))
        status = NodeStatus(hangs=hangs, ranks=self._ranks, knows=self.verdict is not None)
        self._exchange.send(status)
        # A node that returns it ends its ranks and meets the others again; to them that looks like a node that joins.
        return self.verdict if self._exchange.is_sent(status) and all(other.knows for other in others) else None
