"""Code in Ray's processes: each worker starts its rank, the controller has ranks saved before it ends them.

Imports Ray; :mod:`lockstep.launch.engines.ray` is its only user.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
import ray.train

from lockstep._compat.ray import Backend, BackendConfig, ControllerCallback, WorkerGroupCallback
from lockstep.errors import UsageError
from lockstep.hardware.world import RANK_VARIABLES
from lockstep.launch.failure.causes import is_lost_peer
from lockstep.launch.process.signals import STOPPED

#: How torch marks the lines of a rank's traceback.
_MARK = re.compile(r"^\[rank\d+\]: ?")
_TRACEBACK_LINES = 200


class RankEnded(Exception):
    """A rank has failed.

    Attributes:
        exit_code: of its process, negative for a signal.
        traceback: the traceback that it printed; empty if it was killed.
    """

    def __init__(self, exit_code: int, traceback: str) -> None:
        super().__init__(exit_code, traceback)
        self.exit_code = exit_code
        self.traceback = traceback

    @property
    def last_line(self) -> str:
        return self.traceback.strip().rpartition("\n")[2]

    @property
    def signal_name(self) -> str | None:
        return signal.Signals(-self.exit_code).name if self.exit_code < 0 else None

    @property
    def is_lost_peer(self) -> bool:
        """Whether the rank only lost its connection to another one."""
        type_name, _, message = self.last_line.partition(": ")
        return is_lost_peer(type_name, message)


class Terminal:
    """An actor: the output of all ranks on its way to the terminal of the command."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def write(self, text: str) -> None:
        self._lines.append(text)

    def take(self) -> str:
        """Return the output since the last call."""
        text = "".join(self._lines)
        self._lines.clear()
        return text


class RankProcess:
    """The process of this worker's rank.

    ``is_leaving``: the rank was asked to write a checkpoint and end, since its worker goes away.
    """

    def __init__(self, arguments: list[str], environment: Mapping[str, str], folder: Path, terminal: Any) -> None:
        self.is_leaving = False
        self.traceback: deque[str] = deque(maxlen=_TRACEBACK_LINES)
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            env=environment,
            cwd=folder if folder.is_dir() else None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._terminal = terminal

    def wait(self) -> int:
        """Forward the rank's output until it ends; its exit code, which is negative for a signal.

        The traceback of a failed rank is kept for the report: of several ranks that fail, one has the reason.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = _MARK.sub("", line)
            if text == line:
                self._terminal.write.remote(line)
            else:
                self.traceback.append(text)
        return self._process.wait()

    def save_and_end(self, grace_s: float) -> None:
        """Send SIGTERM, on which the rank writes a checkpoint, and wait until it has ended."""
        self.is_leaving = True
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()


#: The rank of this worker; a worker has one in its life.
_rank: RankProcess | None = None


def run_rank(settings: dict[str, Any]) -> int:
    """Start this worker's rank, as Ray's training function, and wait; return its exit code.

    Raises:
        RankEnded: the rank has failed, and another start may succeed.
        RayActorError: the rank has written a checkpoint and ended, because Ray takes its worker or another one away. As
            a preemption, it does not count among the failures after which Ray starts the ranks again.
    """
    global _rank
    environment = {**os.environ, **settings["environment"], **rank_variables()}
    _rank = RankProcess(settings["arguments"], environment, settings["folder"], settings["terminal"])
    code = _rank.wait()
    if _rank.is_leaving:
        raise ray.exceptions.RayActorError(error_msg="the rank has left for other workers", preempted=True)
    if code in (0, UsageError.exit_code, *STOPPED):
        return code
    raise RankEnded(code, "".join(_rank.traceback))


def rank_variables() -> dict[str, str]:
    """Return the variables of torchrun, for this worker."""
    context = ray.train.get_context()
    numbers = {
        "RANK": context.get_world_rank(),
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "GROUP_RANK": context.get_node_rank(),
    }
    return {name: str(number) for name, number in numbers.items()}


class RankAddress(BackendConfig):
    """Gives the workers the address at which their ranks meet; the ranks make the process group."""

    @property
    def backend_cls(self) -> type[Backend]:
        return _RankAddressBackend


class _RankAddressBackend(Backend):
    # A rank chooses its GPU among those of the node by LOCAL_RANK.
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        address, port = worker_group.execute_single(0, _free_address)
        worker_group.execute(_set_variables, {"MASTER_ADDR": address, "MASTER_PORT": str(port)})


def _free_address() -> tuple[str, int]:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), probe.getsockname()[1]  # type: ignore[no-untyped-call]


def _set_variables(variables: Mapping[str, str]) -> None:
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(variables)


class Supervision(ControllerCallback, WorkerGroupCallback):
    """Has the ranks write a checkpoint before Ray ends their workers.

    That is at Ctrl-C, when their number changes, and when a node is about to be preempted.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._workers: Any = None

    def after_worker_group_start(self, worker_group: Any) -> None:
        self._workers = worker_group

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        statuses = worker_group_status.worker_statuses.values()
        if any(status.preemption_info is not None for status in statuses):
            self._save()

    def before_controller_execute_resize_decision(self, resize_decision: Any) -> None:
        self._save()

    def before_controller_abort(self) -> None:
        self._save()

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        self._workers = None

    def _save(self) -> None:
        workers = self._workers
        self._workers = None
        if workers is not None:
            answers = workers.execute_async(_save_and_end, self._grace_s)
            ray.wait(answers, num_returns=len(answers), timeout=self._grace_s)


def _save_and_end(grace_s: float) -> None:
    if _rank is not None:
        _rank.save_and_end(grace_s)
