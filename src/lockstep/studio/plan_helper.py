"""The studio's helper process: it imports tasks, reads the sizes of their data and makes plans.

Its argument is the descriptor of one end of a pipe; each JSON document that arrives is answered with one. The process
ends when the other end is closed, so it never outlives the studio, which itself imports neither torch nor user code.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from pydantic import TypeAdapter

from lockstep.engine.task import Datasets
from lockstep.engine.task_settings import settings_model
from lockstep.engine.training_data import open_data
from lockstep.errors import LockstepError
from lockstep.hardware.detect import Device
from lockstep.hardware.resolve import resolve_placement
from lockstep.hardware.world import World
from lockstep.launch.prepare import plan_for, settle
from lockstep.rundir.files import plain
from lockstep.studio.schemas import problem_of
from lockstep.tasks.registry import find_task

#: Data on disk may change while the studio is open.
DATA_LIVES_S = 300.0


class Helper:
    """Answers requests; keeps the data sets of the last task open for some minutes."""

    def __init__(self) -> None:
        self._open: tuple[str, float, Datasets] | None = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            if request["op"] == "tasks":
                return {"data": [_describe_task(name) for name in request["names"]]}
            return {"data": self._plan(request["task"], request["config"], request["devices"])}
        except Exception as error:  # whatever a user's task raises
            return {"error": _error(error)}

    def _plan(self, task: str, config: Mapping[str, Any], devices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the output of ``lockstep plan --json`` for these settings, on a machine with these devices."""
        built, whole = settle(task, config)
        detected = TypeAdapter(list[Device]).validate_python(devices)
        placement = resolve_placement(whole.hardware, whole.distributed, World(), detected)
        key = json.dumps([whole.task.model_dump(mode="json"), whole.data.model_dump(mode="json"), whole.training.seed])
        now = time.monotonic()
        if self._open is None or self._open[0] != key or now - self._open[1] > DATA_LIVES_S:
            self._open = None
            self._open = (key, now, open_data(built, whole))
        plan: dict[str, Any] = plan_for(built, whole, placement, self._open[2], None, devices=detected).plan.as_dict()
        return plan


def _describe_task(name: str) -> dict[str, Any]:
    description: dict[str, Any] = {"name": name, "title": name, "error": None, "schema": {}, "defaults": {}}
    try:
        kind = find_task(name)
        title = (inspect.cleandoc(kind.__doc__ or "") or name).partition("\n")[0].rstrip(".")
        schema = settings_model(kind).model_json_schema()
        defaults = plain(dict(kind.defaults))
        return description | {"title": title, "schema": schema, "defaults": defaults}
    except Exception as error:  # one task that cannot be imported must not hide the others
        return description | {"error": _error(error)}


def _error(error: Exception) -> dict[str, Any]:
    if isinstance(error, LockstepError):
        return problem_of(error)
    reason = f"{type(error).__name__}: {error}"
    return {"code": "TASK_NOT_USABLE", "message": "the task failed", "why": reason, "fix": "correct the task"}


def main() -> None:
    helper = Helper()
    with Connection(int(sys.argv[1])) as pipe, contextlib.suppress(EOFError):
        while True:
            request = json.loads(pipe.recv_bytes())
            pipe.send_bytes(json.dumps(plain(helper.answer(request))).encode())
