"""``--profile A:B``: real traces of real steps, opened as a viewer opens them."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.config import resolve
from lockstep.errors import ConfigError
from tests.e2e.test_train import train as train_by_command
from tests.toys import Toy


def train(folder: Path, profile: str) -> Path:
    """A run of 26 steps on one device; returns the folder of its profile."""
    config: dict[str, Any] = {"save_dir": str(folder / "run"), "hardware": {"selected_devices": "cpu"}}
    config["telemetry"] = {"profile": profile, "profile_ranks": [0, 7], "tensorboard": "off", "log_interval": 1000}
    lockstep.train(Toy, config)
    return folder / "run" / "profile"


def steps_in(trace: Path) -> set[str]:
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    return {event["name"] for event in events if str(event.get("name", "")).startswith("step ")}


@pytest.mark.slow
def test_each_chosen_rank_records_these_steps_and_no_others(tmp_path: Path) -> None:
    output = train_by_command(
        tmp_path, "--devices", "cpu,cpu", "--profile", "3:5", "--profile-ranks", "1,0", "--max-steps", "7"
    )
    folder = tmp_path / "run" / "profile"
    assert re.search(rf"\b3 to 5\b.* {folder}", output)
    assert "profiler_st" not in output, "the library's own lines stay away"
    for rank in (0, 1):
        assert steps_in(folder / f"rank-{rank}.trace.json.gz") == {"step 3", "step 4", "step 5"}
        document = json.loads((folder / f"rank-{rank}.json").read_text())
        assert document["rank"] == rank
        calls = {row["name"]: row["calls"] for row in document["operators"]}
        assert calls["aten::addmm"] == 6, "two linear layers, three steps"
        assert calls["Optimizer.step#AdamW.step"] == 3
        costs = [row["self_cpu_us"] for row in document["operators"]]
        assert costs == sorted(costs, reverse=True)
        assert "aten::addmm" in (folder / f"rank-{rank}.txt").read_text()


def test_a_rank_that_is_not_there_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = train(tmp_path, "1:1")
    assert {file.name for file in folder.iterdir()} == {"rank-0.trace.json.gz", "rank-0.json", "rank-0.txt"}
    assert steps_in(folder / "rank-0.trace.json.gz") == {"step 1"}
    assert re.search(r"profile_ranks\b.*\b7\b.*\b1 rank\b", capfd.readouterr().out)
    assert "KINETO_LOG_LEVEL" not in os.environ


@pytest.mark.parametrize(
    ("profile", "said", "steps"),
    [
        ("25:99", "step 99: the profile ", {"step 25", "step 26"}),
        ("90:99", "step 90: there is no profile", set()),
    ],
)
def test_a_run_that_ends_before_the_last_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], profile: str, said: str, steps: set[str]
) -> None:
    folder = train(tmp_path, profile)
    assert said in capfd.readouterr().out
    assert (steps_in(folder / "rank-0.trace.json.gz") if folder.exists() else set()) == steps


@pytest.mark.parametrize("value", ["", "3", "3:", ":3", "0:3", "5:3", "a:b", "3:5:7", "-1:2", 185])
def test_what_is_no_range_of_steps_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="profile"):
        resolve({"telemetry": {"profile": value}})


def test_ranks_are_numbers_or_a_list_of_them() -> None:
    found = [resolve({"telemetry": {"profile_ranks": ranks}}).telemetry.profile_ranks for ranks in ("0,2", 1, [0, 1])]
    assert found == [(0, 2), (1,), (0, 1)]
