"""Torch's elastic agent with Lockstep's supervision: the agent starts and restarts ranks, we watch them.

The agent's own watch gives the other ranks 30 s once one has failed, and tells whole process groups
to end, loader workers included, when a stop is requested. So it is only asked about ranks that have
all ended already.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch.distributed.elastic.rendezvous.registry as rendezvous_registry
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousParameters

from lockstep.launch.signals import StopRequest, held_back
from lockstep.launch.supervise import Supervisor

MONITOR_INTERVAL_S = 0.1

Supervise = Callable[[Mapping[int, "subprocess.Popen[bytes]"]], Supervisor]


def make_agent(
    command: tuple[str, ...], ranks: int, *, launch_id: str, max_restarts: int, stop: StopRequest, supervise: Supervise
) -> RankAgent:
    """An agent for ``ranks`` processes of ``python *command`` on this machine.

    Args:
        launch_id: names the rendezvous.
        stop: stays in charge of SIGINT and SIGTERM.
        supervise: makes the supervisor of each start of all ranks, from their processes.
    """
    prepare_torch()
    # Port 0: the system chooses a free one, so launches side by side cannot collide.
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint="localhost:0",
        run_id=launch_id,
        min_nodes=1,
        max_nodes=1,
        local_addr="localhost",
        is_host=True,
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=ranks,
        entrypoint=sys.executable,
        args=command,
        rdzv_handler=rendezvous_registry.get_rendezvous_handler(parameters),
        max_restarts=max_restarts,
        monitor_interval=MONITOR_INTERVAL_S,
        local_addr="localhost",
    )
    return RankAgent(spec, stop, supervise)


def prepare_torch() -> None:
    """Keep torch's agent away from signals; let its loggers write where the root logger does, not to the terminal."""
    # The agent insists on a handler of its own; this one nobody needs.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGUSR2"
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and (name == "torch" or name.startswith("torch.")):
            logger.handlers.clear()
            logger.propagate = True


class RankAgent(LocalElasticAgent):
    """Use :func:`make_agent`."""

    def __init__(self, spec: WorkerSpec, stop: StopRequest, supervise: Supervise) -> None:
        # Ranks keep their logs themselves; no folder in /tmp.
        super().__init__(spec, logs_specs=DefaultLogsSpecs(log_dir=os.devnull), start_method="spawn")
        self._stop = stop
        self._supervise = supervise
        self.supervisor: Supervisor | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with held_back():
            pids: dict[int, Any] = super()._start_workers(worker_group)
            self._stop.install()  # should the agent have taken SIGINT or SIGTERM after all
        processes = cast(SubprocessContext, self._pcontext).subprocess_handlers
        self.supervisor = self._supervise(
            {worker.global_rank: processes[worker.local_rank].proc for worker in worker_group.workers}
        )
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self.supervisor is not None, "workers are monitored after their start"
        if not self.supervisor.check():
            return RunResult(state=WorkerState.HEALTHY)
        if not self.supervisor.may_restart:
            self._remaining_restarts = 0
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:  # its arguments differ between versions of torch
        if self.supervisor is not None:
            self.supervisor.kill()  # nobody is left, unless something went wrong here
        super()._shutdown(*args, **kwargs)
