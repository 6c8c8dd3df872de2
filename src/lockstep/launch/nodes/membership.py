"""The ranks of several processes meet: who is here, on which node, and whether all want the same.

Over the store of the process group, before there is a group: so that a difference is told by name, instead
of as a time-out of ranks that wait for different things.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous as find_store

from lockstep.config import RunConfig
from lockstep.engine.distributed.collectives import Collectives
from lockstep.errors import ConfigError, LockstepError, RankFailed, RunError
from lockstep.hardware.network import choose_interface
from lockstep.hardware.world import World, rendezvous
from lockstep.telemetry.records import versions

T = TypeVar("T")

#: Settings that may differ between nodes: where its files are, and its devices.
OWN_SETTINGS = ("save_dir", "runs_dir", "init_from", "hardware.selected_devices", "data.data_dir", "launch.rdzv")
_COMPARED_VERSIONS = ("lockstep", "torch", "python")
#: Numbers this process's trainings: every rank of a script runs the same ones.
_trainings = count()


@dataclass(frozen=True)
class Member:
    """One rank, as it introduces itself. ``says`` is what must be the same on all: settings and versions."""

    rank: int
    local_rank: int
    node_rank: int
    host: str
    says: dict[str, str]


class Team:
    """All ranks of a start, by node, and what they do together."""

    def __init__(self, members: Sequence[Member], world: World, timeout_s: float) -> None:
        self.members = tuple(members)
        self.me = self.members[world.rank]
        self.collectives = Collectives(world, timeout_s=timeout_s)
        #: The first rank of each node.
        self.leads = [member.rank for member in self.members if member.local_rank == 0]
        self.is_lead = self.me.local_rank == 0
        # Lockstep's own launcher tells each error once, from whichever rank; elsewhere every rank has the terminal.
        self._tells = self.is_lead or world.launcher == "--nodes"

    @property
    def node(self) -> str:
        """This rank's node."""
        return self.node_of(self.me.rank)

    def node_of(self, rank: int) -> str:
        """The name of a rank's node: its host's, with a number where hosts share a name."""
        member = self.members[rank]
        same = {other.node_rank for other in self.members if other.host == member.host}
        return member.host if len(same) == 1 else f"{member.host}-{member.node_rank}"

    def lead_of(self, rank: int) -> int:
        """The first rank on the node of ``rank``."""
        node = self.members[rank].node_rank
        return next(lead for lead in self.leads if self.members[lead].node_rank == node)

    def together(self, body: Callable[[], T], *, here: bool = True) -> T | None:
        """``body()`` on the ranks where ``here``; when it fails on one of them, every rank ends. Collective.

        Raises:
            LockstepError: the first one, with its node's name; on the first rank of each node, which tells it.
            SystemExit: on the others, with its exit code.
        """
        result, error = None, None
        if here:
            try:
                result = body()
            except LockstepError as caught:
                error = caught
            except Exception as caught:  # the other ranks must not wait for this one
                traceback.print_exc()
                what = f"{type(caught).__name__}: {caught}"
                error = RunError(what, why="the traceback is above, or in the rank's log")
        self.end_if(self.collectives.all_gather(error))
        return result

    def end_if(self, errors: Sequence[LockstepError | None]) -> None:
        """End every rank if there is an error in ``errors``, which has one for each rank."""
        for rank, error in enumerate(errors):
            if error is None:
                continue
            if not self._tells:
                raise SystemExit(error.exit_code)
            what = error.what if len(self.leads) == 1 else f"node {self.node_of(rank)}: {error.what}"
            raise type(error)(what, why=error.why, fix=error.fix)


@contextmanager
def meeting(world: World, config: RunConfig) -> Iterator[tuple[Team, Store | None]]:
    """Join a gloo group of all ranks; its store is for a group of another backend later on.

    Raises:
        RankFailed: some rank did not come in time.
        ConfigError: the ranks want different things.
    """
    timeout_s = config.distributed.timeout_s
    me = _introduce(world, config)
    if world.size == 1:
        yield Team([me], world, timeout_s), None
        return
    os.environ.update(rendezvous(os.environ))
    if world.nodes > 1:
        choose_interface(os.environ, os.environ["MASTER_ADDR"])
    store = _open_store(world, timeout_s)
    members = _exchange(store, me, world.size)
    _refuse_differences(members, tells=me.local_rank == 0 or world.launcher == "--nodes")
    join(store, "gloo", world, timeout_s)
    failed = True
    try:
        yield Team(members, world, timeout_s), store
        failed = False
    finally:
        # NCCL waits for all ranks there, and after a failure they wait for this one; the process ends anyway.
        if dist.is_initialized() and not (failed and dist.get_backend() == "nccl"):
            dist.destroy_process_group()


def join(store: Store, backend: str, world: World, timeout_s: float, *, device: torch.device | None = None) -> None:
    """Make the default process group, in place of one that is there."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        backend=backend,
        store=PrefixStore(f"lockstep/{backend}", store),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device,
    )


def _open_store(world: World, timeout_s: float) -> Store:
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    store: Store
    try:
        store, _, _ = next(find_store("env://", world.rank, world.size, timeout=timedelta(seconds=timeout_s)))
    except (RuntimeError, ValueError) as error:
        raise RankFailed(
            f"rank {world.rank} cannot meet the others at {address}",
            why=str(error).splitlines()[0],
            fix="check that MASTER_ADDR is the node of rank 0 and that no firewall stands between; "
            "`lockstep doctor` under the same launcher looks closer",
        ) from error
    # A script may train several times: the store keeps the addresses of the groups before.
    return PrefixStore(f"training-{next(_trainings)}", store)


def _introduce(world: World, config: RunConfig) -> Member:
    here = versions()
    says = {name: here[name] for name in _COMPARED_VERSIONS}
    says |= {f"setting {key}": value for key, value in compared_settings(config).items()}
    return Member(world.rank, world.local_rank, world.node_rank, socket.gethostname(), says)


def compared_settings(config: RunConfig) -> dict[str, str]:
    """Settings by dotted key, as JSON, that must be the same on all nodes."""
    flat = dict(_flatten(config.model_dump(mode="json")))
    place, _, attribute = config.task.name.rpartition(":")
    if place.endswith(".py"):  # where a file lies may differ, what it says may not
        flat["task.name"] = f"{Path(place).name}:{attribute}"
        with contextlib.suppress(OSError):
            flat["task.name"] += f" (sha256 {hashlib.sha256(Path(place).read_bytes()).hexdigest()[:12]})"
    return {key: json.dumps(value) for key, value in flat.items() if key not in OWN_SETTINGS}


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _exchange(store: Store, me: Member, size: int) -> list[Member]:
    store.set(f"lockstep/member/{me.rank}", json.dumps(asdict(me)))
    members = []
    for rank in range(size):
        try:
            members.append(Member(**json.loads(store.get(f"lockstep/member/{rank}"))))
        except RuntimeError as error:
            raise RankFailed(
                f"rank {rank} of {size} did not come",
                why=f"rank {me.rank} on {me.host} timed out waiting for it",
                fix="look at the output of its node: it failed before it could say so, or never started",
            ) from error
    return members


def _refuse_differences(members: Sequence[Member], *, tells: bool) -> None:
    """Every rank sees the same members, so all of them raise or none does."""
    first = members[0]
    for member in members:
        differing = [
            f"{key} is {first.says.get(key, 'not there')} on {first.host}, {member.says.get(key, 'not there')} on "
            f"{member.host}"
            for key in sorted({*first.says, *member.says})
            if first.says.get(key) != member.says.get(key)
        ]
        if not differing:
            continue
        if not tells:
            raise SystemExit(ConfigError.exit_code)
        raise ConfigError(
            f"rank {member.rank} on node {member.host} would train something else than rank 0 on node {first.host}",
            why="; ".join(differing[:5]),
            fix="start every node with the same command, the same files and the same versions",
        )
