"""Rank and world size, read from what launchers leave in the environment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import ConfigError
from lockstep.hardware.world import World, read_world

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
}


def test_nobody_launched() -> None:
    world = read_world({"PATH": "/bin"})
    assert world == World()
    assert (world.is_main, world.nodes, world.from_outside) == (True, 1, False)


def test_torchrun() -> None:
    world = read_world(TORCHRUN)
    assert world == World(3, 4, 1, 2, 1, "torchrun")
    assert (world.is_main, world.nodes, world.from_outside) == (False, 2, True)


def test_a_worker_of_ray_knows_its_node() -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert read_world({**variables, "NODE_RANK": "1"}) == World(1, 2, 0, 1, 1, "torchrun")


def test_lockstep_own_launcher_is_not_from_outside() -> None:
    world = read_world({**TORCHRUN, "LOCKSTEP_LAUNCHER": "1"})
    assert world.launcher == "lockstep"
    assert not world.from_outside


def test_one_of_several_nodes_is_given_its_rank() -> None:
    world = read_world({**TORCHRUN, "LOCKSTEP_LAUNCHER": "nodes"})
    assert (world.launcher, world.from_outside) == ("--nodes", True)


def test_nodes_with_different_numbers_of_ranks() -> None:
    world = read_world({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "5", "GROUP_WORLD_SIZE": "2", "GROUP_RANK": "0"})
    assert world.nodes == 2


def test_srun() -> None:
    assert read_world(SRUN) == World(2, 4, 0, 2, 1, "slurm", 2)


@pytest.mark.parametrize("missing", ["SLURM_PROCID", "SLURM_STEP_ID"])
def test_an_sbatch_shell_is_no_rank(missing: str) -> None:
    environ = {key: value for key, value in SRUN.items() if key != missing}
    assert read_world(environ) == World()


def test_torchrun_inside_srun_is_torchrun() -> None:
    assert read_world({**SRUN, **TORCHRUN}).launcher == "torchrun"


@pytest.mark.parametrize(
    "change",
    [
        {"RANK": "x"},
        {"RANK": "4"},
        {"RANK": "-1"},
        {"LOCAL_RANK": "2"},
        {"WORLD_SIZE": ""},
        {"WORLD_SIZE": "0"},
        {"WORLD_SIZE": "9" * 5000},
        {"WORLD_SIZE": "99999999"},
        {"WORLD_SIZE": "²"},
    ],
)
def test_contradictions_are_refused(change: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_world({**TORCHRUN, **change})
    assert "torchrun" in caught.value.fix


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_any_layout_of_torchrun(nodes: int, local: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, nodes * local - 1))
    environ = {
        "RANK": str(rank),
        "WORLD_SIZE": str(nodes * local),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(rank // local),
    }
    world = read_world(environ)
    assert world.nodes == nodes
    assert world.is_main == (rank == 0)
    assert world.rank == world.node_rank * local + world.local_rank
