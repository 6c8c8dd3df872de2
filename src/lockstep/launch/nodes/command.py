"""``lockstep train --nodes 2 --rdzv HOST:PORT``: one of several machines that train together.

The command runs on every node. Its launcher meets the others' at HOST:PORT (:mod:`lockstep.launch.nodes.agent`) and
starts this node's ranks, which agree on the run (:mod:`lockstep.launch.nodes.external`). Until then there is no run
folder, so launcher and ranks get a temporary one, the node's own.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lockstep.config import RunConfig
from lockstep.engine.state import RunResult
from lockstep.engine.task import Task
from lockstep.errors import ConfigError, LockstepError, RankFailed, RunError, many
from lockstep.hardware.world import World
from lockstep.launch.failure import records
from lockstep.launch.failure.report import read_failure
from lockstep.launch.local.fork_server import launch
from lockstep.launch.local.worker import Rank
from lockstep.launch.nodes.external import train_as_rank
from lockstep.launch.nodes.preparation import Request, Start
from lockstep.launch.prepare import place
from lockstep.tasks.registry import load_task, pack_task
from lockstep.telemetry.rundir import RunDir, new_run_id, read_json, write_json

#: The port of the rendezvous when --rdzv names none; torch's default.
DEFAULT_PORT = 29400
_REQUEST, _BEGUN, _RESULT, _REFUSAL = "request.json", "begun.json", "result.json", "refusal.json"
_REFUSALS = (ConfigError, RankFailed)


@dataclass(frozen=True)
class Nodes:
    """How many nodes train together, and where they meet."""

    least: int
    most: int
    host: str
    port: int
    join_timeout_s: float

    @classmethod
    def of(cls, config: RunConfig) -> Nodes:
        """The values of ``launch.nodes`` and ``launch.rdzv``. Raises :class:`ConfigError`."""
        settings = config.launch
        least, _, most = (settings.nodes or "1").partition(":")
        if int(least) > int(most or least):
            raise ConfigError(
                f"invalid --nodes {settings.nodes}: the minimum is larger than the maximum",
                fix="write 1:4, for example",
            )
        if settings.rdzv is None:
            raise ConfigError(
                "--nodes needs the address of the rendezvous",
                fix="add --rdzv HOST:PORT on every node: the name of one of them, and a port that is free there",
            )
        host, port = _split(settings.rdzv)
        return cls(int(least), int(most or least), host, port, settings.join_timeout_s)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def __str__(self) -> str:
        many = f"{self.least}" if self.least == self.most else f"{self.least} to {self.most}"
        return f"{many} nodes at {self.address}"


def _split(text: str) -> tuple[str, int]:
    """``host``, ``host:port`` or ``[address]:port``."""
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):
        host, port = text, str(DEFAULT_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"invalid --rdzv {text!r}: not an address", fix="write HOST:PORT, for example node1:29400")
    return host, int(port)


def train_on_nodes(task: Task, config: RunConfig, request: Request) -> RunResult:
    """Train on this node's devices, together with the other nodes on which this is called.

    Raises:
        UsageError: before anything starts, or when the nodes' settings differ. RunError: when the run fails.
        SystemExit: with code 130 or 143, when it was stopped before it could begin, or not waited for.
    """
    nodes = Nodes.of(config)
    ranks = len(place(config, World()).devices)
    if config.telemetry.progress != "silent":
        print(
            f"meeting {nodes}, with {many(ranks, 'rank')} here; waiting up to {nodes.join_timeout_s:g} s",
            file=sys.stderr,
        )
    with TemporaryDirectory(prefix="lockstep-node-") as path:
        folder = RunDir.create(Path(path, "node"), config, run_id=new_run_id(), command=sys.argv)
        write_json(folder.path / _REQUEST, asdict(request))
        pack_task(folder, task, config)
        code = launch(
            folder,
            ranks,
            rank_main=f"{__name__}:{train_as_node_rank.__name__}",
            settings=config.launch,
            nodes=asdict(nodes),
        )
        result = _result(folder)
        if result is not None and (code == 0 or code > 128):
            return replace(result, exit_code=code)  # the ranks know only that they were to stop, not by which signal
        raise _failure(folder, code)


def _failure(folder: RunDir, code: int) -> LockstepError | SystemExit:
    """What went wrong, written down in the run's folder, if there is one that this node keeps."""
    content = _read(folder, _REFUSAL)
    if content is not None:
        kind: type[LockstepError] = next(kind for kind in _REFUSALS if kind.code == content["code"])
        return kind(content["message"], why=content["why"], fix=content["fix"])
    report = read_failure(folder)
    error = report.as_error() if report else RunError(f"the launcher of this node ended with exit code {code}")
    run, keeps = _begun(folder)
    with contextlib.suppress(LockstepError):  # the folder may be what failed
        if run is not None and keeps and run.read().status not in {"stopped", "completed"}:
            run.update(status="failed", error=str(error))
    return SystemExit(code) if report is None and code > 128 else error


def train_as_node_rank(rank: Rank) -> int:
    """Train as a rank that the launcher of a node started; its folder is the node's temporary one."""
    folder, world = rank.folder, rank.world
    config = folder.config()

    def begun(start: Start) -> None:
        if start.keeps:
            start.run.update(command=folder.read().command)  # what the user typed, not what started this process
        if world.local_rank == 0:
            write_json(folder.path / _BEGUN, {"run": start.run.path, "keeps": start.keeps})

    result = train_as_rank(
        load_task(folder, config),
        config,
        world,
        Request(**read_json(folder.path / _REQUEST)),
        begun=begun,
        restarts=records.read_launcher(folder).restarts,
        stop=rank.stop,
    )
    if world.local_rank == 0:
        write_json(folder.path / _RESULT, {**asdict(result), "run_dir": str(result.run_dir)})
    return result.exit_code


def refuse(folder: RunDir, error: ConfigError | RankFailed) -> None:
    """In the launcher: record why there is nothing to run, for :func:`train_on_nodes`. Raises :class:`StorageError`."""
    write_json(folder.path / _REFUSAL, error.as_dict())


def _begun(folder: RunDir) -> tuple[RunDir | None, bool]:
    """The run of the newest start of this node's ranks, and whether this node keeps its folder."""
    content = _read(folder, _BEGUN)
    return (None, False) if content is None else (RunDir(Path(content["run"])), bool(content["keeps"]))


def bring_last_lines(folder: RunDir) -> None:
    """Copy the last lines of this node's ranks from the run's folder to where the failure report reads them."""
    run, _ = _begun(folder)
    if run is None:
        return
    for log in folder.logs.glob("rank-*.log"):
        lines = records.last_lines(run.logs / log.name)
        with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)


def _result(folder: RunDir) -> RunResult | None:
    content = _read(folder, _RESULT)
    return None if content is None else RunResult(**{**content, "run_dir": Path(content["run_dir"])})


def _read(folder: RunDir, name: str) -> Any:
    path = folder.path / name
    return read_json(path) if path.exists() else None
