"""Which run the ranks of several nodes train, and which ranks write its folder.

Nodes that share a file system share one run folder, which rank 0 writes. On every other node (or group of
nodes that share one) the first rank is a *keeper*, too: it writes a separate run folder with the same
checkpoints and curves, so that the run can be resumed from any of them.
"""

from __future__ import annotations

import contextlib
import uuid
from dataclasses import dataclass
from pathlib import Path

from lockstep.checkpoint.store import CheckpointStore
from lockstep.config import RunConfig
from lockstep.errors import ConfigError, RunFolderError
from lockstep.launch.nodes.membership import Team
from lockstep.launch.run_claim import existing_run, warn
from lockstep.telemetry.files import absolute, storing
from lockstep.telemetry.rundir import RunDir, new_run_id, read_json, write_json

#: In a run folder: the start of several nodes that it belongs to, their restarts included.
JOB_FILE = "job.json"


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
        run_id: the run's.
        path: its folder, as this rank sees it.
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


def agree(team: Team, config: RunConfig, *, resume: bool, job: str | None) -> Keeping:
    """Find the run to resume, or name a new one. Collective.

    Args:
        resume: resume the unfinished run in ``save_dir``, if a node has one.
        job: names this start of several nodes, restarts included; a run of it is resumed in any case.

    Raises:
        UsageError: the folders hold different runs, one that is still running, or cannot be written.
    """
    found = team.together(lambda: look(config, resume=resume, job=job), here=team.is_lead)
    everywhere = team.collectives.all_gather(found)
    known = {rank: one for rank, one in enumerate(everywhere) if one is not None}
    run_id = _one_run(team, known) or team.collectives.broadcast(job or new_run_id(config.save_dir))
    path = absolute(config.save_dir or config.runs_dir / run_id)
    keeper = lowest_sharing(team, path)
    keepers = tuple(sorted(set(team.collectives.all_gather(keeper))))
    return Keeping(run_id, path, keepers, keeper, {rank: one for rank, one in known.items() if rank in keepers})


def look(config: RunConfig, *, resume: bool, job: str | None) -> Found | None:
    """The run that this node could resume."""
    path = config.save_dir or (config.runs_dir / job if job else None)
    if path is not None and job is not None and job_of(path) == job:
        run: RunDir | None = RunDir.open(path)  # the start before this one, whose processes have ended
    else:
        run = existing_run(config, resume)
    if run is None:
        return None
    record = run.read()
    step = CheckpointStore(run.checkpoints).newest_verified(warn)
    return Found(record.id, record.attempt, -1 if step is None else step)


def job_of(path: Path) -> str | None:
    """The job that the run folder ``path`` was last written by."""
    with contextlib.suppress(RunFolderError):
        content = read_json(path / JOB_FILE)
        if isinstance(content, dict):
            return str(content.get("job"))
    return None


def mark_job(run: RunDir, job: str | None) -> None:
    """Let :func:`job_of` answer ``job``."""
    if job is not None:
        write_json(run.path / JOB_FILE, {"job": job})


def _one_run(team: Team, known: dict[int, Found]) -> str | None:
    ids = {found.run_id: team.node_of(rank) for rank, found in reversed(known.items())}
    if len(ids) > 1:
        error = ConfigError(
            f"the nodes have different runs: {', '.join(f'{run} on {node}' for run, node in ids.items())}",
            why="the ranks can resume only one",
            fix="name another --save-dir, or move the folder away on the nodes that shall get the run from the others",
        )
        team.end_if([error])
    return next(iter(ids), None)


def lowest_sharing(team: Team, path: Path) -> int:
    """The lowest of the nodes' first ranks that has the same ``path`` as this rank's node. Collective.

    Each of them leaves a file beside ``path``, and looks whose files it finds there. The name is a new one,
    so that no network file system remembers that there is no such file.
    """
    if len(team.leads) == 1:
        return team.leads[0]
    token = team.collectives.broadcast(uuid.uuid4().hex)
    seen = None
    try:
        team.together(lambda: _touch(_probe(path, token, team.me.rank)), here=team.is_lead)
        if team.is_lead:
            seen = next(rank for rank in team.leads if _probe(path, token, rank).exists())
        keepers = team.collectives.all_gather(seen)
    finally:
        if team.is_lead:
            with contextlib.suppress(OSError):
                _probe(path, token, team.me.rank).unlink()
    keeper = keepers[next(lead for lead in team.leads if team.members[lead].node_rank == team.me.node_rank)]
    assert keeper is not None, "the first rank of a node sees its own file"
    return keeper


def _probe(path: Path, token: str, rank: int) -> Path:
    return path.with_name(f".{path.name}.{token}.{rank}")


def _touch(probe: Path) -> None:
    with storing(probe):
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
