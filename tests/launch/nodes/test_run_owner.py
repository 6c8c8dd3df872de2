"""Which run several nodes go on with, from whose checkpoint, and who keeps a folder: real ranks, one on each node."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint.store import CheckpointStore, Snapshot
from lockstep.config import RunConfig
from lockstep.errors import CheckpointError, ConfigError
from lockstep.hardware.world import World
from lockstep.launch.nodes import run_owner
from lockstep.launch.nodes.membership import Member, Team
from lockstep.launch.nodes.run_owner import agree, share_run
from lockstep.rundir.folder import RunDir
from tests.gloo import run_ranks

NODES = 3


def team_of(rank: int) -> Team:
    members = [Member(other, 0, other, f"node{other}", {}) for other in range(NODES)]
    return Team(members, World(rank, NODES, 0, 1, rank, "torchrun", NODES), 60.0)


def config_at(folder: Path) -> RunConfig:
    return RunConfig(save_dir=folder / "run")  # type: ignore[call-arg]


def make_run(folder: Path, run_id: str, *steps: int, best: int | None = None) -> None:
    config = config_at(folder)
    run = RunDir.create(folder / "run", config, run_id=run_id, command=["test"])
    run.update(status="failed")
    store = CheckpointStore(run.checkpoints)
    for step in steps:
        model = {"weight": torch.full((300,), float(step))}
        store.save(Snapshot(step, model, {"step": step}, {"epoch": 0}), best=step == best)


def go_on(rank: int, size: int, folders: list[Path]) -> dict[str, Any]:
    """What this rank has in the end."""
    run_owner.CHUNK_BYTES = 100  # so that every file travels in several pieces
    team, config = team_of(rank), config_at(folders[rank])
    try:
        keeping = agree(team, config, resume=True)
    except ConfigError as error:
        return {"error": str(error)}
    share_run(team, keeping, config)
    left = [path.name for path in folders[rank].iterdir() if path.name != "run"]
    if not keeping.found:
        return {"id": keeping.run_id, "keepers": keeping.keepers, "source": None, "left": left}
    store = CheckpointStore(RunDir(keeping.path).checkpoints)
    newest = store.newest_verified(print)
    return {
        "id": RunDir.open(keeping.path).read().id,
        "keepers": keeping.keepers,
        "source": keeping.source,
        "newest": newest,
        "best": store.step_of("best"),
        "last": store.step_of("last"),
        "weight": float(store.load(newest).model["weight"][-1]) if newest is not None else None,
        "left": left,
    }


def folders_in(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / f"node{rank}" for rank in range(NODES)]
    for folder in folders:
        folder.mkdir()
    return folders


def test_the_newest_whole_checkpoint_wins(tmp_path: Path) -> None:
    """Node 0 is new and node 2 is behind; the newest of both others is broken, so node 1's one before it counts."""
    folders = folders_in(tmp_path)
    make_run(folders[1], "run-00000001", 2, 4, 6, best=2)
    make_run(folders[2], "run-00000001", 2, 8)
    for node, step in ((1, 6), (2, 8)):
        (folders[node] / "run" / "checkpoints" / f"step-{step:08}" / "model.safetensors").write_bytes(b"broken")
    results = run_ranks(go_on, NODES, folders)
    expected = {"id": "run-00000001", "keepers": (0, 1, 2), "source": 1, "newest": 4, "weight": 4.0, "left": []}
    for rank in (0, 2):
        assert results[rank] == {**expected, "best": 2, "last": 4}
    assert results[1].items() >= expected.items()
    assert (folders[2] / "run" / "checkpoints" / "step-00000008.broken").is_dir()


@pytest.mark.drill
def test_nodes_that_share_a_folder_have_one_keeper(tmp_path: Path) -> None:
    folders = folders_in(tmp_path)
    shutil.rmtree(folders[2])
    folders[2].symlink_to(folders[1])
    results = run_ranks(go_on, NODES, folders)
    assert {result["id"] for result in results} == {results[0]["id"]}
    assert [result["keepers"] for result in results] == [(0, 1)] * NODES
    assert [result["left"] for result in results] == [[]] * NODES, "no file of the search stays behind"


@pytest.mark.drill
def test_different_runs_are_refused(tmp_path: Path) -> None:
    folders = folders_in(tmp_path)
    make_run(folders[0], "run-00000000", 2)
    make_run(folders[2], "run-00000002", 4)
    for result in run_ranks(go_on, NODES, folders):
        assert "run-00000000 on node0" in result["error"]
        assert "run-00000002 on node2" in result["error"]


def test_a_copy_that_is_not_whole_is_not_adopted(tmp_path: Path) -> None:
    for name in ("from", "to"):
        (tmp_path / name).mkdir()
    make_run(tmp_path / "from", "run-00000001", 2)
    store = CheckpointStore(tmp_path / "to" / "checkpoints")
    copy = store.folder / ".arriving"
    shutil.copytree(tmp_path / "from" / "run" / "checkpoints" / "step-00000002", copy)
    content = (copy / "trainer.pt").read_bytes()
    (copy / "trainer.pt").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"trainer\.pt is damaged"):
        store.adopt(copy, ["last"])
    assert store.steps() == []
    (copy / "trainer.pt").write_bytes(content)
    store.adopt(copy, ["last", "best"])
    assert (store.newest_verified(print), store.step_of("last"), store.step_of("best")) == (2, 2, 2)
