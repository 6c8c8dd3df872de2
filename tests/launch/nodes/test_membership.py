"""Ranks that somebody else has started, and that wait for each other."""

from __future__ import annotations

import time

import pytest

from lockstep.hardware.world import World
from lockstep.launch.nodes import membership


@pytest.mark.parametrize(("local_rank", "says"), [("0", True), (None, True), ("1", False)])
def test_who_waits_for_others_says_so(
    local_rank: str | None, says: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(membership, "WAITS_S", 0.01)
    for name, value in (("MASTER_ADDR", "here"), ("MASTER_PORT", "29500"), ("LOCAL_RANK", local_rank)):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    world = World(1, 2, int(local_rank or 1), 2, launcher="torchrun")
    with membership._said(world, 600):
        time.sleep(0.2)
    assert ("rank 1 waits at here:29500 for all 2 ranks, up to 600 s" in capsys.readouterr().err) == says
    monkeypatch.setattr(membership, "WAITS_S", 5)
    with membership._said(world, 600):
        pass
    assert not capsys.readouterr().err
