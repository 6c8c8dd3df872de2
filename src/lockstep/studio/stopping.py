"""Stopping a run: SIGTERM, then SIGKILL if it does not end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import Any

from lockstep.errors import LockstepError
from lockstep.studio.index import RunIndex
from lockstep.studio.launch_records import Starts, Target
from lockstep.studio.problems import ApiError
from lockstep.studio.processes import is_alive
from lockstep.telemetry.summary import LIVE


class Stops:
    """SIGTERM to a run, and SIGKILL when it is still there after ``kill_after_s`` seconds."""

    def __init__(self, index: RunIndex, starts: Starts, kill_after_s: float) -> None:
        self._index = index
        self._starts = starts
        self._kill_after_s = kill_after_s
        self._watches: set[asyncio.Task[None]] = set()

    async def stop(self, name: str) -> dict[str, Any]:
        """Ask run ``name`` to end with a checkpoint. Raises :class:`ApiError`."""
        summary = await asyncio.to_thread(self._index.summary, name)
        if summary["status"] not in LIVE:
            raise ApiError("NOT_RUNNING", 409, f"run {name} is {summary['status']}, not running", fix="reload the page")
        run = self._index.run_folder(name)
        target = await asyncio.to_thread(self._starts.target, run)
        if target is None or not await asyncio.to_thread(target.send, signal.SIGTERM):
            where = summary["host"] or "another machine"
            raise ApiError(
                "RUN_NOT_USABLE",
                409,
                f"run {name} runs on {where}",
                why="a signal reaches only processes of this machine and user",
                fix=f"run `lockstep stop {name}` there",
            )
        self._index.stopping(name)
        attempt = summary["attempt"] if summary["status"] == "running" else None
        watch = asyncio.create_task(self._kill_later(name, target, attempt))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        return {"id": name, "stopping": True, "kill_after_s": self._kill_after_s}

    async def _kill_later(self, name: str, target: Target, attempt: int | None) -> None:
        """Kill ``target`` if it is still in the ``attempt`` in which it was asked to stop; ``None``: its first."""
        for _ in range(max(1, round(self._kill_after_s))):
            await asyncio.sleep(min(1.0, self._kill_after_s))
            if not await asyncio.to_thread(is_alive, target.process):
                return
            with contextlib.suppress(LockstepError):
                summary = await asyncio.to_thread(self._index.summary, name)
                if summary["status"] not in LIVE or attempt not in (None, summary["attempt"]):
                    return
        await asyncio.to_thread(target.send, signal.SIGKILL)
