"""The agent of a node of ``lockstep train --nodes``: torch's elastic agent, in a process of Lockstep's launcher.

It meets the other nodes' agents, starts this node's ranks, and starts them again after a failure or when a node joins.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from lockstep.config import LaunchConfig, RunConfig
from lockstep.errors import ConfigError, LockstepError, RankFailed, RunError
from lockstep.hardware import parent_death
from lockstep.hardware.network import GLOO_INTERFACE, address_towards, is_this_machine
from lockstep.hardware.world import RANK_VARIABLES, SEVERAL_NODES
from lockstep.launch.failure import records
from lockstep.launch.failure.report import keep_failure, read_failure
from lockstep.launch.local import worker
from lockstep.launch.process import environment, signals
from lockstep.rundir.folder import RunDir, or_else, read_json, write_json
from lockstep.rundir.heartbeat import PULSES

#: The port of the rendezvous when --rdzv names none; torch's default.
DEFAULT_PORT = 29400
#: The interval of keep-alive messages, and how many may be missing before a node is left out of the next rendezvous.
KEEP_ALIVE_INTERVAL_S, KEEP_ALIVES = 2, 3
#: With fewer nodes than the maximum, how long a start waits for one more.
LAST_CALL_S = 3
#: How much longer than its time limits the agent may take.
AGENT_GRACE_S = 10.0
#: How long a node whose ranks missed others waits for the reason of those.
_REASON_S = 5.0
_POLL_S = 0.1
#: In the node's temporary folder: the run that its ranks have begun, and why they failed.
BEGUN, ERROR = "begun.json", "error.json"


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

    def refuse_unknown_host(self) -> None:
        """Raise :class:`ConfigError` where the host has no address."""
        try:
            is_this_machine(self.host)
        except OSError as error:
            raise ConfigError(
                f"--rdzv {self.address}: there is no host {self.host}",
                why=error.strerror or str(error),
                fix="give a name or address that every node can resolve",
            ) from error


@dataclass(frozen=True)
class Agent:
    """What the agent of a node runs: ``ranks`` ranks, whose temporary folder is ``folder``.

    ``rank_main``: what each runs, as ``module:function``. ``interface``: for gloo, if the user has named one.
    """

    nodes: Nodes
    ranks: int
    rank_main: str
    limits: LaunchConfig
    folder: Path
    interface: str | None = field(default_factory=lambda: os.environ.get(GLOO_INTERFACE))


def run_agent(rank: worker.Rank, agent: Agent) -> None:
    """Run the agent in this process, which Lockstep's launcher has started, until the ranks have ended.

    The agent's thread takes no signals, nor do the ranks before they handle them: a stop goes to the ranks alone, and
    the agent sees them end. Why they failed, or why the nodes did not meet, is written to the node's folder.
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
    # Torch waits for ever for another program that listens there.
    deadline = time.monotonic() + 2 * agent.nodes.join_timeout_s + AGENT_GRACE_S
    while thread.is_alive():
        thread.join(_POLL_S)
        if deadline < math.inf and psutil.Process().children():
            deadline = math.inf
        if thread.is_alive() and time.monotonic() > deadline:
            errors.append(_no_answer(agent.nodes))
            break
        if rank.stop.requested is not None and thread.is_alive():
            running = psutil.Process().children()
            if not running and not asked:
                raise signals.Stopped(signals.exit_code(rank.stop.requested))
            for process in running:
                if process.pid not in asked:
                    asked.add(process.pid)
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.send_signal(signal.SIGTERM)
    for error in errors:
        write_json(agent.folder / ERROR, error.as_dict())


def _run_ranks(agent: Agent, errors: list[LockstepError]) -> None:
    """Run torch's agent in this thread; what went wrong is added to ``errors``."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import (
        RendezvousConnectionError,
        RendezvousError,
        RendezvousTimeoutError,
    )
    from torch.distributed.launcher import api as elastic

    logging.disable(logging.CRITICAL)  # the report says it
    nodes, folder, limits = agent.nodes, RunDir(agent.folder), agent.limits
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
    launched = elastic.LaunchConfig(
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
    try:
        # -P: files in the working folder do not shadow a module.
        start = elastic.elastic_launch(launched, sys.executable)
        start("-P", "-m", worker.__name__, agent.rank_main, str(agent.folder))
        report = read_failure(run_of(folder))
        if report is not None and report.first is not None and report.first.is_usage_error:
            errors.append(report.as_error())
    except ChildFailedError as error:
        errors.append(_failure(folder, error.failures, f"the ranks of {socket.gethostname()} failed"))
    except RendezvousTimeoutError:
        errors.append(
            RankFailed(
                f"fewer than {nodes.least} nodes joined {nodes.address} within {nodes.join_timeout_s:g} s",
                why=first_line(run_of(folder)) or "the others have not started, or cannot reach it",
                fix="start the same command on the other nodes; raise launch.join_timeout_s if they start late",
            )
        )
    except RendezvousConnectionError:
        errors.append(_no_answer(nodes))
    except RendezvousError:
        errors.append(_failure(folder, {}, f"the job has ended: no node can join it any more at {nodes.address}"))
    except Exception as error:  # torch's: no caller would receive it
        errors.append(RunError(f"the agent of {socket.gethostname()} failed: {type(error).__name__}: {error}"))


def first_line(folder: RunDir) -> str:
    report = read_failure(folder)
    return report.what.splitlines()[0] if report else ""


def _failure(folder: RunDir, failures: Mapping[int, Any], otherwise: str) -> LockstepError:
    """Why the run has failed. The run's folder gets it, from which the other nodes read it as well.

    ``failures``: of this node's ranks by number, as torch's agent has seen their processes end.
    """
    run = run_of(folder)
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


def run_of(folder: RunDir) -> RunDir:
    """The run that the ranks of this node have begun; else the node's own folder."""
    begun = read_content(folder, BEGUN)
    return folder if begun is None else RunDir(Path(begun))


def _is_collateral(run: RunDir) -> bool:
    """Whether all ranks that have failed so far missed another one."""
    report = or_else(lambda: read_failure(run), None)
    return report is None or report.first is None or report.first.is_collateral


def _no_answer(nodes: Nodes) -> RankFailed:
    return RankFailed(
        f"no answer from {nodes.address} within {nodes.join_timeout_s:g} s",
        why="the node that --rdzv names runs no `lockstep train --nodes`, or cannot be reached",
        fix="start the same command there; check the name, the port and firewalls between the nodes",
    )


def read_content(folder: RunDir, name: str) -> Any:
    """The content of a JSON file of the node's temporary folder; ``None`` without one."""
    path = folder.path / name
    return read_json(path) if path.exists() else None
