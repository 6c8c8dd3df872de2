"""Engine ``torchrun``: torch's elastic agents (``torch.distributed.run``), which meet at ``--rdzv HOST:PORT``.

The command runs on every node. It starts one process, the agent, which meets the others, starts this node's ranks, and
starts them again after a failure or when a node joins. The ranks end with their agent.
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
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from lockstep.errors import ConfigError, LockstepError, RankFailed, many
from lockstep.hardware import parent_death
from lockstep.hardware.network import GLOO_INTERFACE, address_towards, is_this_machine
from lockstep.hardware.world import RANK_VARIABLES, SEVERAL_NODES
from lockstep.launch.engines.node_folder import begun_run, failure_reason
from lockstep.launch.engines.spec import AttachedEngine, EngineSpec, Job
from lockstep.launch.failure import records
from lockstep.launch.failure.report import keep_failure, read_failure
from lockstep.launch.local.on_ranks import RankLimits, RanksStopped, run_on_ranks
from lockstep.launch.local.worker import Rank
from lockstep.launch.process import environment, signals
from lockstep.rundir.folder import RunDir, or_else

#: The port of the rendezvous when --rdzv names none; torch's default.
DEFAULT_PORT = 29400
#: The interval of keep-alive messages, and how many may be missing before a node is left out of the next rendezvous.
KEEP_ALIVE_INTERVAL_S = 2
KEEP_ALIVES = 3
#: With fewer nodes than the maximum, how long a start waits for one more.
LAST_CALL_S = 3
#: How much longer than its time limits the agent may take.
AGENT_GRACE_S = 10.0
#: How long a node whose ranks missed others waits for the reason of those.
_REASON_S = 5.0
_POLL_S = 0.1


@dataclass(frozen=True)
class Rendezvous:
    """The address where the agents meet, and how long each waits there for the others."""

    host: str
    port: int
    join_timeout_s: float

    @classmethod
    def of(cls, job: Job) -> Rendezvous:
        """Parse ``launch.rdzv`` and ``launch.join_timeout_s``. Raises :class:`ConfigError`."""
        rdzv = job.options["rdzv"]
        if rdzv is None:
            raise ConfigError(
                "--nodes needs the address of the rendezvous",
                fix="add --rdzv HOST:PORT on every node: the name of one of them, and a port that is free there",
            )
        host, colon, port = rdzv.rpartition(":")
        if not colon or (":" in host and not host.startswith("[")):  # host, host:port or [address]:port
            host = rdzv
            port = str(DEFAULT_PORT)
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(
                f"invalid --rdzv {rdzv!r}: not an address", fix="write HOST:PORT, for example node1:29400"
            )
        return cls(host, int(port), job.options["join_timeout_s"])

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

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


class Torchrun(AttachedEngine):
    """torch's elastic agents, one on each node; each is a process of this node's command."""

    def check(self, job: Job) -> None:
        """Refuse an address where no agents can meet."""
        Rendezvous.of(job).refuse_unknown_host()

    def submit(self, job: Job) -> int:
        """Train this node's share of the run; the exit code.

        Raises:
            LockstepError: the nodes did not meet, or the run has failed.
        """
        rendezvous = Rendezvous.of(job)
        if job.options["describe"]:
            number = f"{job.nodes.minimum}" + f" to {job.nodes.maximum}" * job.nodes.is_elastic
            waits = f"waiting up to {rendezvous.join_timeout_s:g} s"
            ranks = many(job.ranks_per_node, "rank")
            print(f"meeting {number} nodes at {rendezvous.address}, with {ranks} here; {waits}", file=sys.stderr)
        limits = RankLimits(stop_grace_s=job.grace_s + AGENT_GRACE_S)
        with TemporaryDirectory(prefix="lockstep-agent-") as path:
            folder = RunDir(Path(path))
            interface = os.environ.get(GLOO_INTERFACE)
            try:
                run_on_ranks(
                    run_agent, job, rendezvous, interface, folder=folder, ranks=1, limits=limits, redirect=False
                )
            except RanksStopped as stopped:
                report = read_failure(folder)
                if report is not None:  # the agent had to be killed
                    raise report.as_error() from None
                return stopped.exit_code
        return 0


def run_agent(rank: Rank, job: Job, rendezvous: Rendezvous, interface: str | None) -> None:
    """Run the agent in this process, which Lockstep's launcher has started, until the ranks have ended.

    The agent's thread takes no signals, nor do the ranks before they handle them: a stop goes to the ranks alone, and
    the agent sees them end. ``interface``: for gloo, if the user has named one.

    Raises:
        LockstepError: why the ranks failed, or why the nodes did not meet.
    """
    for name in (*RANK_VARIABLES, GLOO_INTERFACE):
        os.environ.pop(name, None)
    os.environ |= {environment.LAUNCHER: SEVERAL_NODES, environment.LAUNCHER_PID: str(os.getpid())}
    os.environ |= {} if interface is None else {GLOO_INTERFACE: interface}
    os.environ |= job.environment
    # The ranks' store must not be the agents', or the survivors of a lost node wait at its old address.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    parent_death.make_lifeline()
    errors: list[LockstepError] = []
    thread = threading.Thread(target=_run_ranks, args=(job, rendezvous, errors), name="lockstep-agent", daemon=True)
    with signals.held_back():
        thread.start()
    signalled: set[int] = set()
    # Torch waits for ever for another program that listens there.
    deadline = time.monotonic() + 2 * rendezvous.join_timeout_s + AGENT_GRACE_S
    while thread.is_alive():
        thread.join(_POLL_S)
        if deadline < math.inf and psutil.Process().children():
            deadline = math.inf
        if thread.is_alive() and time.monotonic() > deadline:
            errors.append(_no_answer(rendezvous))
            break
        if rank.stop.requested is not None and thread.is_alive():
            running = psutil.Process().children()
            if not running and not signalled:
                raise signals.Stopped(signals.exit_code(rank.stop.requested))
            for process in running:
                if process.pid not in signalled:
                    signalled.add(process.pid)
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.send_signal(signal.SIGTERM)
    if errors:
        raise errors[0]


def _run_ranks(job: Job, meeting: Rendezvous, errors: list[LockstepError]) -> None:
    """Run torch's agent in this thread; its failure is added to ``errors``."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import (
        RendezvousConnectionError,
        RendezvousError,
        RendezvousTimeoutError,
    )
    from torch.distributed.launcher import api as elastic

    logging.disable(logging.CRITICAL)  # the report says it
    folder = RunDir(job.run_folder)
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(max(1, round(job.grace_s)))
    join_timeout_s = max(1, round(meeting.join_timeout_s))
    configs: dict[str, Any] = {
        "join_timeout": join_timeout_s,
        "read_timeout": join_timeout_s,
        "last_call_timeout": LAST_CALL_S,
        "keep_alive_interval": KEEP_ALIVE_INTERVAL_S,
        "keep_alive_max_attempt": KEEP_ALIVES,
    }
    if not is_this_machine(meeting.host):
        configs["is_host"] = False
    launched = elastic.LaunchConfig(
        min_nodes=job.nodes.minimum,
        max_nodes=job.nodes.maximum,
        nproc_per_node=job.ranks_per_node,
        run_id="lockstep",
        rdzv_backend="c10d",
        # torch takes no other name for one of this machine; of several agents here, the first one serves the store.
        rdzv_endpoint=f"localhost:{meeting.port}" if is_this_machine(meeting.host) else meeting.address,
        rdzv_configs=configs,
        max_restarts=job.max_restarts,
        local_addr=address_towards(meeting.host),
        logs_specs=DefaultLogsSpecs(log_dir=str(job.run_folder / "agent")),
    )
    try:
        elastic.elastic_launch(launched, sys.executable)(*job.command)
        report = read_failure(begun_run(folder))
        if report is not None and report.first is not None and report.first.is_usage_error:
            errors.append(report.as_error())
    except ChildFailedError as error:
        errors.append(_failure(folder, error.failures, f"the ranks of {socket.gethostname()} failed"))
    except RendezvousTimeoutError:
        errors.append(
            RankFailed(
                f"fewer than {job.nodes.minimum} nodes joined {meeting.address} within {meeting.join_timeout_s:g} s",
                why=failure_reason(folder) or "the others have not started, or cannot reach it",
                fix="start the same command on the other nodes; raise launch.join_timeout_s if they start late",
            )
        )
    except RendezvousConnectionError:
        errors.append(_no_answer(meeting))
    except RendezvousError:
        message = f"the job has ended: no node can join it any more at {meeting.address}"
        errors.append(_failure(folder, {}, message))
    except Exception as error:  # torch's: no caller would receive it
        errors.append(RankFailed(f"the agent of {socket.gethostname()} failed: {type(error).__name__}: {error}"))


def _failure(folder: RunDir, failures: Mapping[int, Any], otherwise: str) -> LockstepError:
    """Return why the run has failed. The run's folder gets it, from which the other nodes read it as well.

    ``failures``: of this node's ranks by number, as torch's agent has seen their processes end.
    """
    run = begun_run(folder)
    with contextlib.suppress(LockstepError):  # the folder may be what failed
        records.record_ends(run.logs, (_end_of(rank, failure) for rank, failure in failures.items()))
    deadline = time.monotonic() + _REASON_S
    while _is_collateral(run) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    report = keep_failure(run, otherwise)
    return report.as_error() if report else RankFailed(otherwise)


def _end_of(rank: int, failure: Any) -> records.RankEnd:
    """Convert how torch's agent has seen the process of a rank end."""
    return records.RankEnd(
        rank=rank,
        host=socket.gethostname(),
        pid=failure.pid,
        time=float(failure.timestamp),
        exit_code=failure.exitcode,
    )


def _is_collateral(run: RunDir) -> bool:
    """Return whether all ranks that have failed so far missed another one."""
    report = or_else(lambda: read_failure(run), None)
    return report is None or report.first is None or report.first.is_collateral


def _no_answer(rendezvous: Rendezvous) -> RankFailed:
    return RankFailed(
        f"no answer from {rendezvous.address} within {rendezvous.join_timeout_s:g} s",
        why="the node that --rdzv names runs no `lockstep train --nodes`, or cannot be reached",
        fix="start the same command there; check the name, the port and firewalls between the nodes",
    )


SPEC = EngineSpec(
    name="torchrun",
    summary="this machine's share of --nodes that meet at --rdzv, as without --on; run it on each machine",
    make=Torchrun,
    is_attached=True,
)
