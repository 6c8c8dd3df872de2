"""Run folders for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings

from lockstep.config import resolve
from lockstep.telemetry.rundir import (
    RunDir,
)

ON_TMP_PATH = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)


def make_run(path: Path, run_id: str = "run-00000001", **config: Any) -> RunDir:
    return RunDir.create(path, resolve(config), run_id=run_id, command=["lockstep", "train", "har"])


def everything_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
