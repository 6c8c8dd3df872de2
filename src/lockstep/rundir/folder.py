"""The run folder: the interface between training and everything that reads it.

One writer per file; shared files are the launcher's until rank 0 begins an attempt, then rank 0's.
JSON files are replaced atomically, JSONL files appended (see :mod:`lockstep.rundir.files`).
Nothing here runs code from a folder. A configuration is only written if it can be read again and names no code in the
run folder.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from lockstep.config import RunConfig, dump, resolve
from lockstep.config.load import MAX_CONFIG_BYTES, parse_yaml
from lockstep.errors import ConfigError, RunFolderError, StorageError
from lockstep.rundir import files
from lockstep.rundir.files import JsonLines, absolute, damaged, names_in, read_json, read_jsonl, write_json
from lockstep.rundir.heartbeat import Beat, announce, is_alive, read_beat

#: Prefix of NCCL's dump after a collective timed out, in ``logs``; the rank follows.
NCCL_DUMP = "nccl-rank-"
#: How long a run may stay pending after its creator ended: the time to hand it over to a launcher.
PENDING_GRACE_S = 15.0
#: Longest wait for git, in seconds.
_GIT_TIMEOUT_S = 5.0

_MAX_RECORD_BYTES = 4 << 20
_updating = threading.Lock()
T = TypeVar("T")


FORMAT_VERSION = 1

Status = Literal["pending", "running", "completed", "failed", "stopped", "lost"]
#: Of a run that has not ended.
LIVE = frozenset({"pending", "running"})

#: A number; ``null`` in JSON means that it was not finite.
Metric = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]


class GitState(BaseModel):
    """The commit of the folder in which a run was started; ``clean``: no tracked file differed from it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    commit: str
    clean: bool

    @classmethod
    def read(cls, folder: Path) -> GitState | None:
        """Ask git about ``folder``; ``None`` outside a repository, and without git."""
        words = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder)]
        words += ["status", "--porcelain=v2", "--branch", "--untracked-files=no"]
        try:
            answer = subprocess.run(words, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True)
        except (OSError, ValueError, subprocess.SubprocessError):
            return None
        heads = [line for line in answer.stdout.splitlines() if line.startswith("# branch.oid ")]
        changes = [line for line in answer.stdout.splitlines() if not line.startswith("#")]
        commit = heads[0].split()[-1] if heads else "(initial)"
        return None if commit == "(initial)" else cls(commit=commit, clean=not changes)


class RunRecord(BaseModel):
    """The content of ``run.json``. Times are UTC; ``pid`` and ``host`` are the process to signal.

    ``status``: written by the run; :meth:`RunDir.status` also checks whether its process is alive.
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
    git: GitState | None = None
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
    """Parse ``content`` of ``path``, a ``run.json``. Raises :class:`RunFolderError`."""
    version = content.get("format_version") if isinstance(content, dict) else None
    if not isinstance(version, int) or isinstance(version, bool):
        raise RunFolderError(
            f"{path.parent} is not a run folder",
            why="its run.json is not one of Lockstep's",
            fix="`lockstep runs` lists the runs",
        )
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
        raise damaged(path, "; ".join(f"{key}: {message}" for key, message in places)) from None
    except RecursionError as error:
        raise damaged(path, str(error)) from None


def new_run_id(folder: Path | None = None) -> str:
    """Return the name of the run's ``folder`` if it is ``run-`` and eight hexadecimal digits, else a random id."""
    if folder is not None and re.fullmatch(r"run-[0-9a-f]{8}", folder.name):
        return folder.name
    return f"run-{secrets.token_hex(4)}"


def utc_now() -> datetime:
    return datetime.now(UTC)


def versions() -> dict[str, str]:
    """Return versions of packages that decide a run's numbers, without importing any of them."""
    import platform
    from importlib import metadata

    installed = {"python": platform.python_version(), "platform": platform.platform()}
    for name, distribution in {"lockstep": "lockstep-train", "torch": "torch", "numpy": "numpy"}.items():
        try:
            installed[name] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            installed[name] = "unknown"
    return installed


def surviving(rows: Iterable[dict[str, Any]], resumed_from: Mapping[int, int]) -> list[dict[str, Any]]:
    """Return rows that no later attempt superseded, in their order.

    An attempt that resumes from step ``s`` (``resumed_from`` maps it to ``s``) repeats what older attempts did beyond
    ``s``. Ranks that are restarted within an attempt do the same, so a row also supersedes earlier ones of its step
    or beyond. Rows without a usable attempt or step cannot be placed and are kept.
    """
    limits: dict[int, float] = {}
    survivors: list[dict[str, Any]] = []
    for row in rows:
        attempt = row.get("attempt", 1)
        step = row.get("step")
        if isinstance(attempt, int) and isinstance(step, int | float):
            if attempt not in limits:
                limits[attempt] = min((s for later, s in resumed_from.items() if later > attempt), default=math.inf)
            if step > limits[attempt]:
                continue
            while survivors and isinstance(before := survivors[-1].get("step"), int | float) and before >= step:
                survivors.pop()
        survivors.append(row)
    return survivors


def newest_per_epoch(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep the last of several rows for one epoch, in the order of their epochs' first rows."""
    chosen: dict[Any, dict[str, Any]] = {}
    for position, row in enumerate(rows):
        epoch = row.get("epoch")
        chosen[epoch if isinstance(epoch, int) else ("no epoch", position)] = row
    return list(chosen.values())


#: Errors of :func:`parse_frozen`: no configuration in the text, or one that must not be used.
NO_CONFIG = (yaml.YAMLError, ValueError, TypeError, RuntimeError, ConfigError)


def frozen_text(config: RunConfig, folder: Path) -> str:
    """Make the text for :func:`parse_frozen` in ``folder``. Raises :class:`ConfigError` if it cannot be read back."""
    content = dump(config)
    try:
        size = len(content.encode("utf-8"))
        if size > MAX_CONFIG_BYTES:
            raise ValueError(f"it has {size:,} bytes, and at most {MAX_CONFIG_BYTES:,} are read")
        if parse_yaml(content) != config.model_dump(mode="json"):
            raise ValueError("its text would be read as other settings")
        _refuse_own_code(config, folder)
    except NO_CONFIG as error:
        raise ConfigError(
            "the configuration could not be read back from the run folder",
            why=str(error)[:500],
            fix="give absolute paths of code files, and keep long lists in a file that the task reads",
        ) from None
    return content


def parse_frozen(content: str | bytes, folder: Path) -> RunConfig:
    """Parse the configuration of the run in ``folder``. Raises one of ``NO_CONFIG``."""
    settings = parse_yaml(content)
    if not isinstance(settings, dict):
        raise ValueError("it has no settings")
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
        file_name = setting.rpartition(":")[0] if isinstance(setting, str) else ""
        if not file_name.endswith(".py"):
            continue
        file = Path(file_name).resolve()
        if file.is_relative_to(folder.resolve()):
            raise ValueError(f"it names {file_name[:200]}, inside the run folder: code in a run folder is not run")
        if setting in imported and str(file) != file_name:
            raise ValueError(f"it names {file_name[:200]}, which is not an absolute, resolved path")


class _PathInRun:
    """An attribute of :class:`RunDir`: the path of the file or folder ``name`` in it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDir, kind: type[RunDir]) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunDir:
    """A folder that holds one run. Make it with :meth:`create` or :meth:`open`.

    Reading raises :class:`RunFolderError`, writing :class:`StorageError`.
    """

    path: Path

    run_file = _PathInRun("run.json")
    config_file = _PathInRun("config.yaml")
    heartbeat_file = _PathInRun("heartbeat.json")
    metrics_file = _PathInRun("metrics.json")
    steps_file = _PathInRun("steps.jsonl")
    evaluations_file = _PathInRun("evaluations.jsonl")
    ranks_file = _PathInRun("ranks.jsonl")
    profile = _PathInRun("profile")
    plan_file = _PathInRun("plan.json")
    job_file = _PathInRun("job.json")
    attempts = _PathInRun("attempts")
    checkpoints = _PathInRun("checkpoints")
    pictures = _PathInRun("pictures")
    audio = _PathInRun("audio")
    remarks_file = _PathInRun("remarks.jsonl")
    logs = _PathInRun("logs")

    @cached_property
    def _steps(self) -> JsonLines:
        return JsonLines(self.steps_file)

    def samples_file(self, rank: int) -> Path:
        """Return the file of ``{"attempt", "step", "epoch" (from 1), "indices"}`` of ``rank``, a line for each step."""
        return self.path / f"samples-rank{rank}.jsonl"

    @classmethod
    def create(cls, path: Path, config: RunConfig, *, run_id: str, command: Sequence[str]) -> RunDir:
        """Make the folder of a new, pending run atomically.

        Raises:
            ConfigError: the configuration could not be read from the folder again.
            RunFolderError: the folder holds a run or foreign files, or it cannot be written.
        """
        path = absolute(path)
        if os.path.lexists(path) and path.is_file():
            raise RunFolderError(f"{path} is a file, not a folder for a run", fix="name a folder with --save-dir")
        content = frozen_text(config, path)
        record = RunRecord(
            id=run_id,
            name=files.plain(config.name),
            task=files.plain(config.task.name),
            created_at=utc_now(),
            pid=os.getpid(),
            host=socket.gethostname(),
            command=files.plain(list(command)),
            versions=versions(),
            tags=files.plain(list(config.tags)),
            git=GitState.read(Path()),
        )

        def fill(folder: Path) -> None:
            run = cls(folder)
            for inner in (run.attempts, run.checkpoints, run.logs):
                inner.mkdir()
            files.write_text(run.config_file, content)
            announce(run.heartbeat_file, handing_over=True)
            write_json(run.run_file, record.model_dump())

        refuse_occupied(path)
        try:
            files.make_folder(path, fill)
        except StorageError as error:
            fix = error.fix if "--save-dir" in error.fix else "choose another --save-dir, or free some space there"
            raise RunFolderError(f"cannot make the run folder {path}: {error.what}", why=error.why, fix=fix) from error
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunDir:
        run = cls(absolute(path))
        run.read()
        return run

    def begin_attempt(self, plan: Mapping[str, Any], placement: Mapping[str, Any], resumed_from_step: int = 0) -> int:
        """Record that the calling process trains from this step on; returns the attempt's number, from 1."""
        attempt = self.last_attempt() + 1
        folder = self.attempts / str(attempt)
        building = self.attempts / files.temporary_name(str(attempt))
        with files.storing(folder):
            try:
                files.remove_leftovers(self.path)
                files.remove_leftovers(self.attempts)
                building.mkdir(parents=True)
                shutil.copyfile(self.config_file, building / self.config_file.name)
                write_json(building / "plan.json", plan)
                write_json(building / "placement.json", {**placement, "resumed_from_step": resumed_from_step})
                building.rename(folder)
            finally:
                shutil.rmtree(building, ignore_errors=True)
        write_json(self.plan_file, plan)
        announce(self.heartbeat_file, resumed_from_step, handing_over=True)
        self.update(
            attempt=attempt,
            placement=dict(placement),
            pid=os.getpid(),
            host=socket.gethostname(),
            status="pending",
            error=None,
            completed_at=None,
        )
        return attempt

    def last_attempt(self) -> int:
        """Return the number of the newest attempt, from 1; 0 before the first one."""
        return max([self.read().attempt, *(int(name) for name in names_in(self.attempts) if _is_number(name))])

    # Record, configuration and plan.

    def read(self) -> RunRecord:
        if not os.path.lexists(self.run_file):
            exists = os.path.lexists(self.path)
            raise RunFolderError(
                f"{self.path} is not a run folder" if exists else f"there is no run folder {self.path}",
                why="it has no run.json" if exists else "",
                fix="`lockstep runs` lists the runs",
            )
        return parse_record(read_json(self.run_file, max_bytes=_MAX_RECORD_BYTES), self.run_file)

    def update(self, **changes: Any) -> RunRecord:
        """Replace some fields of ``run.json``, atomically."""
        with _updating:
            record = self.read().changed({key: files.plain(value) for key, value in changes.items()})
            write_json(self.run_file, record.model_dump())
        return record

    def config(self, attempt: int | None = None) -> RunConfig:
        """Return the run's frozen configuration, or that of an earlier ``attempt``."""
        try:
            return parse_frozen(self.config_text(attempt), self.path)
        except NO_CONFIG as error:
            raise damaged(
                self._config_file(attempt), str(error)[:500], "restore the file, or start a new run"
            ) from None

    def config_text(self, attempt: int | None = None) -> bytes:
        """Return the content of the file that :meth:`config` parses."""
        return files.read_bytes(self._config_file(attempt), max_bytes=MAX_CONFIG_BYTES)

    def _config_file(self, attempt: int | None) -> Path:
        return self.config_file if attempt is None else self.attempts / str(attempt) / self.config_file.name

    def keep_config(self, config: RunConfig) -> bool:
        """Make the file hold ``config``; returns whether it had other text.

        Raises:
            ConfigError: the configuration could not be read from the folder again.
        """
        content = frozen_text(config, self.path)
        is_new = self.config_text() != content.encode("utf-8")
        if is_new:
            files.write_text(self.config_file, content)
        return is_new

    def plan(self) -> dict[str, Any]:
        plan = _mapping(read_json(self.plan_file), self.plan_file)
        try:
            names = ("key", "title", "shown", "reason")
            decisions = plan.get("decisions", {}).values()
            if all(isinstance(decision[name], str) for decision in decisions for name in names):
                return plan
        except (AttributeError, KeyError, TypeError):
            pass
        fix = f"copy the newest plan.json of {self.attempts} over it"
        raise damaged(self.plan_file, "its decisions are not titles, values and reasons", fix)

    def progress(self) -> Beat | None:
        return read_beat(self.heartbeat_file)

    def status(self, now: float | None = None) -> str:
        return self.judge(self.read(), now)

    def judge(self, record: RunRecord, now: float | None = None) -> str:
        """Judge: pending, running, completed, failed, stopped or lost; ``now`` is in seconds since the epoch.

        A pending or running run whose process has ended is lost: immediately on its host, after some minutes of
        silence on another.
        """
        if record.status not in LIVE:
            return record.status
        now = time.time() if now is None else now
        beat = self.progress()
        if beat is not None and is_alive(beat, now):
            return record.status
        if record.status == "pending":
            heard = max(record.created_at.timestamp(), beat.updated if beat else 0.0)
            handing_over = beat is None or beat.handing_over
            queued = record.attempt == 0 and self.job_file.exists()
            if queued or (handing_over and now - heard < PENDING_GRACE_S):
                return "pending"
        return "lost"

    def is_between_processes(self, record: RunRecord) -> bool:
        """Return whether the run is pending between two processes: a launcher may still take it over."""
        beat = self.progress()
        return self.judge(record) == "pending" and not (beat is not None and is_alive(beat, time.time()))

    # Its rows, without those that a later attempt superseded.

    def epochs(self) -> list[dict[str, Any]]:
        if not os.path.lexists(self.metrics_file):
            return []
        rows = _mapping(read_json(self.metrics_file), self.metrics_file).get("epochs")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise damaged(self.metrics_file, "it has no list of epochs", "remove the file; it contains curves only")
        return newest_per_epoch(surviving(rows, self.resumed_from()))

    def _rows(self, file: Path) -> list[dict[str, Any]]:
        return surviving(read_jsonl(file), self.resumed_from())

    def steps(self) -> list[dict[str, Any]]:
        return self._rows(self.steps_file)

    def evaluations(self) -> list[dict[str, Any]]:
        return self._rows(self.evaluations_file)

    def tables(self) -> dict[str, Any]:
        """Return metrics of the test that are no single number, and ``class_names``; empty without any."""
        file = self.path / "tables.json"
        return _mapping(read_json(file), file) if file.exists() else {}

    def remarks(self) -> list[dict[str, Any]]:
        return self._rows(self.remarks_file)

    def ranks(self) -> list[dict[str, Any]]:
        return self._rows(self.ranks_file)

    def write_epochs(self, rows: Iterable[Mapping[str, Any]]) -> None:
        write_json(self.metrics_file, {"epochs": list(rows)})

    def append_step(self, row: Mapping[str, Any]) -> None:
        self._steps.append(row)

    def resumed_from(self) -> dict[int, int]:
        """Return the step from which each attempt resumed; attempts that cannot be read are left out."""
        steps = {}
        names = names_in(self.attempts)
        for name in names if len(names) > 1 else ():  # a single one supersedes nothing
            placement = or_else(partial(read_json, self.attempts / name / "placement.json"), None)
            step = placement.get("resumed_from_step") if isinstance(placement, dict) else None
            if _is_number(name) and isinstance(step, int):
                steps[int(name)] = step
        return steps


def refuse_occupied(path: Path) -> None:
    """Raise :class:`RunFolderError` unless ``path`` is free: missing, or an empty folder."""
    if not os.path.lexists(path):
        return
    if not files.is_folder(path):
        raise RunFolderError(f"{path} is a file, not a folder", fix="choose another --save-dir")
    run = RunDir(path)
    if not os.path.lexists(run.run_file):
        if names := sorted(names_in(path)):
            raise RunFolderError(
                f"{path} contains files that are not a run's",
                why=f"for example {names[0]}",
                fix="choose another --save-dir: a missing or an empty folder",
            )
        return
    record = run.read()
    status = run.judge(record)
    kind = "unfinished"
    reason = f"its status is {status}"
    fix = "add --resume to resume it, or choose another --save-dir"
    if status == "completed":
        kind = "finished"
        reason = "a run folder contains one run, and it is not overwritten"
        fix = "choose another --save-dir"
    elif status in LIVE:
        reason = f"process {record.pid} on {record.host} is still training it"
        fix = f"wait for it, or `lockstep stop {record.id}` and add --resume"
    raise RunFolderError(f"{path} contains the {kind} run {record.id}", why=reason, fix=fix)


def _mapping(content: Any, path: Path) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise damaged(path, "its top level is not an object")
    return content


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) < 10


def or_else(read: Callable[[], T], otherwise: Any) -> T | Any:
    """Return the result of ``read``, or ``otherwise`` if the file is missing or damaged."""
    try:
        return read()
    except RunFolderError:
        return otherwise
