"""The contents of a run's files: ``run.json``, the configuration, a forecast; and which rows are superseded.

What is written of a configuration can be read again, and names no code in the run folder.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from lockstep.config import RunConfig, dump, resolve
from lockstep.config.load import MAX_CONFIG_BYTES, parse_yaml
from lockstep.errors import ConfigError, RunFolderError
from lockstep.telemetry.files import damaged, read_json

FORMAT_VERSION = 1

Status = Literal["pending", "running", "completed", "failed", "stopped", "lost"]
#: Of a run that has not ended.
LIVE = frozenset({"pending", "running"})

#: A number; ``null`` in JSON means that it was not finite.
Metric = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]


class RunRecord(BaseModel):
    """The content of ``run.json``. Times are UTC; ``pid`` and ``host`` are the process to signal.

    ``status`` is what the run itself wrote last; :meth:`RunDir.status` also checks whether it is alive.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    format_version: int = FORMAT_VERSION
    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    name: str | None = None
    task: str
    status: Status = "pending"
    created_at: AwareDatetime
    started_at: AwareDatetime | None = None
    completed_at: AwareDatetime | None = None
    pid: int | None = None
    host: str | None = None
    command: list[str] = []
    versions: dict[str, str] = {}
    placement: dict[str, Any] | None = None
    attempt: int = Field(default=0, ge=0)
    restarts: list[dict[str, Any]] = []
    best_epoch: int | None = None
    best_metric: dict[str, Metric] = {}
    final_metrics: dict[str, Metric] = {}
    error: str | None = None
    tags: list[str] = []

    def changed(self, changes: Mapping[str, Any]) -> RunRecord:
        if unknown := changes.keys() - type(self).model_fields.keys():
            raise TypeError(f"run.json has no {', '.join(sorted(unknown))}")
        return type(self).model_validate({**self.model_dump(), **changes})


def parse_record(content: Any, path: Path) -> RunRecord:
    """``content`` of ``path``, a ``run.json``. Raises :class:`RunFolderError`."""
    version = content.get("format_version") if isinstance(content, dict) else None
    if not isinstance(version, int) or isinstance(version, bool):
        why, fix = "its run.json is not one of Lockstep's", "`lockstep runs` lists the runs"
        raise RunFolderError(f"{path.parent} is not a run folder", why=why, fix=fix)
    if version > FORMAT_VERSION:
        raise RunFolderError(
            f"{path.parent} was written by a newer version of Lockstep",
            why=f"its format is {version}; this version reads up to {FORMAT_VERSION}",
            fix="upgrade: pip install --upgrade lockstep-train",
        )
    try:
        return RunRecord.model_validate(content)
    except ValidationError as error:
        places = [(".".join(map(str, item["loc"]))[:100], item["msg"][:200]) for item in error.errors()[:3]]
        raise damaged(path, "; ".join(f"{place}: {said}" for place, said in places)) from None
    except RecursionError as error:
        raise damaged(path, str(error)) from None


def new_run_id(folder: Path | None = None) -> str:
    """``run-`` and eight hexadecimal digits: the name of the run's ``folder`` if it has this form, else a random id."""
    if folder is not None and re.fullmatch(r"run-[0-9a-f]{8}", folder.name):
        return folder.name
    return f"run-{secrets.token_hex(4)}"


def utc_now() -> datetime:
    return datetime.now(UTC)


def versions() -> dict[str, str]:
    """Versions of what decides a run's numbers, without importing any of it."""
    import platform
    from importlib import metadata

    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name, distribution in {"lockstep": "lockstep-train", "torch": "torch", "numpy": "numpy"}.items():
        try:
            found[name] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


def surviving(rows: Iterable[dict[str, Any]], resumed_from: Mapping[int, int]) -> list[dict[str, Any]]:
    """Rows that no later attempt superseded, in their order.

    An attempt that resumes from step ``s`` (``resumed_from`` maps it to ``s``) repeats what older attempts did beyond
    ``s``. Ranks that are restarted within an attempt do the same, so a row also supersedes earlier ones of its step
    or beyond. Rows without a usable attempt or step cannot be placed and are kept.
    """
    limits: dict[int, float] = {}
    kept: list[dict[str, Any]] = []
    for row in rows:
        attempt, step = row.get("attempt", 1), row.get("step")
        if isinstance(attempt, int) and isinstance(step, int | float):
            if attempt not in limits:
                limits[attempt] = min((s for later, s in resumed_from.items() if later > attempt), default=math.inf)
            if step > limits[attempt]:
                continue
            while kept and isinstance(before := kept[-1].get("step"), int | float) and before >= step:
                kept.pop()
        kept.append(row)
    return kept


def newest_per_epoch(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of several rows for one epoch, the last; in the order of their epochs' first rows."""
    chosen: dict[Any, dict[str, Any]] = {}
    for position, row in enumerate(rows):
        epoch = row.get("epoch")
        chosen[epoch if isinstance(epoch, int) else ("no epoch", position)] = row
    return list(chosen.values())


#: What :func:`parse_frozen` raises when there is no configuration in the text, or none that may be used.
NO_CONFIG = (yaml.YAMLError, ValueError, TypeError, RuntimeError, ConfigError)


def frozen_text(config: RunConfig, folder: Path) -> str:
    """What :func:`parse_frozen` will read in the run folder ``folder``. Raises :class:`ConfigError` if it could not."""
    content = dump(config)
    try:
        size = len(content.encode("utf-8"))
        if size > MAX_CONFIG_BYTES:
            raise ValueError(f"it has {size:,} bytes, and at most {MAX_CONFIG_BYTES:,} are read")
        parse_frozen(content, folder)
    except NO_CONFIG as error:
        raise ConfigError(
            "the configuration could not be read back from the run folder",
            why=str(error)[:500],
            fix="give absolute paths of code files, and keep long lists in a file that the task reads",
        ) from None
    return content


def parse_frozen(content: str | bytes, folder: Path) -> RunConfig:
    """The configuration of the run in ``folder``. Raises one of ``NO_CONFIG``."""
    settings = parse_yaml(content)
    if not isinstance(settings, dict):
        raise ValueError("it has no settings")
    if isinstance(settings.get("training"), dict):
        settings["training"].pop("engine", None)  # of older runs; checkpoints of both engines are read the same way
    config = resolve(settings)
    _refuse_own_code(config, folder)
    return config


def _refuse_own_code(config: RunConfig, folder: Path) -> None:
    """Raise :class:`ValueError` when a setting names a file of code inside ``folder``.

    Of what Lockstep itself imports, the task and a data module, it writes the whole, resolved path.
    """
    settings = config.task.settings
    imported = (config.task.name, settings.get("datamodule"))
    for setting in (config.task.name, *settings.values()):
        place = setting.rpartition(":")[0] if isinstance(setting, str) else ""
        if not place.endswith(".py"):
            continue
        file = Path(place).resolve()
        if file.is_relative_to(folder.resolve()):
            raise ValueError(f"it names {place[:200]}, inside the run folder: code in a run folder is not run")
        if setting in imported and str(file) != place:
            raise ValueError(f"it names {place[:200]}, which is not an absolute, resolved path")


def read_forecast(path: Path) -> dict[str, Any]:
    """The report of ``lockstep forecast``: its file, or the folder of it. Raises :class:`ConfigError`."""
    file = path / "report.json" if path.is_dir() else path
    fix = "name the folder that `lockstep forecast` printed, or its report.json"
    rates = {"gpus", "samples_per_s", "samples_per_s_low", "samples_per_s_high"}
    try:
        found = read_json(file)
        complete = all(rates <= row.keys() for row in found["rows"]) and "task" in found
        if found["kind"] == "forecast" and complete and {"batch_size", "accumulate"} <= found["settings"].keys():
            return dict(found)
    except RunFolderError as error:
        raise ConfigError(f"telemetry.forecast: {file} cannot be read", why=str(error), fix=fix) from error
    except (TypeError, KeyError, AttributeError):
        pass
    raise ConfigError(f"telemetry.forecast: {file} is not a forecast", fix=fix)
