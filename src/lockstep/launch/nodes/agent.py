"""The launcher's part in a run on several nodes: rendezvous, heartbeats, and a new rendezvous after a failure.

Torch's elastic agent does the rendezvous (c10d, with its store in the launcher of the node that --rdzv names). This
module adds what it lacks: a node without heartbeats is detected although no connection breaks, a node that is cut off
ends its ranks, and a node that fails sends the others the reason.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout

from lockstep._compat.torch import agent_processes
from lockstep.errors import ConfigError, RankFailed
from lockstep.hardware.network import address_towards, choose_interface, is_this_machine
from lockstep.launch.failure.report import read_failure
from lockstep.launch.local import environment, signals
from lockstep.launch.local.supervisor import MONITOR_INTERVAL_S, Launch, Supervisor
from lockstep.launch.nodes import liveness
from lockstep.launch.nodes.command import Nodes, bring_last_lines, refuse
from lockstep.telemetry.rundir import new_run_id

#: With fewer nodes than the maximum, how long a start waits for one more.
LAST_CALL_S = 5.0
#: A node whose keep-alive is older than this many seconds is left out of the next rendezvous.
KEEP_ALIVE_S = 5
#: How long a node whose ranks were stopped from another one checks whether a node waits to join.
MAKE_ROOM_S = 3.0
_EXIT_BARRIER_S = 30.0
_REASON_S = 5.0
_JOB, _FAILURE = "lockstep/job", "lockstep/failure"


class LostContact(Exception):
    """This node cannot reach the rendezvous."""


def run(launch: Launch, nodes: Nodes, command: tuple[str, ...]) -> int:
    """Run this node's ranks, and again after a failure; returns the exit code.

    If the rendezvous fails, :func:`lockstep.launch.nodes.command.refuse` records why.
    """
    try:
        return _run(launch, nodes, command)
    except (ConfigError, RankFailed) as error:
        refuse(launch.run_dir, error)
        return error.exit_code


def _run(launch: Launch, nodes: Nodes, command: tuple[str, ...]) -> int:
    """The exit code.

    Raises:
        ConfigError, RankFailed: the rendezvous failed.
    """
    _prepare_torch()
    # The store of the ranks must not be that of the agents, or survivors of a lost node wait at its old address.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    choose_interface(os.environ, nodes.host)
    restarts = launch.settings.max_restarts
    while True:
        store = _connect(launch, nodes)
        job = os.environ.setdefault(environment.JOB, new_run_id())
        os.environ[environment.JOB] = store.compare_set(_JOB, "", job).decode()
        agent = _make_agent(launch, nodes, store, command, restarts)
        try:
            with _stoppable(launch, agent):
                agent.run()
            return _conclude(launch, nodes, store, agent)
        except LostContact as lost:
            launch.error = str(lost)
            if agent.restarts_left <= 0:
                return 1
            restarts = agent.restarts_left - 1
        except RendezvousConnectionError:
            restarts = agent.restarts_left  # lost on the way to a restart, which counts already
        except RendezvousClosedError:
            launch.error = f"the job has ended: no node can join it any more at {nodes.address}"
            return _blame(launch, store)
        except RendezvousTimeoutError as error:
            raise RankFailed(
                f"fewer than {nodes.least} nodes joined {nodes.address} within {nodes.join_timeout_s:g} s",
                why=_failure_elsewhere(store, 0.0) or "the others have not started, or cannot reach it",
                fix="start the same command on the other nodes; raise launch.join_timeout_s if they start late",
            ) from error


def _connect(launch: Launch, nodes: Nodes) -> TCPStore:
    """The store of the rendezvous: served here, or found at ``nodes.address``.

    Raises:
        ConfigError: no such host, a port that is taken. RankFailed: no answer within ``join_timeout_s``.
    """
    try:
        serves = is_this_machine(nodes.host)
    except OSError as error:
        raise ConfigError(
            f"--rdzv {nodes.address}: there is no host {nodes.host}",
            why=error.strerror or str(error),
            fix="give a name or address that every node can resolve",
        ) from error
    deadline = time.monotonic() + nodes.join_timeout_s
    while True:
        try:
            if not serves:
                liveness.await_server(nodes)
            store = liveness.open_store(nodes, serves=serves)
            store.set_timeout(timedelta(seconds=liveness.SILENCE_S))
            return store
        except (RuntimeError, OSError) as error:
            if serves:
                raise ConfigError(
                    f"--rdzv {nodes.address}: this node cannot listen there",
                    why=str(error).splitlines()[0],
                    fix="choose another port, the same on every node",
                ) from error
            if time.monotonic() > deadline:
                raise RankFailed(
                    f"no answer from {nodes.address} within {nodes.join_timeout_s:g} s",
                    why="the node that --rdzv names runs no `lockstep train --nodes`, or cannot be reached",
                    fix="start the same command there; check the name, the port and firewalls between the nodes",
                ) from error
        if launch.stop_requested() is not None:
            raise KeyboardInterrupt
        time.sleep(MONITOR_INTERVAL_S)


def _prepare_torch() -> None:
    """Keep torch's agent away from signals; let its loggers write where the root logger does, not to the terminal."""
    # The agent always installs a handler; this signal is not used.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGUSR2"
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and (name == "torch" or name.startswith("torch.")):
            logger.handlers.clear()
            logger.propagate = True


class NodeAgent(LocalElasticAgent):
    """Torch's agent of one of several nodes, with Lockstep's supervisor: the agent starts and restarts ranks.

    The agent's monitor gives the other ranks 30 s once one has failed, and ends whole process groups, loader workers
    included, when a stop is requested. So it is called only when all ranks have ended already. Use :func:`run`.
    """

    def __init__(self, spec: WorkerSpec, launch: Launch, peers: liveness.Peers) -> None:
        # Ranks write their logs themselves; no folder in /tmp.
        super().__init__(spec, logs_specs=DefaultLogsSpecs(log_dir=os.devnull), start_method="spawn")
        self._exit_barrier_timeout = _EXIT_BARRIER_S
        self._launch = launch
        self._peers = peers
        self.supervisor: Supervisor | None = None
        #: Why the ranks were ended, if they were.
        self.lost = ""
        self.meets = False
        self._ended_at: float | None = None

    @property
    def restarts_left(self) -> int:
        return int(self._remaining_restarts)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._peers.pause()
        self.meets = True
        try:
            if self._launch.stop_requested() is not None:
                raise KeyboardInterrupt
            super()._rendezvous(worker_group)
        finally:
            self.meets = False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.lost, self._ended_at = "", None
        with signals.held_back():
            self._launch.begin()
            pids: dict[int, Any] = super()._start_workers(worker_group)
            self._launch.stop.install()  # should the agent have taken SIGINT or SIGTERM after all
        processes = agent_processes(self)
        group: Any = worker_group
        self.supervisor = self._launch.supervise(
            {worker.global_rank: processes[worker.local_rank].proc for worker in group.workers}
        )
        self._peers.begin(f"{group.master_addr}:{group.master_port}", group.group_rank, group.group_world_size)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self.supervisor is not None, "workers are monitored after their start"
        # The agent sees the waiting nodes as of the heartbeats that the supervisor is about to read, not of later ones.
        self._peers.show_who_waits()
        cut_off = self._peers.cut_off()
        lost = self.lost or cut_off or self._peers.lost()
        if lost:
            self.lost = self._launch.error = lost
            self.supervisor.kill()
            if not self.supervisor.check():
                return RunResult(state=WorkerState.HEALTHY)
            if cut_off:
                raise LostContact(cut_off)
            return RunResult(state=WorkerState.FAILED)
        if not self.supervisor.check() or self._makes_room():
            return RunResult(state=WorkerState.HEALTHY)  # if a node waits, the agent sees it and restarts all
        if self.supervisor.exit_code in (0, *signals.STOPPED):
            self._peers.send(liveness.NodeStatus(done=True))
        if not self.supervisor.may_restart:
            self._remaining_restarts = 0
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:  # its arguments differ between versions of torch
        if self.supervisor is not None:
            self.supervisor.kill()  # none is left, unless this module failed
        super()._shutdown(*args, **kwargs)

    def _makes_room(self) -> bool:
        """Whether the ranks may have stopped because another node was the first to see that a node waits to join."""
        assert self.supervisor is not None, "workers are monitored after their start"
        if not {end.code for end in self.supervisor.exits.values()} <= {*signals.STOPPED}:
            return False
        self._ended_at = self._ended_at or time.monotonic()
        waiting = self._launch.stop_requested() is None and time.monotonic() - self._ended_at < MAKE_ROOM_S
        return waiting or bool(self.get_worker_group().spec.rdzv_handler.num_nodes_waiting())

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Another node joined: the ranks end with a checkpoint first. After a failure none is alive, or they hang."""
        supervisor, hangs = self.supervisor, self._launch.hang is not None
        if supervisor is not None and not (supervisor.failed or hangs or self.lost):
            self._launch.error = "another node joined"
        if supervisor is not None and supervisor.alive and not hangs:
            for rank in supervisor.alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(supervisor.pids[rank], signal.SIGTERM)
            deadline = time.monotonic() + self._launch.settings.stop_grace_s
            while not supervisor.check() and time.monotonic() < deadline:
                time.sleep(MONITOR_INTERVAL_S)
        super()._restart_workers(worker_group)


def _make_agent(
    launch: Launch, nodes: Nodes, store: TCPStore, command: tuple[str, ...], max_restarts: int
) -> NodeAgent:
    address = address_towards(nodes.host)
    timeout = RendezvousTimeout(join=timedelta(seconds=nodes.join_timeout_s), last_call=timedelta(seconds=LAST_CALL_S))
    handler = liveness.NodeHandler.from_backend(
        "lockstep",
        store,
        C10dRendezvousBackend(store, "lockstep"),
        nodes.least,
        nodes.most,
        address,
        timeout,
        keep_alive_interval=1,
        keep_alive_max_attempt=KEEP_ALIVE_S,
    )
    peers = liveness.Peers(nodes, handler)
    launch.make_watch = partial(liveness.JointWatch, peers=peers)
    peers.start()
    spec = WorkerSpec(
        role="rank",
        local_world_size=launch.ranks,
        entrypoint=sys.executable,
        args=command,
        rdzv_handler=handler,
        max_restarts=max_restarts,
        monitor_interval=MONITOR_INTERVAL_S,
        local_addr=address,
    )
    return NodeAgent(spec, launch, peers)


@contextlib.contextmanager
def _stoppable(launch: Launch, agent: NodeAgent) -> Any:
    """A stop request ends the wait for other nodes; the supervisor passes it to the ranks."""

    def interrupt(_: int) -> None:
        if agent.meets:
            raise KeyboardInterrupt

    launch.stop.notify(interrupt)
    try:
        yield
    finally:
        agent._peers.end()
        launch.stop.notify(lambda _: None)


def _conclude(launch: Launch, nodes: Nodes, store: TCPStore, agent: NodeAgent) -> int:
    """This node's ranks have ended: close the rendezvous for all nodes."""
    supervisor = launch.supervisor
    assert supervisor is not None, "an agent that returns has started its ranks"
    code = 1 if agent.lost else supervisor.exit_code
    launch.error = agent.lost
    if supervisor.forced:
        launch.error = (
            f"the ranks were killed, since they had not ended {launch.settings.stop_grace_s:g} s after the stop"
        )
    launch.write()
    with contextlib.suppress(RuntimeError, RendezvousError):
        agent.get_worker_group().spec.rdzv_handler.shutdown()
    return code if code in (0, *signals.STOPPED) else _blame(launch, store, code)


def _blame(launch: Launch, store: TCPStore, code: int = 1) -> int:
    """Send the other nodes the reason why this one failed; or receive it, if another one failed first."""
    bring_last_lines(launch.run_dir)
    report = read_failure(launch.run_dir)
    own = report is not None and (report.hang or (report.first is not None and not report.first.is_collateral))
    if own and report is not None:
        text = f"node {socket.gethostname()}: {report.what}"
        details = "\n".join(filter(None, [report.details(), text]))
        with contextlib.suppress(RuntimeError):
            store.compare_set(_FAILURE, "", details)
            time.sleep(liveness.HEARTBEAT_S)  # the store may be this process's: let others read
    elif elsewhere := _failure_elsewhere(store, _REASON_S):
        launch.error = elsewhere
    return code


def _failure_elsewhere(store: TCPStore, wait_s: float) -> str:
    """The reason that another node has sent, if it does within ``wait_s``."""
    deadline = time.monotonic() + wait_s
    with contextlib.suppress(RuntimeError):
        while not store.check([_FAILURE]):
            if time.monotonic() >= deadline:
                return ""
            time.sleep(0.1)
        return store.get(_FAILURE).decode()
    return ""
