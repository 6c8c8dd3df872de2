"""Rendezvous: exchange ranks, nodes and settings, and refuse differences.

Over the store of the process group, before there is a group: so that a difference is reported by name, instead of as a
time-out of ranks that wait for different things. Rank 0 alone reads the settings of all (docs/scale.md).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous as find_store

from lockstep.config import RunConfig
from lockstep.engine.distributed.collectives import Collectives, shared
from lockstep.engine.runtime import before_nccl, rank_device
from lockstep.errors import ConfigError, LockstepError, RankFailed, RunError
from lockstep.hardware import parent_death
from lockstep.hardware.network import choose_interface
from lockstep.hardware.world import World, rendezvous
from lockstep.launch.failure.watchdog import watched
from lockstep.rundir.files import flattened
from lockstep.rundir.folder import versions

T = TypeVar("T")

#: Settings that may differ between nodes: where its files are, and its devices.
OWN_SETTINGS = ("save_dir", "runs_dir", "init_from", "hardware.selected_devices", "data.data_dir", "launch.rdzv")
_COMPARED_VERSIONS = ("lockstep", "torch", "python")
#: Seconds that rank 0 waits for the others to read a difference.
_READING_S = 10.0
#: Numbers this process's trainings: every rank of a script runs the same ones.
_trainings = count()


@dataclass(frozen=True)
class Member:
    """One rank and its node."""

    rank: int
    local_rank: int
    node_rank: int
    host: str


class Team:
    """All ranks of a start, by node, and their collective calls. ``leads``: the first rank of each node.

    ``store``: where several ranks have met, for a group of another backend and for heartbeats.
    """

    def __init__(self, me: Member, world: World, timeout_s: float, store: Store | None = None) -> None:
        self.world = world
        self.store = store
        self.collectives = Collectives(world, timeout_s=timeout_s)
        self.members = tuple(self.collectives.all_gather(me))
        nodes = {member.node_rank: member.host for member in self.members}
        hosts = Counter(nodes.values())
        self._node_names = {node: host if hosts[host] == 1 else f"{host}-{node}" for node, host in nodes.items()}
        self.leads = [member.rank for member in self.members if member.local_rank == 0]
        self.is_lead = me.local_rank == 0
        self._prints = _prints(world)

    def node_of(self, rank: int) -> str:
        """Return the name of a rank's node: its host's, with a number where hosts share a name."""
        return self._node_names[self.members[rank].node_rank]

    def together(self, body: Callable[[], T], *, here: bool = True) -> T | None:
        """Call ``body()`` on the ranks where ``here``; when it fails on one of them, every rank ends. Collective.

        The first rank of each node raises the error, with its node's name, and prints it; the others raise SystemExit.
        """
        if self.world.size == 1:
            return body() if here else None
        result = None
        error = None
        try:
            result = body() if here else None
        except LockstepError as caught:
            error = caught
        except Exception as caught:  # the other ranks must not wait for this one
            traceback.print_exc()
            message = f"{type(caught).__name__}: {caught}"
            error = RunError(message, why="the traceback is above, or in the rank's log")
        self.end_if(self.collectives.all_gather(error))
        return result

    def end_if(self, errors: Sequence[LockstepError | None]) -> None:
        """End every rank if there is an error in ``errors``, which has one for each rank."""
        for rank, error in enumerate(errors):
            if error is not None:
                if not self._prints:
                    raise SystemExit(error.exit_code)
                raise type(error)(
                    error.what if len(self.leads) == 1 else f"node {self.node_of(rank)}: {error.what}",
                    why=error.why,
                    fix=error.fix,
                )

    def refuse_different(self, values: Mapping[int, str], difference: str, *, why: str, fix: str) -> None:
        """End every rank if ``values``, by rank, are not the same; every rank has the same ``values``."""
        nodes = {value: self.node_of(rank) for rank, value in sorted(values.items(), reverse=True)}
        if len(nodes) > 1:
            listed = ", ".join(f"{value} on {node}" for value, node in nodes.items())
            self.end_if([ConfigError(f"the nodes {difference}: {listed}", why=why, fix=fix)])


def _prints(world: World) -> bool:
    """Return whether this rank prints errors: the launcher of Lockstep prints each once, from any rank."""
    return world.local_rank == 0 or world.launcher in {"lockstep", "--nodes"}


@contextmanager
def meeting(world: World, config: RunConfig) -> Iterator[Team]:
    """Join a gloo group of all ranks, with the same settings. A rank of another launcher ends with that one."""
    if world.from_outside:
        parent_death.die_with_parent(os.getppid())
    timeout_s = config.distributed.timeout_s
    compared = {name: version for name, version in versions().items() if name in _COMPARED_VERSIONS}
    compared |= {f"setting {key}": value for key, value in compared_settings(config).items()}
    me = Member(world.rank, world.local_rank, world.node_rank, socket.gethostname())
    if world.size == 1:
        yield Team(me, world, timeout_s)
        return
    os.environ.update(rendezvous(os.environ))
    if world.nodes > 1:
        choose_interface(os.environ, os.environ["MASTER_ADDR"])
    store = _open_store(world, timeout_s)
    _refuse_differences(store, me, world, compared)
    join(store, "gloo", world, timeout_s)
    failed = True
    try:
        yield Team(me, world, timeout_s, store)
        failed = False
    finally:
        # NCCL waits for all ranks there, and after a failure they wait for this one; the process ends anyway.
        if dist.is_initialized() and not (failed and dist.get_backend() == "nccl"):
            dist.destroy_process_group()


@contextmanager
def group(world: World, config: RunConfig, placement: Mapping[str, Any], logs: Path) -> Iterator[Team]:
    """Meet, in the process group that ``placement`` names, and give it to user code; for ranks that train no run."""
    with meeting(world, config) as team, shared(world, config.distributed.timeout_s), ExitStack() as ending:
        use_backend(team, config, placement, logs)
        if world.launcher == "lockstep":
            ending.enter_context(watched(logs, world, team.store, timeout_s=config.launch.hang_timeout_s))
        yield team


def use_backend(team: Team, config: RunConfig, placement: Mapping[str, Any], logs: Path) -> None:
    """Replace the gloo group of the meeting where ``placement`` needs NCCL; ``logs`` gets its records. Collective."""
    if team.store is not None and placement["backend"] == "nccl":
        join(team.store, "nccl", team.world, config.distributed.timeout_s, placement["devices"], logs)


def join(
    store: Store, backend: str, world: World, timeout_s: float, devices: Sequence[str] = (), logs: Path | None = None
) -> None:
    """Make the default process group, in place of one that is there; ``devices`` and ``logs`` of the run, for NCCL."""
    if logs is not None:
        before_nccl(logs)
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        backend=backend,
        store=PrefixStore(f"lockstep/{backend}", store),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout_s),
        device_id=rank_device(devices, world) if devices else None,
    )


def _address() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _open_store(world: World, timeout_s: float) -> Store:
    store: Store
    try:
        store, _, _ = next(find_store("env://", world.rank, world.size, timeout=timedelta(seconds=timeout_s)))
    except (RuntimeError, ValueError) as error:
        raise RankFailed(
            f"rank {world.rank} cannot meet the others at {_address()}",
            why=str(error).splitlines()[0],
            fix="check that MASTER_ADDR is the node of rank 0 and that no firewall blocks the connection; "
            "run `lockstep doctor` under the same launcher",
        ) from error
    # A script may train several times: the store keeps the addresses of the groups before.
    return PrefixStore(f"training-{next(_trainings)}", store)


def compared_settings(config: RunConfig) -> dict[str, str]:
    """Return settings by dotted key, as JSON, that must be the same on all nodes."""
    flat = flattened(config.model_dump(mode="json"))
    file, _, attribute = config.task.name.rpartition(":")
    if file.endswith(".py"):  # the file's path may differ, its content must not
        flat["task.name"] = f"{Path(file).name}:{attribute}"
        with contextlib.suppress(OSError):
            flat["task.name"] += f" (sha256 {hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]})"
    return {key: json.dumps(value) for key, value in flat.items() if key not in OWN_SETTINGS}


def _refuse_differences(store: Store, me: Member, world: World, compared: Mapping[str, str]) -> None:
    """Have rank 0 compare the settings of all ranks; every rank raises its verdict, or none does."""
    store.set(_settings_key(me.rank), json.dumps([me.host, compared]))
    if world.is_main:
        differences = _first_difference(_all_settings(store, me, world.size))
        store.set(_VERDICT, json.dumps(differences))
    else:
        try:
            differences = json.loads(store.get(_VERDICT))
        except RuntimeError as error:
            raise _absent(store, me, world.size) from error
    if differences is None:
        return
    if world.is_main:
        with contextlib.suppress(RuntimeError):
            receipts = [f"{_VERDICT}/{rank}" for rank in range(1, world.size)]
            store.wait(receipts, timedelta(seconds=_READING_S))
    else:
        store.set(f"{_VERDICT}/{me.rank}", "read")
    if not _prints(world):
        raise SystemExit(ConfigError.exit_code)
    summary, values = differences
    raise ConfigError(
        summary, why=values, fix="start every node with the same command, the same files and the same versions"
    )


_VERDICT = "lockstep/verdict"


def _settings_key(rank: int) -> str:
    return f"lockstep/settings/{rank}"


def _all_settings(store: Store, me: Member, size: int) -> Iterator[tuple[str, dict[str, str]]]:
    """Gather host and compared settings of each rank."""
    for rank in range(size):
        try:
            host, compared = json.loads(store.get(_settings_key(rank)))
        except RuntimeError as error:
            raise _absent(store, me, size) from error
        yield host, compared


def _absent(store: Store, me: Member, size: int) -> RankFailed:
    """Make the error of ``me``, which waits for the first rank without settings in the store."""
    absent = 0
    with contextlib.suppress(RuntimeError):  # the store's process is gone
        absent = next((rank for rank in range(size) if not store.check([_settings_key(rank)])), 0)
    return RankFailed(
        f"rank {absent} of {size} did not join",
        why=f"rank {me.rank} on {me.host} timed out waiting for it",
        fix="look at the output of its node: it failed before it could report that, or never started; "
        "to train without others, unset RANK and WORLD_SIZE",
    )


def _first_difference(settings: Iterable[tuple[str, dict[str, str]]]) -> tuple[str, str] | None:
    """Describe the first rank whose settings differ from those of rank 0, and the values; ``None``: all are alike."""
    ranks = iter(settings)
    first_host, first = next(ranks)
    difference = None
    for rank, (host, compared) in enumerate(ranks, 1):  # all of them: each must have joined
        if difference is not None or compared == first:
            continue
        keys = [key for key in sorted({*first, *compared}) if first.get(key) != compared.get(key)]
        values = [
            f"{key} is {first.get(key, 'not there')} on {first_host}, {compared.get(key, 'not there')} on {host}"
            for key in keys[:5]
        ]
        difference = (
            f"rank {rank} on node {host} would train something else than rank 0 on node {first_host}",
            "; ".join(values),
        )
    return difference
