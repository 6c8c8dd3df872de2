"""Copying checkpoints, a run's history and logs between nodes without a common file system."""

from __future__ import annotations

import contextlib
import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.checkpoint.store import CheckpointStore, Pointer
from lockstep.config import RunConfig
from lockstep.errors import CheckpointError, UnreadableError
from lockstep.launch.local.rank_output import log_file
from lockstep.launch.nodes.membership import Member, Team
from lockstep.launch.nodes.run_owner import Keeping
from lockstep.launch.run_claim import create_folder
from lockstep.telemetry.files import storing, temporary_name
from lockstep.telemetry.rundir import RunDir

#: How much travels in one piece.
CHUNK_BYTES = 32 << 20
#: Of a longer log only the end is gathered.
MAX_LOG_BYTES = 64 << 20
#: What of a run folder makes the others' copies of it complete, besides checkpoints.
_HISTORY = (
    "run.json", "config.yaml", "metrics.json", "steps.jsonl", "evaluations.jsonl", "plan.json", "attempts/*/*.json",
)  # fmt: skip
#: In rank 0's run folder: what other nodes wrote.
NODES = "nodes"


def share_run(team: Team, keeping: Keeping, config: RunConfig) -> None:
    """Give the keepers whose folders are behind the newest history and checkpoints. Collective.

    Raises:
        StorageError, RunFolderError: a keeper cannot write.
        CheckpointError: what arrived is not what was sent.
    """
    source = keeping.source
    if source is None or len(keeping.keepers) == 1:
        return
    rank = team.me.rank
    newest = keeping.found[source]
    run = RunDir(keeping.path)
    behind = rank in keeping.keepers and keeping.found.get(rank) != newest
    needy = [other for other, needs in enumerate(team.collectives.all_gather(behind)) if needs]
    if not needy:
        return
    history = team.together(lambda: _history(run), here=rank == source)
    history = team.collectives.broadcast(history, source)
    team.together(lambda: _take_history(run, keeping, config, history or {}), here=rank in needy)
    steps = team.together(lambda: _steps_to_send(run, newest.step), here=rank == source)
    steps = team.collectives.broadcast(steps, source) or {}
    store = CheckpointStore(run.checkpoints)
    timeout = timedelta(seconds=config.distributed.timeout_s)
    group = dist.new_group(sorted({source, *needy}), backend="gloo", timeout=timeout)
    try:
        for step, pointers in steps.items():
            _share_checkpoint(team, store, step, pointers, source, group)
    finally:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    team.together(lambda: store.set_aside_after(newest.step), here=rank in needy)


def _history(run: RunDir) -> dict[str, bytes]:
    files = [path for pattern in _HISTORY for path in run.path.glob(pattern)]
    with storing(run.path):
        return {str(path.relative_to(run.path)): path.read_bytes() for path in files}


def _take_history(run: RunDir, keeping: Keeping, config: RunConfig, history: dict[str, bytes]) -> None:
    if not run.run_file.exists():
        create_folder(config, keeping.run_id)
    with storing(run.path):
        shutil.rmtree(run.attempts, ignore_errors=True)
        for name, content in history.items():
            path = run.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(temporary_name(path.name))
            temporary.write_bytes(content)
            temporary.replace(path)
    CheckpointStore(run.checkpoints).clean_temporary()


def _steps_to_send(run: RunDir, newest: int) -> dict[int, list[Pointer]]:
    """The newest checkpoint and the best, with the pointers that mean them."""
    store = CheckpointStore(run.checkpoints)
    steps: dict[int, list[Pointer]] = {}
    best = store.step_of("best")
    if best is not None and best <= newest:
        try:
            store.verify(best)
            steps[best] = ["best"]
        except UnreadableError:
            raise
        except CheckpointError:
            pass  # damaged: the run continues without it
    if newest >= 0:
        steps.setdefault(newest, []).append("last")
    return steps


def _share_checkpoint(
    team: Team, store: CheckpointStore, step: int, pointers: list[Pointer], source: int, group: Any
) -> None:
    """Send a checkpoint from the rank ``source`` to the others of ``group``. Collective.

    The manifest, one of the files, holds the hashes that prove what has arrived.
    """
    sends, takes_part = team.me.rank == source, group is not dist.GroupMember.NON_GROUP_MEMBER
    receives = takes_part and not sends
    there = store.path_of(step)
    files = sorted((path.name, path.stat().st_size) for path in there.iterdir()) if sends else []
    files = team.collectives.broadcast(files, source)
    building = store.folder / temporary_name(there.name)

    def make() -> None:
        with storing(building):
            building.mkdir(parents=True)

    team.together(make, here=receives)
    if takes_part:
        for name, size in files:
            _share_file((there if sends else building) / name, size, source, group, sends=sends)
    team.together(lambda: store.adopt(building, pointers), here=receives)


def _share_file(path: Path, size: int, source: int, group: Any, *, sends: bool) -> None:
    """Send ``size`` bytes of ``path``, or write them to it, durably. Collective in ``group``.

    A rank that cannot read or write ends, and the others with it. Raises :class:`StorageError`.
    """
    with storing(path), path.open("rb" if sends else "xb") as file:
        for start in range(0, size, CHUNK_BYTES):
            piece = torch.empty(min(CHUNK_BYTES, size - start), dtype=torch.uint8)
            if sends:
                piece = torch.frombuffer(bytearray(file.read(len(piece))), dtype=torch.uint8)
            dist.broadcast(piece, src=source, group=group)
            if not sends:
                file.write(piece.numpy().data)
        if not sends:
            file.flush()
            os.fsync(file.fileno())


def gather_logs(team: Team, keeping: Keeping) -> None:
    """Copy what other keepers' ranks wrote to rank 0's folder: ``nodes/<node>/…``. Collective.

    Raises:
        StorageError: rank 0 cannot write.
    """
    if len(keeping.keepers) == 1:
        return
    mine = _own_files(RunDir(keeping.path), team.me) if keeping.keeper != 0 else {}
    files = team.collectives.gather(mine)
    team.together(lambda: _put_logs(team, keeping.path, files or []), here=team.me.rank == 0)


def _own_files(run: RunDir, me: Member) -> dict[str, bytes]:
    found = {}
    files = [log_file(run.logs, me.rank), run.samples_file(me.rank)]
    if me.local_rank == 0:
        files.append(run.path / f"system-{me.node_rank}.jsonl")
    for path in files:
        with contextlib.suppress(OSError), path.open("rb") as file:
            whole = path.suffix == ".jsonl"
            file.seek(0 if whole else max(0, path.stat().st_size - MAX_LOG_BYTES))
            found[str(path.relative_to(run.path))] = file.read()
    return found


def _put_logs(team: Team, folder: Path, files: list[dict[str, bytes]]) -> None:
    for rank, own in enumerate(files):
        for name, content in own.items():
            path = folder / NODES / team.node_of(rank) / name
            with storing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
