"""Loops that have their rows: off-policy learning by updates, on several ranks, in exact mode, and after a resume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep
from lockstep.errors import TaskError

QUIET = {"telemetry.progress": "silent", "telemetry.system_metrics": False, "telemetry.log_interval": 1}
UPDATES = 6


class Replay:
    """Transitions of five environments."""

    def __init__(self) -> None:
        self.states = torch.empty(0, 4)
        self.values = torch.empty(0)

    def add(self, states: Tensor, values: Tensor) -> None:
        self.states = torch.cat([self.states, states])
        self.values = torch.cat([self.values, values])

    def sample(self, size: int) -> dict[str, Tensor]:
        chosen = torch.randint(len(self.states), (size,))
        return {"states": self.states[chosen], "values": self.values[chosen]}

    def state_dict(self) -> dict[str, Any]:
        return {"states": self.states, "values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.states = state["states"]
        self.values = state["values"]


def critic() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def learn(
    settings: dict[str, Any] | None = None, strays: bool = False, **options: Any
) -> tuple[list[list[float]], list[dict[str, Tensor]]]:
    """Two epochs of six updates, of which the very first only collects and the last of an epoch takes two steps.

    Returns:
        The weights of critic and target, and the rows of each step. With ``strays`` rank 1 once gives other rows.
    """
    used = []
    with lockstep.Session(QUIET | (settings or {}), seed=1, **options) as session:
        model, target = critic(), critic()
        target.load_state_dict(model.state_dict())
        model, target, optimizer = session.prepare(model, target, torch.optim.SGD(model.parameters(), lr=0.1))
        replay = Replay()
        session.checkpoint(replay=replay)
        for _ in session.epochs(2):
            for update in session.updates(UPDATES):
                states = torch.randn(5, 4)
                with torch.no_grad():
                    values = target(states).squeeze(1) + states.sum(1) + 0.1 * torch.randn(5)
                replay.add(states, values)
                if len(replay.states) == 5:
                    continue
                for _ in range(2 if update == UPDATES - 1 else 1):
                    rows = replay.sample(13)
                    if strays and session.step_count == 8:
                        other = {name: column + session.rank for name, column in rows.items()}
                        with pytest.raises(TaskError, match=r"part\(\)"):
                            next(session.part(other))
                    used.append(rows)
                    for part in session.part(rows):
                        output = model(part["states"]).squeeze(1)
                        session.backward(F.mse_loss(output, part["values"], reduction="sum"), count=len(output))
                        if session.step(optimizer):
                            with torch.no_grad():
                                for old, new in zip(target.parameters(), model.parameters(), strict=True):
                                    old.lerp_(new, 0.2)
            session.log(loss=float(session.step_count))
        return [p.flatten().tolist() for module in (model, target) for p in module.parameters()], used


def test_steps_are_those_of_a_plain_loop_and_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"telemetry.progress": "off", "telemetry.record_samples": True}
    weights, used = learn(settings, save_dir=tmp_path / "run")
    torch.manual_seed(1)
    model = critic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in used:
        F.mse_loss(model(rows["states"]).squeeze(1), rows["values"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert weights[:4] == [pytest.approx(p.flatten().tolist(), abs=1e-6) for p in model.parameters()]
    run = lockstep.Run(tmp_path / "run")
    assert [row["step"] for row in run.history] == [6, 13]
    assert [row["samples_seen"] for row in run.steps] == [13 * step for step in range(1, 14)]
    assert run.history[1]["val_loss"] == 13.0
    assert "".join(capsys.readouterr()).count("telemetry.record_samples") == 1, "rows of the loop have no indices"


@pytest.mark.slow
def test_any_ranks_and_a_resume_within_an_epoch_compute_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole, _ = learn(save_dir=tmp_path / "one")
    three, _ = lockstep.Session.launch(learn, {}, True, devices="cpu,cpu,cpu", save_dir=tmp_path / "three")
    assert three == [pytest.approx(values, abs=1e-5) for values in whole]
    exact = {"training.reproducibility": "exact"}
    once, _ = learn(exact, save_dir=tmp_path / "exact")
    assert once == [pytest.approx(values, abs=1e-5) for values in whole]
    stopped = exact | {"training.max_steps": 8}
    lockstep.Session.launch(learn, stopped, devices="cpu,cpu", save_dir=tmp_path / "two")
    resumed, _ = learn(exact, resume=True, save_dir=tmp_path / "two")
    assert resumed == once


def loop(session: lockstep.Session, rows: Any) -> Iterator[Any]:
    model = nn.Linear(4, 1)
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in session.epochs(1):
        for _ in session.updates(2):
            yield from session.part(rows)


def test_parts_are_of_rows(tmp_path: Path) -> None:
    states = np.arange(12, dtype=np.float32).reshape(3, 4)
    for number, (rows, word) in enumerate(
        [
            ((torch.zeros(3, 4), torch.zeros(2)), "2, 3 rows"),
            ((torch.zeros(3, 4), 1.0), "0, 3 rows"),
            ([], "no rows"),
        ]
    ):
        with lockstep.Session(QUIET, save_dir=tmp_path / str(number)) as session, pytest.raises(TaskError, match=word):
            next(loop(session, rows))
    with lockstep.Session(QUIET, save_dir=tmp_path / "arrays") as session:
        with pytest.raises(TaskError, match=r"session\.updates"):
            session.part(states)
        assert [part.tolist() for part in loop(session, states)] == [states.tolist()] * 2
