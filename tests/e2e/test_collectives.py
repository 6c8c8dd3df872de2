"""``lockstep.collectives()`` in a task's hook, from the command line: what it sees, and how a mistake ends."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import pytest
from torch import nn

import lockstep
from lockstep.rundir.folder import RunDir
from tests.e2e.test_train import finish, start
from tests.toys import Toy

TIMEOUT_S = 10.0


class Hooked(Toy):
    """Its hook talks to the other ranks every second step; at step 4 one rank may do something else."""

    class Config(Toy.Config):
        at_step_4: Literal["talk", "barrier on rank 0", "error on rank 1"] = "talk"

    def hooks(self) -> Any:
        return [(self.talk, 2)]

    def talk(self, result: Any, model: nn.Module) -> dict[str, float]:
        ranks = lockstep.collectives()
        if result.step == 4 and self.config.at_step_4 == "barrier on rank 0":
            if ranks.is_main:
                ranks.barrier()
            return {}
        if result.step == 4 and self.config.at_step_4 == "error on rank 1" and ranks.rank == 1:
            raise ValueError("the hook broke")
        weights = [parameter.sum().item() for parameter in model.parameters()]
        same = ranks.all_gather(weights) == [weights] * ranks.size
        return {"same": float(same), "mean": ranks.weighted_mean(ranks.rank, ranks.rank + 1.0)}


LINE = Hooked.talk.__code__.co_firstlineno


def run(cwd: Path, *settings: str, code: int = 0) -> tuple[str, RunDir]:
    sets = [part for setting in settings for part in ("--set", setting)]
    command = ("train", f"{__file__}:Hooked", "--save-dir", "run", "--devices", "cpu,cpu", "--max-steps", "6", *sets)
    output = finish(start(*command, "--log-interval", "2", cwd=cwd), code)
    return output, RunDir.open(cwd / "run")


@pytest.mark.slow
def test_a_hook_talks_to_all_ranks(tmp_path: Path) -> None:
    _, folder = run(tmp_path)
    assert [row["scalars"] for row in folder.steps()] == [{"same": 1.0, "mean": pytest.approx(2 / 3)}] * 3


def test_the_same_hook_on_one_device(tmp_path: Path) -> None:
    settings = {"save_dir": tmp_path / "run", "training": {"max_steps": 6}, "telemetry": {"log_interval": 2}}
    result = lockstep.train(Hooked(), settings)
    rows = RunDir.open(result.run_dir).steps()
    assert [row["scalars"] for row in rows] == [{"same": 1.0, "mean": 0.0}] * 3


def test_a_call_on_one_rank_ends_the_run_and_names_the_other(tmp_path: Path) -> None:
    settings = ("task.at_step_4=barrier on rank 0", f"distributed.timeout_s={TIMEOUT_S}")
    output, folder = run(tmp_path, *settings, code=1)
    file = Path(__file__).name
    assert re.search(r"^error: rank 0 .*CollectiveError", output, re.MULTILINE)
    assert re.search(rf"rank 1 .* barrier \(call 3, {file}:{LINE + 4}\)", output)
    assert re.search(rf"why: rank 1 .* weighted_mean \(call 2, {file}:{LINE + 10}\)", output)
    assert "\nfix: " in output
    assert re.search(r"rank 1 .* barrier", folder.read().error or "")
    assert folder.status() == "failed"


@pytest.mark.slow
def test_an_error_in_one_ranks_hook_is_told_before_those_who_missed_it(tmp_path: Path) -> None:
    output, _ = run(tmp_path, "task.at_step_4=error on rank 1", code=1)
    assert re.search(r"^error: rank 1 .*ValueError: ", output, re.MULTILINE)
    assert re.search(r"^1 .*\(rank 0\)", output, re.MULTILINE)
    assert f"line {LINE + 7}, in talk" in output, "its traceback is shown"
