"""The studio's side of the helper process that makes plans (:mod:`lockstep.studio.plan_helper`)."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from lockstep.hardware.device import Device
from lockstep.studio.schemas import ApiError


class Planner:
    """Asks the helper, one request at a time; starts it when needed, and again after it has ended."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._tasks: dict[tuple[str, ...], list[dict[str, Any]]] = {}

    def tasks(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """What the form must know of each task; asked once. Raises :class:`LockstepError`."""
        key = tuple(names)
        if key not in self._tasks:
            self._tasks[key] = self._ask({"op": "tasks", "names": list(names)})
        return self._tasks[key]

    def plan(self, task: str, config: Mapping[str, Any], devices: Sequence[Device]) -> dict[str, Any]:
        """The plan as ``lockstep plan --json`` prints it. Raises :class:`LockstepError`."""
        request = {"op": "plan", "task": task, "config": config, "devices": [device.as_dict() for device in devices]}
        plan: dict[str, Any] = self._ask(request)
        return plan

    def close(self) -> None:
        """End the helper, even in the middle of an answer: its caller gets an error."""
        self._closed = True
        while not self._lock.acquire(timeout=0.05):
            if (process := self._process) is not None:
                process.kill()
        try:
            self._end()
        finally:
            self._lock.release()

    def _ask(self, request: Mapping[str, Any]) -> Any:
        with self._lock:
            try:
                answer = self._exchange(json.dumps(request).encode())
            except (OSError, EOFError, ValueError) as error:
                self._end()
                what, why = "the data of this task could not be read", str(error) or "the helper process ended"
                fix = "run `lockstep plan` with the same settings in a terminal to see the reason"
                raise ApiError("PLANNER_FAILED", 503, what, why=why, fix=fix) from None
        if "error" in answer:
            given = answer["error"]
            raise ApiError(given["code"], 422, given["message"], why=given.get("why", ""), fix=given.get("fix", ""))
        return answer["data"]

    def _exchange(self, request: bytes) -> Any:
        if self._closed:
            raise OSError("the studio is ending")
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._pipe, there = Pipe()
            with there:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "lockstep.studio.plan_helper", str(there.fileno())],
                    pass_fds=[there.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # not ended by Ctrl-C in the studio's terminal
                )
        assert self._pipe is not None
        self._pipe.send_bytes(request)
        if not self._pipe.poll(self._timeout_s):
            raise OSError(f"no answer within {self._timeout_s:g} s")
        return json.loads(self._pipe.recv_bytes())

    def _end(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
