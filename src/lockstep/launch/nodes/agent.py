"""The launcher's part in a run on several nodes: rendezvous, heartbeats, and a new rendezvous after a failure.

The rendezvous is torch's (c10d, with its store in the launcher of the node that --rdzv names). This module starts the
ranks of this node and adds what torch's elastic agent lacks: a node without heartbeats is detected although no
connection breaks, a node that is cut off ends its ranks, and a node that fails sends the others the reason.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from torch.distributed.elastic.utils.store import barrier

from lockstep.errors import ConfigError, RankFailed
from lockstep.hardware.network import address_towards, choose_interface, is_this_machine
from lockstep.launch.failure.report import read_failure
from lockstep.launch.local.launcher import MONITOR_INTERVAL_S, Launch, Supervisor, start_ranks
from lockstep.launch.nodes import liveness
from lockstep.launch.nodes.command import Nodes, bring_last_lines, refuse
from lockstep.launch.process import signals

#: With fewer nodes than the maximum, how long a start waits for one more.
LAST_CALL_S = 5.0
#: A node whose keep-alive is older than this many seconds is left out of the next rendezvous.
KEEP_ALIVE_S = 5
#: How long a node whose ranks were stopped from another one checks whether a node waits to join.
MAKE_ROOM_S = 3.0
#: How long the nodes wait for each other at the end: one of them serves the store.
_EXIT_BARRIER_S = 30.0
_REASON_S = 5.0
_FAILURE = "lockstep/failure"


class LostContact(Exception):
    """This node cannot reach the rendezvous."""


def run(launch: Launch) -> int:
    """Run this node's ranks, and again after a failure; returns the exit code.

    If the rendezvous fails, :func:`lockstep.launch.nodes.command.refuse` records why.
    """
    # The store of the ranks must not be that of the launchers, or survivors of a lost node wait at its old address.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    for name, logger in logging.root.manager.loggerDict.items():  # torch's write to the terminal
        if isinstance(logger, logging.Logger) and (name == "torch" or name.startswith("torch.")):
            logger.handlers.clear()
            logger.propagate = True
    try:
        return _Node(launch).run()
    except (ConfigError, RankFailed) as error:
        refuse(launch.run_dir, error)
        return error.exit_code


class _Node:
    """This node in a start of several.

    Attributes:
        restarts_left: how often a failure may still be followed by another rendezvous.
        meets: whether it waits for other nodes; a stop request ends that.
        lost: why its ranks were ended, if another node or the rendezvous was lost.
    """

    def __init__(self, launch: Launch) -> None:
        assert launch.nodes is not None, "the launcher of one machine does not come here"
        self.launch = launch
        self.nodes = Nodes(**launch.nodes)
        self.restarts_left = launch.settings.max_restarts
        self.meets = False
        self.lost = ""

    def run(self) -> int:
        """The exit code. Raises :class:`ConfigError`, :class:`RankFailed`: the rendezvous failed."""
        nodes, launch = self.nodes, self.launch
        choose_interface(os.environ, nodes.host)
        launch.stop.notify(self._interrupt)
        while True:
            store = self._connect()
            self._prepare(store)
            try:
                return self._run_ranks(store)
            except LostContact as lost:
                launch.error = str(lost)
                if self.restarts_left <= 0:
                    return 1
                self.restarts_left -= 1
            except RendezvousConnectionError:
                pass  # lost on the way to a restart, which counts already
            except (RendezvousClosedError, RendezvousGracefulExitError):
                launch.error = f"the job has ended: no node can join it any more at {nodes.address}"
                return self._blame(store, 1)
            except RendezvousTimeoutError as error:
                raise RankFailed(
                    f"fewer than {nodes.least} nodes joined {nodes.address} within {nodes.join_timeout_s:g} s",
                    why=_failure_elsewhere(store, 0.0) or "the others have not started, or cannot reach it",
                    fix="start the same command on the other nodes; raise launch.join_timeout_s if they start late",
                ) from error
            finally:
                self.peers.end()

    def _interrupt(self, _: int) -> None:
        if self.meets:
            raise KeyboardInterrupt

    def _connect(self) -> TCPStore:
        """The store of the rendezvous: served here, or found at ``nodes.address``.

        Raises:
            ConfigError: no such host, a port that is taken. RankFailed: no answer within ``join_timeout_s``.
        """
        nodes = self.nodes
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
            if self.launch.stop_requested() is not None:
                raise KeyboardInterrupt
            time.sleep(MONITOR_INTERVAL_S)

    def _prepare(self, store: TCPStore) -> None:
        nodes = self.nodes
        join, last_call = timedelta(seconds=nodes.join_timeout_s), timedelta(seconds=LAST_CALL_S)
        self.handler = DynamicRendezvousHandler.from_backend(
            "lockstep",
            store,
            C10dRendezvousBackend(store, "lockstep"),
            nodes.least,
            nodes.most,
            address_towards(nodes.host),
            RendezvousTimeout(join=join, last_call=last_call),
            keep_alive_interval=1,
            keep_alive_max_attempt=KEEP_ALIVE_S,
        )
        self.peers = liveness.Peers(nodes, self.handler)
        self.peers.start()

    def _run_ranks(self, store: TCPStore) -> int:
        """Start this node's ranks as often as it takes; returns the exit code."""
        while True:
            info = self._meet()
            supervisor = self._start(info)
            joins = self._watch(supervisor)
            if not joins:
                code = supervisor.exit_code
                if not self.lost and code in (0, *signals.STOPPED):
                    self.peers.done = True
                    if code == 0:
                        with contextlib.suppress(RuntimeError):
                            barrier(info.store, info.world_size, "lockstep/end", _EXIT_BARRIER_S)
                    return self._conclude(store, supervisor)
                if self.restarts_left <= 0 or not (self.lost or supervisor.may_restart):
                    return self._conclude(store, supervisor)
                self.restarts_left -= 1
            self._end_ranks(supervisor)

    def _meet(self) -> RendezvousInfo:
        """Wait for the other nodes."""
        self.peers.pause()
        self.meets = True
        try:
            if self.launch.stop_requested() is not None:
                raise KeyboardInterrupt
            info: RendezvousInfo = self.handler.next_rendezvous()
            return info
        finally:
            self.meets = False

    def _start(self, info: RendezvousInfo) -> Supervisor:
        store, node, nodes = info.store, info.rank, info.world_size
        master = info.bootstrap_store_info
        assert master is not None, "every round has one"
        store.set(f"lockstep/ranks/{node}", str(self.launch.ranks))
        sizes = [int(store.get(f"lockstep/ranks/{other}")) for other in range(nodes)]
        group = {
            **{"GROUP_RANK": str(node), "GROUP_WORLD_SIZE": str(nodes)},
            **{"MASTER_ADDR": master.master_addr, "MASTER_PORT": str(master.master_port)},
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        with signals.held_back():
            self.launch.begin()
            supervisor = self.launch.supervise(
                start_ranks(self.launch, group, first=sum(sizes[:node]), size=sum(sizes))
            )
        self.peers.begin(f"{master.master_addr}:{master.master_port}", node, nodes)
        return supervisor

    def _watch(self, supervisor: Supervisor) -> bool:
        """Watch the ranks until they have ended (``False``), or another node waits to join (``True``)."""
        ended_at: float | None = None
        while True:
            time.sleep(MONITOR_INTERVAL_S)
            waiting, cut_off = self.peers.waiting, self.peers.cut_off()
            self.lost = cut_off or self.peers.lost()
            if self.lost:
                self.launch.error = self.lost
                supervisor.end()
                if cut_off:
                    raise LostContact(cut_off)
                return False
            if supervisor.check():
                # The ranks may have stopped because another node was the first to see that a node waits to join.
                ended_at = ended_at or time.monotonic()
                stopped = {end.code for end in supervisor.exits.values()} <= {*signals.STOPPED}
                soon = self.launch.stop_requested() is None and time.monotonic() - ended_at < MAKE_ROOM_S
                if not (stopped and (soon or waiting)):
                    return False
            if waiting:
                return True

    def _end_ranks(self, supervisor: Supervisor) -> None:
        """After a failure none is alive; where another node joins, they end with a checkpoint first."""
        if not (supervisor.failed or self.lost):
            self.launch.error = "another node joined"
        supervisor.ask_to_stop()
        supervisor.wait(self.launch.settings.stop_grace_s)
        supervisor.end()

    def _conclude(self, store: TCPStore, supervisor: Supervisor) -> int:
        """This node's ranks have ended: close the rendezvous for all nodes."""
        code = 1 if self.lost else supervisor.exit_code
        self.peers.end()
        self.launch.error = self.lost
        self.launch.note_forced()
        self.launch.write()
        with contextlib.suppress(RuntimeError, RendezvousError):
            self.handler.shutdown()
        return code if code in (0, *signals.STOPPED) else self._blame(store, code)

    def _blame(self, store: TCPStore, code: int) -> int:
        """Send the other nodes the reason why this one failed; or receive it, if another one failed first."""
        folder = self.launch.run_dir
        bring_last_lines(folder)
        report = read_failure(folder)
        if report is not None and report.first is not None and not report.first.is_collateral:
            headline, *more = report.what.splitlines()
            text = "\n".join(filter(None, [*more, report.details(), f"node {socket.gethostname()}: {headline}"]))
            with contextlib.suppress(RuntimeError):
                store.compare_set(_FAILURE, "", text)
                time.sleep(liveness.HEARTBEAT_S)  # the store may be this process's: let others read
        elif elsewhere := _failure_elsewhere(store, _REASON_S):
            self.launch.error = elsewhere
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
