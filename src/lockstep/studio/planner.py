"""Asks for plans: the helper process of the studio, which imports torch and tasks."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.hardware.detect import Device
    from lockstep.studio.schemas import ApiError


#: Imports torch without garbage collection, which takes a sixth less time: nothing of it is garbage.
_HELPER = "import gc; gc.disable(); from lockstep.studio.plan_helper import main; gc.freeze(); gc.enable(); main()"


class Planner:
    """Asks the helper process (:mod:`lockstep.studio.plan_helper`), one request at a time; starts it when needed."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self._timeout_s = timeout_s
        self._helper: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._tasks: dict[tuple[str, ...], list[dict[str, Any]]] = {}

    def tasks(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Describe each task for the form; asked once."""
        key = tuple(names)
        if key not in self._tasks:
            self._tasks[key] = self._ask({"op": "tasks", "names": key})
        return self._tasks[key]

    def plan(self, task: str, config: Mapping[str, Any], devices: Sequence[Device]) -> dict[str, Any]:
        request = {"op": "plan", "task": task, "config": config, "devices": [device.as_dict() for device in devices]}
        return dict(self._ask(request))

    def close(self) -> None:
        """End the helper, even in the middle of an answer: its caller gets an error."""
        self._closed = True
        while not self._lock.acquire(timeout=0.05):
            if (helper := self._helper) is not None:
                helper[0].kill()
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
                failure = {
                    "code": "PLANNER_FAILED",
                    "message": "the data of this task could not be read",
                    "why": str(error) or "the helper process ended",
                    "fix": "run `lockstep plan` with the same settings in a terminal to see the reason",
                }
                raise refusal(failure, 503) from None
        if "error" in answer:
            raise refusal(answer["error"])
        return answer["data"]

    def start(self) -> Connection:
        """Start the helper unless it runs; return the pipe to it."""
        if self._closed:
            raise OSError("the studio is ending")
        if self._helper is None or self._helper[0].poll() is not None:
            self._end()
            here, there = Pipe()
            with there:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _HELPER, str(there.fileno())],
                    pass_fds=[there.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # not ended by Ctrl-C in the studio's terminal
                )
            self._helper = (process, here)
        return self._helper[1]

    def _exchange(self, request: bytes) -> Any:
        pipe = self.start()
        pipe.send_bytes(request)
        if not pipe.poll(self._timeout_s):
            raise OSError(f"no answer within {self._timeout_s:g} s")
        return json.loads(pipe.recv_bytes())

    def _end(self) -> None:
        helper = self._helper
        self._helper = None
        if helper is not None:
            process, pipe = helper
            pipe.close()
            process.kill()
            process.wait()


def refusal(error: Mapping[str, Any], status: int = 422) -> ApiError:
    from lockstep.studio.schemas import ApiError  # pydantic, while the helper starts

    refused = ApiError(error["code"], status, error["message"], why=error.get("why", ""), fix=error.get("fix", ""))
    refused.settings = error.get("settings", {})
    return refused
