"""One run in full, and the comparison of several, read from their folders."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lockstep.checkpoint.store import CheckpointStore
from lockstep.config import RunConfig, dump, resolve
from lockstep.config.load import MAX_CONFIG_BYTES, nested
from lockstep.errors import LockstepError, RunFolderError
from lockstep.studio.launch_records import Start
from lockstep.studio.settings import REFUSED, command_of, flatten
from lockstep.telemetry import summary
from lockstep.telemetry.files import names_in, open_regular, read_bytes, read_json
from lockstep.telemetry.lookup import or_else
from lockstep.telemetry.rundir import LIVE, RunDir

#: Settings that the page may not set, and that a copy gets in another way.
_MAX_TABLES, _MAX_FILES, _MAX_REMARKS = 4 << 20, 5000, 200
_OF_ITS_OWN = {"save_dir", "runs_dir", "task.name", "task.datamodule"}


def describe(run: RunDir, summary: Mapping[str, Any], start: Start | None) -> dict[str, Any]:
    """Everything that the page shows of a run, its summary included."""
    config = or_else(run.config, None)
    record = run.read() if os.path.lexists(run.run_file) else None
    shown, given = (start.shown, start.arguments) if start else ([], [])
    words = shown or (record.command[1:] if record else ()) or given
    return {
        **summary,
        "config": config.model_dump(mode="json") if config else None,
        "config_yaml": dump(config) if config else "",
        "plan": or_else(run.plan, {}) or None,
        "checkpoints": CheckpointStore(run.checkpoints).listed(),
        "logs": log_names(run),
        "tables": or_else(lambda: read_json(run.path / "tables.json", max_bytes=_MAX_TABLES), None),
        "remarks": or_else(run.remarks, [])[-_MAX_REMARKS:],
        "pictures": sorted(n for n in names_in(run.pictures) if n.endswith(".png")) if _is_real(run.pictures) else [],
        **command_of(words),
        "versions": record.versions if record is not None else {},
        "resumable": record is not None and summary["status"] not in LIVE,
    }


def _is_real(folder: Path) -> bool:
    """Whether this is a folder and no link, which may lead anywhere."""
    return folder.is_dir() and not folder.is_symlink()


def files(folder: Path) -> list[dict[str, Any]]:
    """Paths, sizes in bytes and times (seconds since the epoch) of the regular files below ``folder``."""
    found = []
    for place, _, names in os.walk(folder):  # which follows no links
        for name in names:
            file = Path(place, name)
            with contextlib.suppress(OSError):
                status = file.lstat()
                if stat.S_ISREG(status.st_mode) and not name.startswith("."):
                    path = file.relative_to(folder).as_posix()
                    found.append({"path": path, "bytes": status.st_size, "modified": status.st_mtime})
        if len(found) > _MAX_FILES:
            break
    return sorted(found[:_MAX_FILES], key=lambda file: str(file["path"]))


def content_of(file: Path) -> Iterator[bytes]:
    """A file's content in parts; it may grow meanwhile. Raises :class:`OSError`."""
    with open_regular(file) as stream:
        while part := stream.read(1 << 20):
            yield part


def settings_of(file: Path) -> dict[str, Any]:
    """The settings of a run's ``config.yaml`` by dotted key, read fast: for a table, not to train with.

    Raises:
        RunFolderError: it cannot be read.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        content = yaml.load(read_bytes(file, max_bytes=MAX_CONFIG_BYTES), Loader=loader)
        return {key: value for key, value in flatten(content) if key not in {"name", "save_dir", "runs_dir"}}
    except (yaml.YAMLError, LockstepError, AttributeError, ValueError) as error:
        raise RunFolderError(f"{file} is damaged", why=str(error)[:200]) from None


def log_names(run: RunDir) -> list[str]:
    """Text files in ``logs``; the command's own output first."""
    if not _is_real(run.logs):
        return []
    names = [name for name in names_in(run.logs) if name.endswith(".log") and not name.startswith(".")]
    return sorted(names, key=lambda name: (name != "output.log", name))


def form_of(config: RunConfig, task_defaults: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The form's content to start such a run again, and the settings that the page may not set.

    The form starts from the task's defaults: a value that equals a general default may differ from them. The name is
    left out, since the copy gets another one.
    """
    given: dict[str, Any] = {}
    left_out = []
    defaults = dict(flatten(resolve(task_defaults).model_dump(mode="json")))
    for key, value in flatten(config.model_dump(mode="json")):
        if key == "name" or (not key.startswith("task.") and defaults.get(key) == value):
            continue
        if key not in REFUSED:
            given[key] = value
        elif value and key not in _OF_ITS_OWN:
            left_out.append(key)
    return nested(given), left_out


def compare(runs: Sequence[RunDir], summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The results of several runs, and where their settings and plans differ."""
    found = summary.compare(runs)
    tables = {"metrics": found.results, "config": found.settings, "plan": found.plan}
    rows = {name: [{"key": key, "values": row} for key, row in table.items()] for name, table in tables.items()}
    return {"runs": summaries, **rows}
