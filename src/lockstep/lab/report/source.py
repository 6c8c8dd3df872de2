"""The data that a report shows of a run, read from its folder once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError
from lockstep.rundir.files import flattened, names_in, read_bytes
from lockstep.rundir.folder import RunDir, RunRecord
from lockstep.rundir.summary import Comparison, compare

Row = dict[str, Any]

#: Longer curves are thinned: no picture shows more points.
MAX_POINTS = 4000
MAX_PICTURE_BYTES = 16 << 20


@dataclass(frozen=True)
class RunData:
    """One run. ``label`` names it in pictures; rows are as in the run folder, superseded ones left out.

    ``config`` is flat (``optimizer.lr`` → 0.001), without ``save_dir``. ``tables`` are matrices of the test, such as a
    confusion matrix, and ``class_names`` those of its rows; ``drawn`` the newest of each of the task's pictures, as
    PNG. ``problems``: what could not be read, and why.
    """

    path: Path
    label: str
    record: RunRecord
    config: Row
    epochs: Sequence[Row]
    evaluations: Sequence[Row]
    steps: Sequence[Row]
    tables: Mapping[str, Sequence[Sequence[float]]]
    class_names: Sequence[str]
    drawn: Mapping[str, bytes]
    problems: tuple[str, ...]


def read_run(run: RunDir) -> RunData:
    """Read everything that a report shows of ``run``; a damaged file becomes a gap and a problem, not an error."""
    record = run.read()
    problems: list[str] = []

    def safely(read: Any, default: Any) -> Any:
        try:
            return read()
        except (LockstepError, OSError) as error:
            problems.append(str(error).splitlines()[0])
            return default

    tables = safely(run.tables, {})
    names = tables.get("class_names")
    return RunData(
        path=run.path,
        label=record.name or record.id,
        record=record,
        config=flattened(safely(lambda: run.config().model_dump(mode="json", exclude={"save_dir"}), {})),
        epochs=safely(run.epochs, []),
        evaluations=thinned(safely(run.evaluations, [])),
        steps=thinned(safely(run.steps, [])),
        tables={name: table for name, table in tables.items() if _is_matrix(table)},
        class_names=list(map(str, names)) if isinstance(names, list) else [],
        drawn=safely(lambda: _drawn(run), {}),
        problems=tuple(problems),
    )


def compared(runs: Sequence[RunData]) -> Comparison:
    return compare([RunDir(run.path) for run in runs])


def text(value: Any) -> str:
    """Format a value for people."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.5g}"
    return ", ".join(map(text, value)) if isinstance(value, (list, tuple)) else str(value)


def _drawn(run: RunDir) -> dict[str, bytes]:
    files = (run.pictures / name for name in sorted(names_in(run.pictures)) if name.endswith(".png"))
    newest = {file.stem.rpartition("-epoch-")[0]: file for file in files}
    return {name: read_bytes(file, max_bytes=MAX_PICTURE_BYTES) for name, file in newest.items()}


def thinned(rows: Sequence[Row]) -> Sequence[Row]:
    """Keep at most :data:`MAX_POINTS` rows, evenly spaced, the last one among them."""
    if len(rows) <= MAX_POINTS:
        return rows
    stride = math.ceil((len(rows) - 1) / (MAX_POINTS - 1))
    return [*rows[:-1:stride], rows[-1]]


def _is_matrix(table: Any) -> bool:
    if not isinstance(table, list) or not table or not all(isinstance(row, list) for row in table):
        return False
    values = [value for row in table for value in row]
    return {len(row) for row in table} == {len(table[0])} != {0} and all(isinstance(v, int | float) for v in values)
