"""``lockstep train --nodes 2 --rdzv HOST:PORT``: one of several machines that train together.

The command runs on every node. Its launcher meets the others' at HOST:PORT (:mod:`lockstep.launch.nodes.agent`) and
starts this node's ranks, which agree on the run (:mod:`lockstep.launch.nodes.external`). Until then there is no run
folder, so launcher and ranks get a temporary one, the node's own.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lockstep.config import RunConfig
from lockstep.engine.state import RunResult
from lockstep.engine.task import Task
from lockstep.errors import ConfigError, LockstepError, RankFailed, RunError, many
from lockstep.hardware.world import World
from lockstep.launch.failure.report import error_of, read_failure
from lockstep.launch.local.on_ranks import launch
from lockstep.launch.local.worker import Rank
from lockstep.launch.nodes.external import train_as_rank
from lockstep.launch.nodes.preparation import Start, TrainRequest
from lockstep.launch.prepare import place
from lockstep.launch.process.rank_log import last_lines
from lockstep.rundir.folder import RunDir, new_run_id, read_json, write_json
from lockstep.tasks.registry import load_task, pack_task

#: The port of the rendezvous when --rdzv names none; torch's default.
DEFAULT_PORT = 29400
_REQUEST, _BEGUN, _RESULT, _REFUSAL = "request.json", "begun.json", "result.json", "refusal.json"


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
        host, colon, port = settings.rdzv.rpartition(":")
        if not colon or (":" in host and not host.startswith("[")):  # host, host:port or [address]:port
            host, port = settings.rdzv, str(DEFAULT_PORT)
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            fix = "write HOST:PORT, for example node1:29400"
            raise ConfigError(f"invalid --rdzv {settings.rdzv!r}: not an address", fix=fix)
        return cls(int(least), int(most or least), host, int(port), settings.join_timeout_s)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def __str__(self) -> str:
        number = f"{self.least}" if self.least == self.most else f"{self.least} to {self.most}"
        return f"{number} nodes at {self.address}"


def train_on_nodes(task: Task, config: RunConfig, request: TrainRequest) -> RunResult:
    """Train on this node's devices, together with the other nodes on which this is called.

    Raises:
        UsageError: before anything starts, or when the nodes' settings differ. RunError: when the run fails.
        SystemExit: with code 130 or 143, when it was stopped before it could begin, or not waited for.
    """
    nodes = Nodes.of(config)
    ranks = len(place(config, World()).devices)
    if config.telemetry.progress != "silent":
        waits = f"waiting up to {nodes.join_timeout_s:g} s"
        print(f"meeting {nodes}, with {many(ranks, 'rank')} here; {waits}", file=sys.stderr)
    with TemporaryDirectory(prefix="lockstep-node-") as path:
        folder = RunDir.create(Path(path, "node"), config, run_id=new_run_id(), command=sys.argv)
        write_json(folder.path / _REQUEST, asdict(request))
        pack_task(folder, task, config)
        main = f"{__name__}:{train_as_node_rank.__name__}"
        code = launch(folder, ranks, rank_main=main, settings=config.launch, nodes=asdict(nodes))
        result = _read(folder, _RESULT)
        if result is not None and (code == 0 or code > 128):
            # The ranks know only that they were to stop, not by which signal.
            return RunResult(**{**result, "run_dir": Path(result["run_dir"]), "exit_code": code})
        raise _failure(folder, code)


def _failure(folder: RunDir, code: int) -> LockstepError | SystemExit:
    """What went wrong, written down in the run's folder, if there is one that this node keeps."""
    refusal = _read(folder, _REFUSAL)
    if refusal is not None:
        return error_of(refusal)
    report, begun = read_failure(folder), _read(folder, _BEGUN)
    error = report.as_error() if report else RunError(f"the launcher of this node ended with exit code {code}")
    with contextlib.suppress(LockstepError):  # the folder may be what failed
        if begun is not None and begun["keeps"]:
            run = RunDir(Path(begun["run"]))
            if run.read().status not in {"stopped", "completed"}:
                run.update(status="failed", error=str(error))
    return SystemExit(code) if report is None and code > 128 else error


def train_as_node_rank(rank: Rank) -> int:
    """Train as a rank that the launcher of a node started; its folder is the node's temporary one."""
    folder, config = rank.folder, rank.folder.config()

    def begun(start: Start) -> None:
        if start.keeps:
            start.run.update(command=folder.read().command)  # what the user typed, not what started this process
        if rank.world.local_rank == 0:
            write_json(folder.path / _BEGUN, {"run": start.run.path, "keeps": start.keeps})

    last = _read(folder, _BEGUN)
    request = TrainRequest(**{**read_json(folder.path / _REQUEST), "begun": last and last["run"]})
    result = train_as_rank(load_task(folder, config), config, rank.world, request, rank, begun)
    if rank.world.local_rank == 0:
        write_json(folder.path / _RESULT, {**asdict(result), "run_dir": str(result.run_dir)})
    return result.exit_code


def refuse(folder: RunDir, error: ConfigError | RankFailed) -> None:
    """In the launcher: record why there is nothing to run, for :func:`train_on_nodes`. Raises :class:`StorageError`."""
    write_json(folder.path / _REFUSAL, error.as_dict())


def bring_last_lines(folder: RunDir) -> None:
    """Copy the last lines of this node's ranks from the run's folder to where the failure report reads them."""
    begun = _read(folder, _BEGUN)
    for log in folder.logs.glob("rank-*.log") if begun is not None else ():
        lines = last_lines(RunDir(Path(begun["run"])).logs / log.name)
        with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)


def _read(folder: RunDir, name: str) -> Any:
    path = folder.path / name
    return read_json(path) if path.exists() else None
