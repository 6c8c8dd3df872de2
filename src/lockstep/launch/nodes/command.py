"""``lockstep train --nodes 2 --rdzv HOST:PORT``: one of several machines that train together.

The command runs on every node. Its launcher meets the others' at HOST:PORT (:mod:`lockstep.launch.nodes.agent`) and
starts this node's ranks, which agree on the run (:mod:`lockstep.launch.nodes.external`). Until then there is no run
folder, so launcher and ranks get a temporary one, the node's own.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.config import RunConfig
from lockstep.engine.result import RunResult
from lockstep.engine.task import Task
from lockstep.errors import ConfigError, LockstepError, RankFailed, RunError
from lockstep.hardware.world import World
from lockstep.launch.failure import records
from lockstep.launch.failure import report as failure
from lockstep.launch.local import start
from lockstep.launch.nodes.external import train_as_rank
from lockstep.launch.prepare import place
from lockstep.launch.run_claim import overrides_of
from lockstep.launch.task_transport import load_task, pack_task
from lockstep.launch.temporary import temporary_folder
from lockstep.telemetry.rundir import RunDir, new_run_id, read_json, write_json

#: Where nodes meet when --rdzv names no port; torch's default.
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
        """What ``launch.nodes`` and ``launch.rdzv`` say. Raises :class:`ConfigError`."""
        settings = config.launch
        least, _, most = (settings.nodes or "1").partition(":")
        if int(least) > int(most or least):
            raise ConfigError(
                f"--nodes {settings.nodes} cannot be", why="the first number is the least", fix="write 1:4, for example"
            )
        if settings.rdzv is None:
            raise ConfigError(
                "--nodes needs to know where the nodes meet",
                fix="add --rdzv HOST:PORT on every node: the name of one of them, and a port that is free there",
            )
        host, port = _split(settings.rdzv)
        return cls(int(least), int(most or least), host, port, settings.join_timeout_s)

    @classmethod
    def parse(cls, text: str) -> Nodes:
        """The inverse of :meth:`format`."""
        least, most, port, join_timeout_s, host = text.split(" ", 4)
        return cls(int(least), int(most), host, int(port), float(join_timeout_s))

    def format(self) -> str:
        """For the launcher's command line."""
        return f"{self.least} {self.most} {self.port} {self.join_timeout_s} {self.host}"

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
        raise ConfigError(f"--rdzv {text!r} is no address", fix="write HOST:PORT, for example node1:29400")
    return host, int(port)


def train_on_nodes(
    task: Task,
    config: RunConfig,
    *,
    resume: bool,
    given: RunConfig | Mapping[str, Any] | None,
    as_given: bool,
    accept_data: bool = False,
) -> RunResult:
    """Train on this node's devices, together with the other nodes on which this is called.

    Raises:
        UsageError: before anything starts, or when the nodes do not want the same. RunError: when the run fails.
        SystemExit: with code 130 or 143, when it was stopped before it could begin, or not waited for.
    """
    nodes = Nodes.of(config)
    ranks = len(place(config, World()).devices)
    if config.telemetry.progress != "silent":
        print(f"meeting {nodes}, with {ranks} rank(s) here; waiting up to {nodes.join_timeout_s:g} s", file=sys.stderr)
    with temporary_folder("lockstep-node-") as path:
        folder = RunDir.create(path / "node", config, run_id=new_run_id(), command=sys.argv)
        request = {"resume": resume, "accept_data": accept_data, "as_given": as_given}
        write_json(folder.path / _REQUEST, {**request, "given": overrides_of(given)})
        pack_task(folder, task, config)
        code = start.launch(
            folder,
            ranks,
            nodes=nodes.format(),
            stop_grace_s=config.launch.stop_grace_s,
            max_restarts=config.launch.max_restarts,
            hang_timeout_s=config.launch.hang_timeout_s,
        )
        result = _result(folder)
        if result is not None and (code == 0 or code > 128):
            return replace(result, exit_code=code)  # the ranks know only that they were told to stop, not by what
        raise _failure(folder, code)


def _failure(folder: RunDir, code: int) -> LockstepError | SystemExit:
    """What went wrong, written down in the run's folder, if there is one that this node keeps."""
    path = folder.path / _REFUSAL
    if path.exists():
        content = read_json(path)
        kind: type[LockstepError] = next(kind for kind in _REFUSALS if kind.code == content["code"])
        return kind(content["message"], why=content["why"], fix=content["fix"])
    report = failure.collect(folder)
    error = report.as_error() if report else RunError(f"the launcher of this node ended with exit code {code}")
    run, keeps = _begun(folder)
    with contextlib.suppress(LockstepError):  # the folder may be what failed
        if run is not None and keeps and run.read().status not in {"stopped", "completed"}:
            run.update(status="failed", error=str(error))
    return SystemExit(code) if report is None and code > 128 else error


def train_as_node_rank(folder: RunDir, world: World) -> int:
    """Body of a rank that the launcher of a node started; ``folder`` is the node's temporary one."""
    config = folder.config()
    request = read_json(folder.path / _REQUEST)
    task = load_task(folder, config)

    def begun(run: RunDir, keeps: bool) -> None:
        if keeps:
            run.update(command=folder.read().command)  # what people typed, not what started this process
        if world.local_rank == 0:
            write_json(folder.path / _BEGUN, {"run": run.path, "keeps": keeps})

    result = train_as_rank(
        task,
        config,
        world,
        resume=request["resume"],
        given=request["given"],
        as_given=request["as_given"],
        accept_data=request["accept_data"],
        begun=begun,
        restarts=records.restarts(folder),
    )
    if world.local_rank == 0:
        write_json(folder.path / _RESULT, {**asdict(result), "run_dir": str(result.run_dir)})
    return result.exit_code


def refuse(folder: RunDir, error: ConfigError | RankFailed) -> None:
    """In the launcher: there is nothing to run, as :func:`train_on_nodes` shall say. Raises :class:`StorageError`."""
    write_json(folder.path / _REFUSAL, error.as_dict())


def _begun(folder: RunDir) -> tuple[RunDir | None, bool]:
    """The run of the newest start of this node's ranks, and whether this node keeps its folder."""
    path = folder.path / _BEGUN
    if not path.exists():
        return None, False
    content = read_json(path)
    return RunDir(Path(content["run"])), bool(content["keeps"])


def bring_last_lines(folder: RunDir) -> None:
    """Put the last lines of this node's ranks, which they write to the run's folder, where a failure is looked for."""
    run, _ = _begun(folder)
    if run is None:
        return
    for log in folder.logs.glob("rank-*.log"):
        lines = records.last_lines(run.logs / log.name)
        with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)


def _result(folder: RunDir) -> RunResult | None:
    path = folder.path / _RESULT
    if not path.exists():
        return None
    content = read_json(path)
    return RunResult(**{**content, "run_dir": Path(content["run_dir"])})
