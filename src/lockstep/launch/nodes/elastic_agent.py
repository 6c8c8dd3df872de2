"""Torch's elastic agent, for several nodes, with Lockstep's supervision: it starts and restarts ranks, we watch them.

The agent's own watch gives the other ranks 30 s once one has failed, and tells whole process groups
to end, loader workers included, when a stop is requested. So it is only asked about ranks that have
all ended already.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from lockstep._compat.torch import agent_processes
from lockstep.launch.local.signals import StopRequest, held_back
from lockstep.launch.local.supervisor import Supervisor

Supervise = Callable[[Mapping[int, "subprocess.Popen[bytes]"]], Supervisor]


def prepare_torch() -> None:
    """Keep torch's agent away from signals; let its loggers write where the root logger does, not to the terminal."""
    # The agent insists on a handler of its own; this one nobody needs.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGUSR2"
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and (name == "torch" or name.startswith("torch.")):
            logger.handlers.clear()
            logger.propagate = True


class RankAgent(LocalElasticAgent):
    """Use :class:`lockstep.launch.nodes.agent.NodeAgent`."""

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
        processes = agent_processes(self)
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
