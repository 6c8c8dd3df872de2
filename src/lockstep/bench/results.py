"""What a benchmark measured."""

from __future__ import annotations

import contextlib
import platform
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lockstep.hardware.detect import detect_devices
from lockstep.hardware.host import cpu_name, usable_cores
from lockstep.launch.local.signals import StopRequest, exit_code
from lockstep.telemetry.records import versions
from lockstep.telemetry.rundir import utc_now


def machine_facts() -> dict[str, Any]:
    """Where something was measured: ``cpu``, ``cores``, ``gpus`` by name, ``torch`` and ``python``."""
    known = versions()
    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "gpus": [device.name for device in detect_devices() if device.kind == "gpu"],
        "torch": known["torch"],
        "python": platform.python_version(),
        "lockstep": known["lockstep"],
    }


@dataclass
class BenchReport:
    """One benchmark: what was asked, what was measured (a row each), and what follows from it.

    ``partial``: it was stopped, by the signal ``stopped_by``; the rows are those measured until then. ``extra``: what
    this kind alone has.
    """

    kind: str
    task: str
    settings: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    verdict: str = ""
    notes: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    partial: bool = False
    stopped_by: int = 0
    date: str = field(default_factory=lambda: utc_now().isoformat())
    machine: dict[str, Any] = field(default_factory=machine_facts)
    command: list[str] = field(default_factory=lambda: list(sys.argv))

    @property
    def title(self) -> str:
        return f"{self.kind} of {self.task}"

    @property
    def exit_code(self) -> int:
        """130 or 143: stopped by a signal; 1: nothing could be measured."""
        if self.partial:
            return exit_code(self.stopped_by)
        return 0 if any(row.get("status", "ok") == "ok" for row in self.rows) else 1

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Ctrl-C or SIGTERM inside ends the measuring, not the report."""
        with StopRequest() as stop:
            try:
                yield
            except KeyboardInterrupt:
                self.partial, self.stopped_by = True, stop.requested or signal.SIGINT
                self.notes.append("stopped before everything was measured")

    def as_dict(self) -> dict[str, Any]:
        names = "kind title task machine date command settings rows verdict notes partial"
        return {name: getattr(self, name) for name in names.split()} | self.extra
