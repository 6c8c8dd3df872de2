"""Rank and world size of this process, read from the environment that a launcher set.

torchrun and Lockstep's launcher set the same variables, SLURM's ``srun`` sets others:
https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables and ``man srun``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Literal

from lockstep.arithmetic import ceil_div
from lockstep.errors import ConfigError

Launcher = Literal["none", "torchrun", "lockstep", "--nodes", "slurm"]

#: The value of LOCKSTEP_LAUNCHER in ranks that the agent of `lockstep train --nodes` starts.
SEVERAL_NODES = "nodes"
#: Environment variables that a launcher sets for each rank.
RANK_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
)


@contextlib.contextmanager
def world_kept(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Restore the launcher's variables afterwards: a file that is imported may set them, as DDP tutorials do."""
    before = {name: environ.get(name) for name in RANK_VARIABLES}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is not None:
                environ[name] = value
            else:
                environ.pop(name, None)


@dataclass(frozen=True, slots=True)
class World:
    """One process among ``size``; node ``node_rank`` holds ``local_size`` of them.

    ``node_count``: number of nodes, if the launcher sets it; nodes may have different numbers of ranks.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    launcher: Launcher = "none"
    node_count: int | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def nodes(self) -> int:
        return self.node_count or ceil_div(self.size, self.local_size)

    @property
    def from_outside(self) -> bool:
        """True if another launcher started the ranks, or if there are several nodes."""
        return self.launcher in {"torchrun", "--nodes", "slurm"}


#: Larger world sizes are refused as mistakes, since a rank waits for all others.
MAX_RANKS = 100_000
_NUMBER = re.compile(r"-?[0-9]{1,9}", re.ASCII)


def read_world(environ: Mapping[str, str]) -> World:
    """Read the world from ``environ``; default: a single process. Raises :class:`ConfigError` for invalid values."""

    def number(name: str, default: str | None = None) -> int:
        text = environ.get(name, default)
        if text is None or not _NUMBER.fullmatch(text):
            raise ConfigError(
                f"the environment variable {name} is {str(text)[:100]!r}, not a number",
                why="the launcher sets it for every rank",
                fix="start the ranks with torchrun, srun or `lockstep train --devices …`, or unset RANK and WORLD_SIZE",
            )
        return int(text)

    if "RANK" in environ and "WORLD_SIZE" in environ:
        mark = environ.get("LOCKSTEP_LAUNCHER")  # set by Lockstep's launcher besides torchrun's variables
        world = World(
            rank=number("RANK"),
            size=number("WORLD_SIZE"),
            local_rank=number("LOCAL_RANK", environ["RANK"]),
            local_size=number("LOCAL_WORLD_SIZE", environ["WORLD_SIZE"]),
            # Ray's TorchTrainer has another name for it.
            node_rank=number("GROUP_RANK" if "GROUP_RANK" in environ else "NODE_RANK", "0"),
            launcher="--nodes" if mark == SEVERAL_NODES else "lockstep" if mark else "torchrun",
            node_count=number("GROUP_WORLD_SIZE") if "GROUP_WORLD_SIZE" in environ else None,
        )
    # An interactive `salloc` or `sbatch` shell sets SLURM_JOB_ID too; only `srun` sets the step's rank.
    elif "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ and environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        size = number("SLURM_STEP_NUM_TASKS")
        nodes = max(1, number("SLURM_STEP_NUM_NODES", "1"))
        world = World(
            rank=number("SLURM_PROCID"),
            size=size,
            local_rank=number("SLURM_LOCALID", "0"),
            local_size=ceil_div(size, nodes),
            node_rank=number("SLURM_NODEID", "0"),
            launcher="slurm",
            node_count=nodes,
        )
    else:
        return World()
    if not (0 <= world.rank < world.size <= MAX_RANKS and 0 <= world.local_rank < world.local_size):
        raise ConfigError(
            f"rank {world.rank} of {world.size} (local {world.local_rank} of {world.local_size}) is out of range",
            why=f"RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE contradict each other, or exceed {MAX_RANKS:,}",
            fix="start the ranks with torchrun, srun or `lockstep train --devices …`",
        )
    return world


def restart_count(environ: Mapping[str, str]) -> int:
    """Count the launcher's restarts of this node's ranks."""
    return int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def rendezvous(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``MASTER_ADDR`` and ``MASTER_PORT`` if the launcher has not set them (SLURM), else an empty mapping.

    All ranks derive the same port from the job's number, in the range that is free for private use.
    """
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        return {}
    job = int(environ.get("SLURM_JOB_ID", "0")) * 64 + int(environ.get("SLURM_STEP_ID", "0"))
    nodes = environ.get("SLURM_STEP_NODELIST", "127.0.0.1")
    return {
        "MASTER_ADDR": environ.get("MASTER_ADDR", first_host(nodes)),
        "MASTER_PORT": environ.get("MASTER_PORT", str(49152 + job % 16384)),
    }


def first_host(nodes: str) -> str:
    """Return the first name of a SLURM node list: ``n[03-05,9],m1`` → ``n03`` (format: ``man scontrol``, hostlist)."""
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return head.split(",")[0]
    inside, _, after = rest.partition("]")
    number = inside.replace("-", ",").split(",")[0]
    return head + number + after.split(",")[0]
