"""One studio: its options and its parts."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.studio.config_store import SavedConfigs
from lockstep.studio.forms import Forms
from lockstep.studio.home import Home, iso
from lockstep.studio.index import RunIndex
from lockstep.studio.jobs import Jobs
from lockstep.studio.launch_records import Starts
from lockstep.studio.planner import Planner
from lockstep.studio.problems import ApiError, in_progress
from lockstep.studio.runs import Runs
from lockstep.studio.stopping import Stops
from lockstep.studio.tasks import OfferedTasks
from lockstep.telemetry.records import utc_now, versions

#: How long a run may take to end with a checkpoint before it is killed.
KILL_AFTER_S = 60.0


@dataclass(frozen=True)
class Options:
    """Options from the command line.

    Attributes:
        runs_dir: where runs are found and made.
        tasks: built-in tasks and those given at the start; the page can start no others.
        flags: flags of ``lockstep train`` and the setting of each.
        verbs: the commands that this version has.
        kill_after_s: how long a stopped run may take to save a checkpoint and end.
        warm: import the tasks at the start, before a page asks for them.
        base_path: below which path a proxy shows the studio, such as ``/user/me/studio``.
        trusted_hosts: names in a browser's address besides those of this machine: the proxy's.
    """

    runs_dir: Path
    tasks: OfferedTasks
    flags: Mapping[str, str]
    verbs: tuple[str, ...]
    kill_after_s: float = KILL_AFTER_S
    warm: bool = False
    base_path: str = ""
    trusted_hosts: tuple[str, ...] = ()


class Studio:
    """State of one server; everything that must outlive it is in files."""

    def __init__(self, options: Options, detect: Any) -> None:
        self.options = options
        self.home = Home(options.runs_dir)
        self.home.make()
        self.starts = Starts(self.home)
        self.index = RunIndex(self.home, self.starts)
        self.jobs = Jobs(self.home)
        self.saved = SavedConfigs(self.home, options.tasks)
        self.stops = Stops(self.index, self.starts, options.kill_after_s)
        self.planner = Planner()
        self.forms = Forms(self.home, self.index, self.planner, options.tasks, options.flags, detect)
        self.runs = Runs(self.home, self.index, self.starts, self.jobs, self.forms)
        self.instance = secrets.token_hex(8)
        self.started_at = utc_now()

    def hello(self) -> dict[str, Any]:
        """Who answers; first message of every WebSocket."""
        return {"instance": self.instance, "version": versions()["lockstep"], "now": time.time()}

    def about(self) -> dict[str, Any]:
        return {
            **self.hello(),
            "runs_dir": str(self.home.runs_dir),
            "started_at": iso(self.started_at.timestamp()),
            "kill_after_s": self.options.kill_after_s,
            "host": socket.gethostname(),
            "verbs": sorted(self.options.verbs),
        }

    def first_answer(self) -> dict[str, Any]:
        """What the page needs first."""
        devices, names = self.forms.list_devices(refresh=False), list(self.forms.task_names)
        return {"studio": self.about(), "devices": devices, "schema": self.forms.schema, "tasks": names}

    def begin_job(
        self, kind: str, words: Sequence[str], *, run: str | None = None, config: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Start a command whose result is a JSON document. Raises :class:`LockstepError`."""
        if words[0] not in self.options.verbs:
            raise ApiError("NOT_SUPPORTED", 422, f"this version has no `lockstep {words[0]}`", fix="upgrade Lockstep")
        if run is not None:
            self.index.run(run)
            summary = self.index.summary(run)
            if summary["starting"]:
                raise in_progress(run)
            run = summary["id"]
        return self.jobs.begin(kind, words, run=run, config=config)
