"""``lockstep train --nodes 2 --rdzv HOST:PORT``: one of several machines that train together, by torch's agents.

The command runs on every node. It starts one process, the agent (``torch.distributed.launcher``), which meets the
others at HOST:PORT, starts this node's ranks, and starts them again after a failure or when a node joins. Each rank
trains as under the user's own torchrun (:mod:`lockstep.launch.nodes.external`). Until the ranks have agreed on a run
there is no run folder, so that agent and ranks have a temporary one each.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from lockstep.config import RunConfig
from lockstep.engine.state import RunResult
from lockstep.engine.task import Task
from lockstep.errors import ConfigError, LockstepError, RankFailed, RunError, UsageError, many
from lockstep.hardware import parent_death
from lockstep.hardware.network import GLOO_INTERFACE, address_towards, is_this_machine
from lockstep.hardware.world import RANK_VARIABLES, SEVERAL_NODES, World
from lockstep.launch.failure import records
from lockstep.launch.failure.report import keep_failure, read_failure
from lockstep.launch.local import worker
from lockstep.launch.local.on_ranks import RanksStopped, run_on_ranks
from lockstep.launch.local.worker import Rank
from lockstep.launch.nodes.external import train_as_rank
from lockstep.launch.nodes.preparation import Begun, Request, Start
from lockstep.launch.prepare import place
from lockstep.launch.process import environment, signals
from lockstep.rundir.folder import RunDir, new_run_id, or_else, read_json, write_json
from lockstep.rundir.heartbeat import PULSES
from lockstep.tasks.registry import load_task, pack_task

#: The port of the rendezvous when --rdzv names none; torch's default.
DEFAULT_PORT = 29400
#: An agent that sends no keep-alive for so many times the interval in seconds is left out of the next rendezvous.
KEEP_ALIVE_INTERVAL_S, KEEP_ALIVES = 2, 3
#: With fewer nodes than the maximum, how long a start waits for one more.
LAST_CALL_S = 3
#: How long a rank that another one has stopped stays, so that its agent sees whether a node waits to join.
MAKE_ROOM_S = 3.0
#: How much longer than its ranks the agent may take to end after a stop.
_AGENT_GRACE_S = 10.0
#: How long a node whose ranks missed others waits for the reason of those.
_REASON_S = 5.0
_POLL_S = 0.1
_REQUEST, _BEGUN, _RESULT = "request.json", "begun.json", "result.json"


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


def train_on_nodes(task: Task, config: RunConfig, request: Request) -> RunResult:
    """Train on this node's devices, together with the other nodes on which this is called.

    Raises:
        UsageError: before anything starts, or when the nodes' settings differ. RunError: when the run fails.
        SystemExit: with code 130 or 143, when it was stopped before it could begin, or not waited for.
    """
    nodes = Nodes.of(config)
    ranks = len(place(config, World()).devices)
    _refuse_unknown_host(nodes)
    if config.telemetry.progress != "silent":
        waits = f"waiting up to {nodes.join_timeout_s:g} s"
        print(f"meeting {nodes}, with {many(ranks, 'rank')} here; {waits}", file=sys.stderr)
    grace_s = config.launch.stop_grace_s + _AGENT_GRACE_S
    limits = config.launch.model_copy(update={"max_restarts": 0, "stop_grace_s": grace_s})
    code = 0
    with TemporaryDirectory(prefix="lockstep-node-") as path:
        folder, agent_folder = (
            RunDir.create(Path(path, name), config, run_id=new_run_id(), command=sys.argv) for name in ("node", "agent")
        )
        write_json(folder.path / _REQUEST, asdict(request))
        pack_task(folder, task, config)
        agent = Agent(nodes, ranks, config, folder.path, os.environ.get(GLOO_INTERFACE))
        try:
            run_on_ranks(run_agent, agent, folder=agent_folder, ranks=1, settings=limits, redirect=False)
        except RanksStopped as stopped:
            code = stopped.exit_code
        result = _read(folder, _RESULT)
        if result is None:
            raise SystemExit(code)
        # The ranks know only that they were to stop, not by which signal.
        return RunResult(**{**result, "run_dir": Path(result["run_dir"]), "exit_code": code or result["exit_code"]})


def _refuse_unknown_host(nodes: Nodes) -> None:
    try:
        is_this_machine(nodes.host)
    except OSError as error:
        raise ConfigError(
            f"--rdzv {nodes.address}: there is no host {nodes.host}",
            why=error.strerror or str(error),
            fix="give a name or address that every node can resolve",
        ) from error


@dataclass(frozen=True)
class Agent:
    """What the agent of a node runs: ``ranks`` ranks, whose temporary folder is ``folder``.

    ``interface``: the network interface for gloo that the user has named.
    """

    nodes: Nodes
    ranks: int
    config: RunConfig
    folder: Path
    interface: str | None


def run_agent(rank: Rank, agent: Agent) -> None:
    """Run the agent in this process, which Lockstep's launcher has started, until the ranks have ended.

    The agent's thread takes no signals, nor do the ranks before they handle them: a stop goes to the ranks alone, and
    the agent sees them end. Raises :class:`LockstepError`: why they failed, or why the nodes did not meet.
    """
    for name in (*RANK_VARIABLES, PULSES, GLOO_INTERFACE):
        os.environ.pop(name, None)
    os.environ |= {environment.LAUNCHER: SEVERAL_NODES, environment.LAUNCHER_PID: str(os.getpid())}
    os.environ |= {} if agent.interface is None else {GLOO_INTERFACE: agent.interface}
    # The ranks' store must not be the agents', or the survivors of a lost node wait at its old address.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    parent_death.make_lifeline()
    errors: list[LockstepError] = []
    thread = threading.Thread(target=_run_ranks, args=(agent, errors), name="lockstep-agent", daemon=True)
    with signals.held_back():
        thread.start()
    asked: set[int] = set()
    while thread.is_alive():
        thread.join(_POLL_S)
        if rank.stop.requested is not None and thread.is_alive():
            running = psutil.Process().children()
            if not running and not asked:
                raise signals.Stopped(signals.exit_code(rank.stop.requested))
            for process in running:
                if process.pid not in asked:
                    asked.add(process.pid)
                    process.send_signal(signal.SIGTERM)
    if errors:
        raise errors[0]


def _run_ranks(agent: Agent, errors: list[LockstepError]) -> None:
    """Run torch's agent in this thread; what went wrong is added to ``errors``."""
    import logging

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import (
        RendezvousConnectionError,
        RendezvousError,
        RendezvousTimeoutError,
    )
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # the report says it
    nodes, folder, limits = agent.nodes, RunDir(agent.folder), agent.config.launch
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(max(1, round(limits.stop_grace_s)))
    join_timeout_s = max(1, round(nodes.join_timeout_s))
    rendezvous: dict[str, Any] = {
        "join_timeout": join_timeout_s,
        "read_timeout": join_timeout_s,
        "last_call_timeout": LAST_CALL_S,
        "keep_alive_interval": KEEP_ALIVE_INTERVAL_S,
        "keep_alive_max_attempt": KEEP_ALIVES,
    }
    if not is_this_machine(nodes.host):
        rendezvous["is_host"] = False
    launched = LaunchConfig(
        min_nodes=nodes.least,
        max_nodes=nodes.most,
        nproc_per_node=agent.ranks,
        run_id="lockstep",
        rdzv_backend="c10d",
        # torch takes no other name for one of this machine; of several agents here, the first one serves the store.
        rdzv_endpoint=f"localhost:{nodes.port}" if is_this_machine(nodes.host) else nodes.address,
        rdzv_configs=rendezvous,
        max_restarts=limits.max_restarts,
        local_addr=address_towards(nodes.host),
        logs_specs=DefaultLogsSpecs(log_dir=str(agent.folder / "agent")),
    )
    main = f"{__name__}:{train_as_node_rank.__name__}"
    try:
        # -P: files in the working folder do not shadow a module.
        elastic_launch(launched, sys.executable)("-P", "-m", worker.__name__, main, str(agent.folder))
        report = read_failure(_run_of(folder))
        if report is not None and report.first is not None and report.first.is_usage_error:
            errors.append(report.as_error())
    except ChildFailedError as error:
        errors.append(_failure(folder, error.failures, f"the ranks of {socket.gethostname()} failed"))
    except RendezvousTimeoutError:
        errors.append(
            RankFailed(
                f"fewer than {nodes.least} nodes joined {nodes.address} within {nodes.join_timeout_s:g} s",
                why=_first_line(_run_of(folder)) or "the others have not started, or cannot reach it",
                fix="start the same command on the other nodes; raise launch.join_timeout_s if they start late",
            )
        )
    except RendezvousConnectionError:
        errors.append(
            RankFailed(
                f"no answer from {nodes.address} within {nodes.join_timeout_s:g} s",
                why="the node that --rdzv names runs no `lockstep train --nodes`, or cannot be reached",
                fix="start the same command there; check the name, the port and firewalls between the nodes",
            )
        )
    except RendezvousError:
        errors.append(_failure(folder, {}, f"the job has ended: no node can join it any more at {nodes.address}"))
    except Exception as error:  # torch's own: a thread has nobody else to tell
        errors.append(RunError(f"the agent of {socket.gethostname()} failed: {type(error).__name__}: {error}"))


def _first_line(folder: RunDir) -> str:
    report = read_failure(folder)
    return report.what.splitlines()[0] if report else ""


def _failure(folder: RunDir, failures: Mapping[int, Any], otherwise: str) -> LockstepError:
    """Why the run has failed. The run's folder gets it, from which the other nodes read it as well.

    ``failures``: of this node's ranks by number, as torch's agent has seen their processes end.
    """
    run = _run_of(folder)
    recorded = records.read_errors(run.logs)
    with contextlib.suppress(LockstepError):  # the folder may be what failed
        for rank, end in failures.items():
            if rank not in recorded:  # it was killed
                process = {"host": socket.gethostname(), "pid": end.pid, "time": float(end.timestamp)}
                killed = records.RankError(rank=rank, exit_code=end.exitcode, **process)
                records.write(records.error_file(run.logs, rank), killed.model_dump())
    deadline = time.monotonic() + _REASON_S
    while _is_collateral(run) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    report = keep_failure(run, otherwise)
    return report.as_error() if report else RunError(otherwise)


def _run_of(folder: RunDir) -> RunDir:
    """The run that the ranks of this node have begun; else the node's own folder."""
    begun = _read(folder, _BEGUN)
    return folder if begun is None else RunDir(Path(begun))


def _is_collateral(run: RunDir) -> bool:
    """Whether all ranks that have failed so far missed another one."""
    report = or_else(lambda: read_failure(run), None)
    return report is None or report.first is None or report.first.is_collateral


def train_as_node_rank(rank: Rank) -> int:
    """Train as a rank of the agent; its folder is the node's temporary one. The exit code is for the agent.

    That is 0 where another start would end the same: also after a stop and for wrong usage.
    """
    folder, config, world, runs = rank.folder, rank.folder.config(), rank.world, [_run_of(rank.folder)]
    request = Request(**read_json(folder.path / _REQUEST))
    if runs[0] is not folder:
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        request = replace(request, begun=Begun(str(runs[0].path), restarts, _first_line(runs[0])))

    def note(start: Start) -> None:
        runs.append(start.run)
        if world.is_main:
            start.run.update(command=folder.read().command)  # what the user typed, not what started this process
            records.clear(start.run.logs)
            records.write(start.run.logs / records.LAUNCHER_FILE, {"ranks": world.size})
        if world.local_rank == 0:
            write_json(folder.path / _BEGUN, str(start.run.path))

    try:
        result = train_as_rank(load_task(folder, config), config, world, request, rank, note)
    except (Exception, SystemExit) as error:
        records.record(runs[-1].logs, world.rank, error)
        if isinstance(error, UsageError):
            return 0
        raise
    if world.local_rank == 0:
        write_json(folder.path / _RESULT, {**asdict(result), "run_dir": str(result.run_dir)})
    if result.exit_code in signals.STOPPED and rank.stop.requested is None:
        time.sleep(MAKE_ROOM_S)
    return 0 if result.exit_code in signals.STOPPED else result.exit_code


def _read(folder: RunDir, name: str) -> Any:
    path = folder.path / name
    return read_json(path) if path.exists() else None
