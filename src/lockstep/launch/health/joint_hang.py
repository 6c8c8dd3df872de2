"""Hangs of several nodes: each launcher sees its own ranks, and only together do they see a hang.

A node whose ranks stand still may only wait for another one that is busy: it saves, evaluates, compiles. So the
launchers tell each other, with their signs of life, whether their ranks stand. When those of all nodes do, each asks
its own for their stacks and tells what it has found, so that every node names the same rank.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from lockstep.launch.health.hang import HangReport, HangWatch, Standstill


class Word(BaseModel):
    """What a node says of its ranks.

    ``stands``: none of them moves. ``ranks``: where they are, once those of all nodes stand. ``knows``: it has heard
    from all the others where theirs are. ``done``: they have ended well, so training is over on all nodes.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    stands: bool = False
    ranks: tuple[Standstill, ...] = ()
    knows: bool = False
    done: bool = False


class Exchange(Protocol):
    """How nodes hear of each other; see :class:`lockstep.launch.nodes.liveness.Peers`."""

    def tell(self, word: Word) -> None:
        """Let the others hear ``word`` from now on."""

    def is_told(self, word: Word) -> bool:
        """Whether the others can hear ``word`` already, also when this node says no more."""

    def others(self) -> Sequence[Word]:
        """The newest word of each other node of this start; an empty one of those not heard yet."""


class JointWatch:
    """Looks at the ranks of one of several nodes until those of all of them have been silent for too long.

    Args:
        own: looks at this node's ranks.
        exchange: with the other nodes.
        timeout_s: how long no rank may move.
    """

    def __init__(self, own: HangWatch, exchange: Exchange, *, timeout_s: float) -> None:
        self._own = own
        self._exchange = exchange
        self._timeout_s = timeout_s
        self._ranks: tuple[Standstill, ...] = ()
        #: What this node knows of the hang. The others know it, too, only when :meth:`look` returns it.
        self.verdict: HangReport | None = None

    def look(self, alive: Collection[int]) -> HangReport | None:
        """A report on the ranks of all nodes, when all nodes have it or can make it."""
        stands = self._own.stands(alive)
        others = self._exchange.others() if stands else ()
        if not stands or not all(word.stands for word in others):
            self._ranks, self.verdict = (), None
        elif not self._ranks:
            node = socket.gethostname() if others else ""
            self._ranks = tuple(rank.model_copy(update={"node": node}) for rank in self._own.stands_at(alive))
        if self._ranks and all(word.ranks for word in others):
            ranks = [*self._ranks, *(rank for word in others for rank in word.ranks)]
            self.verdict = HangReport(timeout_s=self._timeout_s, ranks=tuple(sorted(ranks, key=lambda r: r.rank)))
        word = Word(stands=stands, ranks=self._ranks, knows=self.verdict is not None)
        self._exchange.tell(word)
        # Who returns it ends its ranks and meets anew, and the others could not tell that from a node that joins.
        return self.verdict if self._exchange.is_told(word) and all(other.knows for other in others) else None
