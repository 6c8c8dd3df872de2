"""Run folders for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from lockstep.config import resolve
from lockstep.rundir.folder import (
    RunDir,
)

#: For properties that use pytest's one folder again and again.
ON_TMP_PATH = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def make_run(path: Path, run_id: str = "run-00000001", **config: Any) -> RunDir:
    return RunDir.create(path, resolve(config), run_id=run_id, command=["lockstep", "train", "har"])


def everything_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
