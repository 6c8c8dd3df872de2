"""Hangs of several nodes: no node is blamed as long as one moves, and all of them name the same rank."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from lockstep.launch.health.hang import HangReport, Standstill
from lockstep.launch.local.rank_output import log_file
from lockstep.launch.nodes.command import Nodes
from lockstep.launch.nodes.liveness import JointWatch, NodeHandler, NodeStatus, Peers
from lockstep.telemetry.progress_board import Activity, Sign
from tests.launch.conftest import Processes
from tests.launch.health.test_hang import Ranks

#: Bounds a failure.
PATIENCE_S = 60.0


class Wire:
    """One node's end of an exchange in which a word arrives with the node's next pulse."""

    def __init__(self, node: int, words: list[NodeStatus]) -> None:
        self._node, self._words = node, words
        self._next = NodeStatus()

    def send(self, word: NodeStatus) -> None:
        self._next = word

    def pulse(self) -> None:
        self._words[self._node] = self._next

    def is_sent(self, word: NodeStatus) -> bool:
        return self._words[self._node] == word

    def others(self) -> Sequence[NodeStatus]:
        return [word for node, word in enumerate(self._words) if node != self._node]


class Cluster:
    """Nodes with one rank each: rank 0 on the first, rank 1 on the second."""

    def __init__(self, shared: Processes) -> None:
        self.seconds = 0
        self.words = [NodeStatus(), NodeStatus()]
        self.wires = [Wire(number, self.words) for number in range(2)]
        self.nodes = [Ranks(shared, [rank], partial(JointWatch, peers=self.wires[rank])) for rank in range(2)]
        self.watches = [node.watch for node in self.nodes]

    def after(self, seconds: int, *, busy: int | None = None) -> list[HangReport | None]:
        """Every node looks every second, and pulses every one or three; the ``busy`` one makes progress."""
        found: list[HangReport | None] = [None, None]
        for _ in range(seconds):
            for number, (node, watch) in enumerate(zip(self.nodes, self.watches, strict=True)):
                node.now += 1.0
                if number == busy:
                    node.signs = [Sign(node.signs[0].beats + 1, 3, Activity.SAVING)]
                found[number] = found[number] or watch.look([number])
            self.seconds += 1
            for every_s, wire in zip((1, 3), self.wires, strict=True):
                if self.seconds % every_s == 0:
                    wire.pulse()
        return found


@pytest.fixture
def cluster(shared: Processes) -> Cluster:
    return Cluster(shared)


def test_a_node_that_waits_for_a_busy_one_is_not_blamed_and_a_hang_of_all_is_told_on_each(cluster: Cluster) -> None:
    assert cluster.after(200, busy=0) == [None, None]
    assert log_file(cluster.nodes[1].logs, 1).read_text() == "", "nobody was asked for a stack"
    assert cluster.after(59) == [None, None]
    first, second = cluster.after(10)
    assert first is not None
    assert first == second
    assert [(rank.rank, rank.node, rank.stack != ()) for rank in first.ranks] == [
        (0, socket.gethostname(), True),
        (1, socket.gethostname(), True),
    ]
    assert f"rank 1 on {socket.gethostname()}: silent for " in first.table()


def test_who_moves_again_while_the_nodes_ask_takes_everything_back(cluster: Cluster) -> None:
    assert cluster.after(62) == [None, None]
    assert "has made no progress for 60 s" in log_file(cluster.nodes[1].logs, 1).read_text()
    assert cluster.after(60, busy=0) == [None, None]
    assert [watch.verdict for watch in cluster.watches] == [None, None]


def test_who_tells_a_hang_has_let_the_others_know_before(cluster: Cluster) -> None:
    """It ends its ranks and says no more: the others must be able to tell that from a node that joins."""
    while not any(cluster.after(1)):
        assert cluster.seconds < 120
    assert [word.knows for word in cluster.words] == [True, True]


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Peers]]:
    """Three nodes, none of which takes part in a start yet."""
    monkeypatch.setattr("lockstep.launch.nodes.liveness.HEARTBEAT_S", 0.05)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    nodes = Nodes(least=2, most=2, host="localhost", port=store.port, join_timeout_s=5.0)
    backend = C10dRendezvousBackend(store, "test")
    handler = NodeHandler.from_backend("test", store, backend, 2, 2, "localhost")
    made = [Peers(nodes, handler) for _ in range(3)]
    for peer in made:
        peer.start()
    yield made
    for peer in made:
        peer.end()
        peer.join()


def test_states_travel_with_heartbeats(peers: list[Peers]) -> None:
    here, there, _ = peers
    word = NodeStatus(hangs=True, ranks=(Standstill(rank=1, doing="step 4", node="elsewhere"),))
    here.begin("first", 0, 2)
    there.begin("first", 1, 2)
    assert here.others() == [NodeStatus()]
    there.send(word)
    wait_until(lambda: there.is_sent(word))
    wait_until(lambda: here.others()[0].hangs)
    assert here.others()[0].ranks == word.ranks
    assert there.others()[0].hangs is False
    assert [peer.lost() + peer.cut_off() for peer in (here, there)] == ["", ""]
    here.begin("second", 0, 2)
    assert here.others() == [NodeStatus()], "what was said of the start before counts no more"


def test_a_node_that_falls_silent_is_missed_unless_it_is_done(
    peers: list[Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, done, lost = peers
    here.begin("first", 0, 2)
    done.begin("first", 1, 2)
    done.send(NodeStatus(done=True))
    done.end()
    wait_until(lambda: here.others()[0].done)
    monkeypatch.setattr("lockstep.launch.nodes.liveness.SILENCE_S", 0.5)
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        assert here.lost() == ""
        time.sleep(0.05)
    monkeypatch.setattr("lockstep.launch.nodes.liveness.SILENCE_S", 0.0)
    assert here.cut_off() == "", "the store may have gone with it"
    monkeypatch.setattr("lockstep.launch.nodes.liveness.SILENCE_S", 0.5)
    here.begin("second", 0, 2)
    lost.begin("second", 1, 2)
    lost.end()
    wait_until(lambda: "is lost: no heartbeat for" in here.lost())


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
