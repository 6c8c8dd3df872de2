"""One studio: its options and its parts."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.config.load import merge
from lockstep.report.source import is_bench, read_bench
from lockstep.studio.commands import Jobs, Starts
from lockstep.studio.forms import Forms, Planner
from lockstep.studio.home import Home, iso, modified_ns
from lockstep.studio.index import RunIndex
from lockstep.studio.runs import Runs
from lockstep.studio.schemas import DoctorBody, PlanBody, ScalingBody
from lockstep.studio.settings import OfferedTasks, SavedConfigs
from lockstep.telemetry.rundir import or_else, versions

_MAX_REPORTS = 100


@dataclass(frozen=True)
class Options:
    """Options from the command line."""

    runs_dir: Path
    #: The page can start no others.
    tasks: OfferedTasks
    #: Flags of ``lockstep train`` and the setting of each.
    flags: Mapping[str, str]
    #: How long a stopped run may take to save a checkpoint and end.
    kill_after_s: float = 60.0
    #: Import the tasks at the start, before a page asks for them.
    warm: bool = False
    #: Below which path a proxy shows the studio, such as ``/user/me/studio``; and the names of that proxy.
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
        self.planner = Planner()
        self.forms = Forms(self.home, self.index, self.planner, options.tasks, options.flags, detect)
        self.runs = Runs(self.home, self.index, self.starts, self.jobs, self.forms, options.kill_after_s)
        self.instance = secrets.token_hex(8)
        self.started_at = iso(time.time())

    def hello(self) -> dict[str, Any]:
        """Who answers; first message of every WebSocket."""
        return {"instance": self.instance, "version": versions()["lockstep"], "now": time.time()}

    def about(self) -> dict[str, Any]:
        return {
            **self.hello(),
            "runs_dir": str(self.home.runs_dir),
            "started_at": self.started_at,
            "kill_after_s": self.options.kill_after_s,
            "host": socket.gethostname(),
        }

    def first_answer(self) -> dict[str, Any]:
        """What the page needs first."""
        devices, names = self.forms.list_devices(), list(self.options.tasks)
        return {"studio": self.about(), "devices": devices, "schema": self.forms.schema, "tasks": names}

    def doctor(self, body: DoctorBody) -> dict[str, Any]:
        words = ["doctor", "--json", "--runs-dir", str(self.home.runs_dir), *(["--quick"] if body.quick else [])]
        if body.devices is not None:
            self.forms.check_devices(body.devices)
            words += ["--devices", ",".join(body.devices)]
        return self.jobs.begin("doctor", words)

    def scaling(self) -> dict[str, Any]:
        """Reports of scaling benchmarks right under the runs folder, newest first, and the jobs that make them."""
        files = [file for file in self.home.runs_dir.glob("*/report.json") if is_bench(file.parent)]
        reports = []
        for file in sorted(files, key=modified_ns, reverse=True)[:_MAX_REPORTS]:
            report, name = or_else(partial(read_bench, file.parent), {}), file.parent.name
            if report.get("kind") == "scaling":
                about = {"title": str(report.get("title") or name), "created_at": iso(modified_ns(file) / 1e9)}
                reports.append({"id": name, **about, "report": report})
        return {"reports": reports, "jobs": [job for job in self.jobs.all() if job["kind"] == "scaling"]}

    def measure_scaling(self, body: ScalingBody) -> dict[str, Any]:
        self.forms.check_devices(body.devices)
        config = merge(body.config, {"hardware": {"selected_devices": body.devices}})
        wanted = self.forms.startable(PlanBody(task=body.task, config=config))
        words = ["bench", "scaling", wanted.task, "--runs-dir", str(self.home.runs_dir), "--json"]
        return self.jobs.begin("scaling", words, config=wanted.mapping())
