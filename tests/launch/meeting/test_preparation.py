"""Which run several nodes train, and that all of them see its folder: real ranks, one on each node."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import RunConfig
from lockstep.errors import ConfigError
from lockstep.hardware.world import World
from lockstep.launch.meeting.membership import Member, Team
from lockstep.launch.meeting.preparation import agree_on_run
from lockstep.launch.run_claim import create_folder
from lockstep.rundir.folder import RunDir
from tests.gloo import run_ranks

NODES = 3


def agree(rank: int, size: int, folders: list[Path]) -> dict[str, Any]:
    """The run that this rank is to train, or why it is refused."""
    me = Member(rank, 0, rank, f"node{rank}")
    team = Team(me, World(rank, NODES, 0, 1, rank, "torchrun", NODES), 60.0)
    config = RunConfig(save_dir=folders[rank] / "run")  # type: ignore[call-arg]
    with contextlib.ExitStack() as claim:
        try:
            agreed = agree_on_run(team, config, resume=True, claim=claim)
        except ConfigError as error:
            return {"error": error.what, "fix": error.fix}
        found = agreed.is_resume
        if rank == 0 and not found:
            create_folder(config, agreed.run_id)
        team.collectives.barrier()
        left = sorted(path.name for path in folders[rank].iterdir())
        return {"id": RunDir.open(agreed.run.path).read().id, "found": found, "left": left}


def make_run(folder: Path, run_id: str) -> None:
    config = RunConfig(save_dir=folder / "run")  # type: ignore[call-arg]
    RunDir.create(folder / "run", config, run_id=run_id, command=["test"]).update(status="failed")


@pytest.mark.slow
def test_nodes_that_share_a_folder_train_one_run(tmp_path: Path) -> None:
    """The path may differ; no file of the check stays behind."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "mounted").symlink_to(tmp_path / "disk")
    folders = [tmp_path / "disk", tmp_path / "mounted", tmp_path / "disk"]
    new = run_ranks(agree, NODES, folders)
    assert [(result["id"], result["found"], result["left"]) for result in new] == [(new[0]["id"], False, ["run"])] * 3
    again = run_ranks(agree, NODES, folders)
    assert [(result["id"], result["found"]) for result in again] == [(new[0]["id"], True)] * 3


@pytest.mark.parametrize("runs", [{}, {2: "run-00000002"}, {0: "run-00000000", 2: "run-00000002"}])
def test_a_node_that_sees_another_folder_is_refused_by_name(tmp_path: Path, runs: dict[int, str]) -> None:
    folders = [tmp_path / "disk", tmp_path / "disk", tmp_path / "own"]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    for node, run_id in runs.items():
        make_run(folders[node], run_id)
    for result in run_ranks(agree, NODES, folders):
        assert "node2" in result["error"]
        assert len(runs) < 2 or all(run_id in result["error"] for run_id in runs.values()), "different runs are named"
        assert "storage that all nodes share" in result["fix"]
    assert not [path for folder in folders for path in folder.iterdir() if path.name != "run"]
