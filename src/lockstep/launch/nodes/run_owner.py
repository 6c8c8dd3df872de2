"""Which run the ranks of several nodes train, which ranks write its folder, and copies of it for the others.

Nodes that share a file system share one run folder, which rank 0 writes. On every other node (or group of nodes that
share one) the first rank is a *keeper*, too: it writes a separate run folder with the same checkpoints and curves, so
that the run can be resumed from any of them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lockstep.checkpoint.store import CheckpointStore, Pointer
from lockstep.config import RunConfig
from lockstep.errors import CheckpointError, UnreadableError
from lockstep.launch.nodes.membership import Member, Team
from lockstep.launch.process.rank_log import log_file
from lockstep.launch.run_claim import create_folder, existing_run, warn
from lockstep.rundir.files import absolute, storing, temporary_name
from lockstep.rundir.folder import RunDir, new_run_id

#: How much of a checkpoint travels in one piece.
CHUNK_BYTES = 32 << 20
#: Of a longer log only the end is gathered.
MAX_LOG_BYTES = 64 << 20
#: What of a run folder makes the others' copies of it complete, besides checkpoints.
_HISTORY = (
    "run.json", "config.yaml", "metrics.json", "steps.jsonl", "evaluations.jsonl", "plan.json", "attempts/*/*.json",
)  # fmt: skip
#: In rank 0's run folder: what other nodes wrote.
NODES = "nodes"


@dataclass(frozen=True)
class Found:
    """A run that a node has in its folder. ``step``: of its latest valid checkpoint, -1 without one."""

    run_id: str
    attempt: int
    step: int


@dataclass(frozen=True)
class Keeping:
    """What the ranks have agreed on.

    Attributes:
        path: the run's folder, as this rank sees it.
        keepers: the ranks that write a run folder; rank 0 is the first.
        keeper: the one that writes the folder that this rank sees.
        found: what the keepers had, by rank; empty for a new run.
    """

    run_id: str
    path: Path
    keepers: tuple[int, ...]
    keeper: int
    found: dict[int, Found]

    @property
    def source(self) -> int | None:
        """The keeper from whose folder the run resumes: the one with the latest valid checkpoint."""
        return max(self.found, key=lambda rank: (self.found[rank].step, -rank), default=None)


def agree(team: Team, config: RunConfig, *, resume: bool, begun: str | None = None) -> Keeping:
    """Find the run to resume, or name a new one. Collective. ``begun``: the run that this node's ranks trained before.

    Raises :class:`UsageError`: the folders hold different runs, one that is still running, or cannot be written.
    """
    everywhere = team.collectives.all_gather(team.together(lambda: _look(config, resume, begun), here=team.is_lead))
    known = {rank: one for rank, one in enumerate(everywhere) if one is not None}
    team.refuse_different(
        {rank: found.run_id for rank, found in known.items()},
        "have different runs",
        why="the ranks can resume only one",
        fix="name another --save-dir, or move the folder away on the nodes that shall get the run from the others",
    )
    new_id = team.collectives.broadcast(new_run_id(config.save_dir))
    run_id = next((found.run_id for found in known.values()), new_id)
    path = absolute(config.save_dir or config.runs_dir / run_id)
    keeper = lowest_sharing(team, path)
    keepers = tuple(sorted(set(team.collectives.all_gather(keeper))))
    return Keeping(run_id, path, keepers, keeper, {rank: one for rank, one in known.items() if rank in keepers})


def _look(config: RunConfig, resume: bool, begun: str | None) -> Found | None:
    """The run that this node could resume."""
    run = RunDir.open(Path(begun)) if begun is not None else existing_run(config, resume)
    if run is None:
        return None
    record, step = run.read(), CheckpointStore(run.checkpoints).newest_verified(warn)
    return Found(record.id, record.attempt, -1 if step is None else step)


def lowest_sharing(team: Team, path: Path) -> int:
    """The lowest of the nodes' first ranks that has the same ``path`` as this rank's node. Collective.

    Each of them leaves a file beside ``path``, and looks whose files it finds there. The name is a new one, so that no
    network file system remembers that there is no such file.
    """
    if len(team.leads) == 1:
        return team.leads[0]
    token = team.collectives.broadcast(uuid.uuid4().hex)
    probes = {rank: path.with_name(f".{path.name}.{token}.{rank}") for rank in team.leads}

    def touch() -> None:
        probe = probes[team.me.rank]
        with storing(probe):
            probe.parent.mkdir(parents=True, exist_ok=True)
            probe.touch()

    try:
        team.together(touch, here=team.is_lead)
        seen = next(rank for rank in team.leads if probes[rank].exists()) if team.is_lead else None
        keepers = team.collectives.all_gather(seen)
    finally:
        if team.is_lead:
            with contextlib.suppress(OSError):
                probes[team.me.rank].unlink()
    keeper = keepers[next(lead for lead in team.leads if team.members[lead].node_rank == team.me.node_rank)]
    assert keeper is not None, "the first rank of a node sees its own file"
    return keeper


# --- copies between nodes without a common file system ----------------------------------------------


def share_run(team: Team, keeping: Keeping, config: RunConfig) -> None:
    """Give the keepers whose folders are behind the newest history and checkpoints. Collective."""
    source, rank, run = keeping.source, team.me.rank, RunDir(keeping.path)
    if source is None or len(keeping.keepers) == 1:
        return
    newest = keeping.found[source]
    behind = rank in keeping.keepers and keeping.found.get(rank) != newest
    needy = [other for other, needs in enumerate(team.collectives.all_gather(behind)) if needs]
    if not needy:
        return
    sends, takes = rank == source, rank in needy
    store = CheckpointStore(run.checkpoints)
    building = store.folder / temporary_name("copy")

    def prepare() -> None:
        if not run.run_file.exists():
            create_folder(config, keeping.run_id)
        store.clean_temporary()
        with storing(building):
            building.mkdir(parents=True)

    def take() -> None:
        with storing(run.path):
            shutil.rmtree(run.attempts, ignore_errors=True)
            for name in history:
                (run.path / name).parent.mkdir(parents=True, exist_ok=True)
                (building / name).replace(run.path / name)
            for folder, pointers in checkpoints.items():
                store.adopt(building / folder, pointers)  # by the hashes in its manifest
            shutil.rmtree(building)
        store.set_aside_after(newest.step)

    content = team.collectives.broadcast(team.together(lambda: _to_send(run, newest.step), here=sends), source)
    history, checkpoints, files = content or ([], {}, [])
    team.together(prepare, here=takes)
    timeout = timedelta(seconds=config.distributed.timeout_s)
    group = dist.new_group(sorted({source, *needy}), backend="gloo", timeout=timeout)
    if sends or takes:
        for name in [*history, *files]:
            _share_file((run.path if sends else building) / name, source, group, sends=sends)
        dist.destroy_process_group(group)
    team.together(take, here=takes)


def _to_send(run: RunDir, newest: int) -> tuple[list[str], dict[str, list[Pointer]], list[str]]:
    """The history's files; the newest checkpoint and the best, with the pointers that mean them; their files."""
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
    folders = {store.path_of(step): pointers for step, pointers in steps.items()}
    history = [path for pattern in _HISTORY for path in run.path.glob(pattern)]
    files = [path for folder in folders for path in folder.iterdir()]
    names = {str(folder.relative_to(run.path)): pointers for folder, pointers in folders.items()}
    return _names(history, run), names, _names(files, run)


def _names(files: list[Path], run: RunDir) -> list[str]:
    return [str(path.relative_to(run.path)) for path in files]


def _share_file(path: Path, source: int, group: Any, *, sends: bool) -> None:
    """Send ``path``, or write what arrives to it, durably. Collective in ``group``: a rank that cannot ends all."""
    with storing(path):
        if not sends:
            path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb" if sends else "xb") as file:
            piece = [b"first"]
            while piece[0]:
                piece = [file.read(CHUNK_BYTES) if sends else b""]
                dist.broadcast_object_list(piece, src=source, group=group)
                if not sends:
                    file.write(piece[0])
            if not sends:
                file.flush()
                os.fsync(file.fileno())


def gather_logs(team: Team, keeping: Keeping) -> None:
    """Copy what other keepers' ranks wrote to rank 0's folder: ``nodes/<node>/…``. Collective."""
    if len(keeping.keepers) == 1:
        return
    files = team.collectives.gather(_own_files(RunDir(keeping.path), team.me) if keeping.keeper != 0 else {})

    def put() -> None:
        for rank, own in enumerate(files or []):
            for name, content in own.items():
                path = keeping.path / NODES / team.node_of(rank) / name
                with storing(path):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content)

    team.together(put, here=team.me.rank == 0)


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
