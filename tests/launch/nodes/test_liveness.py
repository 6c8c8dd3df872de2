"""Heartbeats between nodes: who is lost, and who has only ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from lockstep.launch.nodes.command import Nodes
from lockstep.launch.nodes.liveness import Peers

#: Bounds a failure.
PATIENCE_S = 60.0


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Peers]]:
    """Three nodes, none of which takes part in a start yet."""
    monkeypatch.setattr("lockstep.launch.nodes.liveness.HEARTBEAT_S", 0.05)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    nodes = Nodes(least=2, most=2, host="localhost", port=store.port, join_timeout_s=5.0)
    backend = C10dRendezvousBackend(store, "test")
    handler = DynamicRendezvousHandler.from_backend("test", store, backend, 2, 2, "localhost")
    made = [Peers(nodes, handler) for _ in range(3)]
    for peer in made:
        peer.start()
    yield made
    for peer in made:
        peer.end()
        peer.join()


def test_a_node_that_falls_silent_is_missed_unless_it_is_done(
    peers: list[Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, done, lost = peers
    here.begin("first", 0, 2)
    done.begin("first", 1, 2)
    assert [peer.lost() + peer.cut_off() for peer in (here, done)] == ["", ""]
    done.done = True
    done.end()
    wait_until(here._is_over)
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
