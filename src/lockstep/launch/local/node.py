"""The ranks of one node: started together, and again after a failure.

Torch's elastic agent (see :mod:`lockstep.launch.nodes.agent`) is not used: importing torch here takes as long as in a
rank, which starts only afterwards. The ranks get the variables that torchrun documents
(https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from lockstep.hardware.world import STORE_FD
from lockstep.launch.local import environment
from lockstep.launch.local.signals import held_back

if TYPE_CHECKING:
    from lockstep.launch.local.launcher import Launch

MONITOR_INTERVAL_S = 0.1


def run(launch: Launch) -> int:
    """Run all ranks of ``launch`` until they have ended and are not started again; returns the exit code."""
    start = 0
    while True:
        with held_back():
            processes = _start(launch, start)
            supervisor = launch.start(processes)
        while not supervisor.check():
            time.sleep(MONITOR_INTERVAL_S)
        if start == launch.max_restarts or not supervisor.may_restart:
            break
        for process in processes.values():
            process.wait()
        start += 1
    if supervisor.forced:
        launch.error = f"the ranks were killed, since they had not ended {launch.stop_grace_s:g} s after the stop"
    return supervisor.exit_code


def _start(launch: Launch, start: int) -> dict[int, subprocess.Popen[bytes]]:
    """The processes by rank. Rank 0 gets a socket that listens already, so no port can be taken meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        common = {
            **os.environ,
            **{"WORLD_SIZE": str(launch.ranks), "LOCAL_WORLD_SIZE": str(launch.ranks)},
            **{"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "rank", "ROLE_WORLD_SIZE": str(launch.ranks)},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])},
            "TORCHELASTIC_RUN_ID": os.environ.get(environment.LAUNCH_ID, str(os.getpid())),
            "TORCHELASTIC_RESTART_COUNT": str(start),
            "TORCHELASTIC_MAX_RESTARTS": str(launch.max_restarts),
            # Every rank finds the store there, rank 0 too, which serves it (engine/process/process_group.py).
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        return {
            rank: subprocess.Popen(
                [sys.executable, *launch.rank_command],
                env={
                    **common,
                    **{name: str(rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")},
                    **({STORE_FD: str(server.fileno())} if rank == 0 else {}),
                },
                pass_fds=(server.fileno(),) if rank == 0 else (),
                start_new_session=True,
            )
            for rank in range(launch.ranks)
        }
