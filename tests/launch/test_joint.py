"""Hangs of several nodes: no node is blamed as long as one moves, and all of them name the same rank."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from lockstep.launch.hang import HangReport, Standstill
from lockstep.launch.joint import JointWatch, Word
from lockstep.launch.nodes import Nodes
from lockstep.launch.output import log_file
from lockstep.launch.peers import NodeHandler, Peers
from lockstep.telemetry.pulse import Activity, Sign
from tests.launch.test_hang import Ranks

TIMEOUT_S = 60.0
#: Bounds a failure.
PATIENCE_S = 60.0


class Wire:
    """One node's end of an exchange in which a word arrives at once."""

    def __init__(self, node: int, words: list[Word]) -> None:
        self._node, self._words = node, words

    def tell(self, word: Word) -> None:
        self._words[self._node] = word

    def others(self) -> Sequence[Word]:
        return [word for node, word in enumerate(self._words) if node != self._node]


class Cluster:
    """Nodes with one rank each: rank 0 on the first, rank 1 on the second."""

    def __init__(self, folder: Path) -> None:
        self.nodes = [Ranks(folder, [rank]) for rank in range(2)]
        words = [Word(), Word()]
        self.watches = [
            JointWatch(node.watch, Wire(number, words), timeout_s=TIMEOUT_S) for number, node in enumerate(self.nodes)
        ]

    def after(self, seconds: int, *, busy: int | None = None) -> list[HangReport | None]:
        """Every node looks every second; the ``busy`` one makes progress."""
        found: list[HangReport | None] = [None, None]
        for _ in range(seconds):
            for number, (node, watch) in enumerate(zip(self.nodes, self.watches, strict=True)):
                node.now += 1.0
                if number == busy:
                    node.signs = [Sign(node.signs[0].beats + 1, 3, Activity.SAVING)]
                found[number] = found[number] or watch.look([number])
        return found


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    for node in made.nodes:
        node.kill()


def test_a_node_that_waits_for_a_busy_one_is_not_blamed_and_a_hang_of_all_is_told_on_each(cluster: Cluster) -> None:
    assert cluster.after(200, busy=0) == [None, None]
    assert log_file(cluster.nodes[1].logs, 1).read_text() == "", "nobody was asked for a stack"
    assert cluster.after(59) == [None, None]
    first, second = cluster.after(5)
    assert first is not None
    assert first == second
    assert [(rank.rank, rank.node, rank.stack != ()) for rank in first.ranks] == [
        (0, socket.gethostname(), True),
        (1, socket.gethostname(), True),
    ]
    assert f"rank 1 on {socket.gethostname()}: silent for " in first.table()


def test_who_moves_again_while_the_nodes_ask_takes_everything_back(cluster: Cluster) -> None:
    assert cluster.after(61) == [None, None]
    assert "has made no progress for 60 s" in log_file(cluster.nodes[1].logs, 1).read_text()
    assert cluster.after(60, busy=0) == [None, None]
    assert [watch.verdict for watch in cluster.watches] == [None, None]


def test_words_travel_with_the_signs_of_life() -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    nodes = Nodes(least=2, most=2, host="localhost", port=store.port, join_timeout_s=5.0)
    backend = C10dRendezvousBackend(store, "test")
    handler = NodeHandler.from_backend("test", store, backend, 2, 2, "localhost")
    peers = [Peers(nodes, handler) for _ in range(2)]
    word = Word(stands=True, ranks=(Standstill(rank=1, doing="step 4", node="elsewhere"),))
    try:
        for number, peer in enumerate(peers):
            peer.begin("first", number, 2)
            peer.start()
        assert peers[0].others() == [Word()]
        peers[1].tell(word)
        wait_until(lambda: [Word(**dict(heard)) for heard in peers[0].others()] != [Word()])
        assert peers[0].others()[0].ranks == word.ranks
        assert peers[1].others()[0].stands is False
        assert [peer.lost() + peer.cut_off() for peer in peers] == ["", ""]
        peers[0].begin("second", 0, 2)
        assert peers[0].others() == [Word()], "what was said of the start before counts no more"
    finally:
        for peer in peers:
            peer.end()
            peer.join()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
