"""The folder of a run: a new one, or that of an unfinished run with its task and the permitted changes."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.checkpoint.mirror import fetch_run, mirrored_record
from lockstep.config import RunConfig, one_micro_batch, resolve
from lockstep.engine.runner import runner_of
from lockstep.engine.task import Task
from lockstep.engine.training_data import data_settings
from lockstep.errors import ConfigError, RunFolderError, printable
from lockstep.launch.engines.record import is_own_job
from lockstep.rundir.claim import claim
from lockstep.rundir.files import absolute, flattened, names_in
from lockstep.rundir.folder import LIVE, PENDING_GRACE_S, RunDir, new_run_id, or_else
from lockstep.rundir.origin import SCRIPT, note_named, require_code_named, require_named
from lockstep.tasks.registry import (
    FROM_PARTS,
    class_name,
    class_of,
    find_task,
    given_task,
    make_task,
    refuse_unrecorded,
    section_of,
    whole_name,
)

#: How long a process of the previous attempt may take to end after it has written the run's end.
CLAIM_WAIT_S = 15.0
#: A job that was queued again may find the claim of a lost node: NFS keeps it for a lease of about 90 s.
_LEASE_S = 120.0


def create_folder(config: RunConfig, run_id: str | None = None) -> RunDir:
    """Create the folder of a new run: ``save_dir``, or one under ``runs_dir``. Raises :class:`RunFolderError`."""
    run_id = run_id or new_run_id(config.save_dir)
    path = config.save_dir or config.runs_dir / run_id
    _set_failed_aside(RunDir(absolute(path)))
    run = RunDir.create(path, config, run_id=run_id, command=sys.argv)
    note_named(config.model_dump(mode="json"))
    return run


def _set_failed_aside(run: RunDir) -> None:
    """Rename the folder of a run that failed before its first checkpoint: it has nothing to resume."""
    record = or_else(run.read, None) if os.path.lexists(run.run_file) else None
    if record is None or run.judge(record) != "failed" or names_in(run.checkpoints):
        return
    aside = run.path.with_name(f"{run.path.name}-{record.id}")
    with contextlib.suppress(OSError):  # a mounted folder stays, and is refused
        if not os.path.lexists(aside):
            run.path.rename(aside)
            sys.stderr.write(f"note: run {record.id} failed before its first checkpoint; its folder is now {aside}\n")


def existing_run(config: RunConfig, resume: bool) -> RunDir | None:
    """Return the run to resume, if ``--resume`` was given and the folder, or else its mirror, has one."""
    if not resume:
        return None
    if config.save_dir is None:
        raise ConfigError(
            "--resume needs a run folder",
            why="no --save-dir was given",
            fix="add --save-dir DIR, or use `lockstep resume RUN`",
        )
    if not (config.save_dir / "run.json").exists():
        if config.storage.mirror is None:
            return None
        return _fetched(config.storage.mirror, config.save_dir)
    run = RunDir.open(config.save_dir)
    refuse_running(run)
    return run


def run_at(url: str, runs_dir: Path) -> RunDir:
    """Find or fetch the folder in ``runs_dir`` of the run that is mirrored at ``url``, to resume it.

    Raises :class:`RunFolderError`: the mirror cannot be read, has no run, or its run is still running.
    """
    folder = absolute(runs_dir / mirrored_record(url).id)
    if (folder / "run.json").exists():
        return RunDir.open(folder)
    run = _fetched(url, folder)
    assert run is not None, "it has a record"
    return run


def _fetched(url: str, folder: Path) -> RunDir | None:
    run = fetch_run(url, folder, warn)
    if run is not None:
        sys.stderr.write(f"note: run {run.read().id} was fetched from {printable(url)}; its folder is {run.path}\n")
    return run


def refuse_running(run: RunDir) -> None:
    """Raise :class:`RunFolderError` when a process trains the run, or may be about to."""
    if is_own_job(run, os.environ):
        return
    record = run.read()
    deadline = time.monotonic() + PENDING_GRACE_S
    while run.is_between_processes(record) and time.monotonic() < deadline:
        time.sleep(0.1)
        record = run.read()
    if run.judge(record) in LIVE:
        raise RunFolderError(
            f"run {record.id} is still {run.judge(record)}",
            why=f"process {record.pid} on {record.host} is still training it",
            fix=f"wait for it, or `lockstep stop {record.id}` first",
        )


@contextlib.contextmanager
def claimed(run: RunDir) -> Iterator[None]:
    """Claim a run for the block. Raises :class:`RunFolderError`: another process has begun an attempt, or keeps it."""
    with claim(run, _LEASE_S if is_own_job(run, os.environ) else CLAIM_WAIT_S):
        yield


def changed_config(
    run: RunDir, changes: Mapping[str, Any], devices: str | None = None, *, task_is_given: bool = True
) -> RunConfig:
    """Return the run's configuration with ``changes`` and, if given, other ``devices``; task and seed stay.

    The name of the task may change to that of a class of the same name, such as one in a file that was moved.
    An edit of ``config.yaml`` since the newest attempt is refused, unless ``changes`` include it.
    ``task_is_given``: whether the task is the user's; else it is made from the name in the configuration. Raises
    :class:`TaskError`: the user has not named something in it.
    """
    record = run.read()
    edited = run.config()
    is_edited = record.attempt > 0 and run.config_text(record.attempt) != run.config_text()
    old = run.config(record.attempt) if is_edited else edited
    changed = {key: value for key, value in changes.items() if key != "save_dir"}
    if isinstance(changed.get("task"), Mapping):
        task = dict(changed["task"])
        if "name" in task:
            task["name"] = whole_name(str(task["name"]))
        for key, value in task.items():  # a path was recorded as an absolute one
            if isinstance(value, str | Path) and str(Path(value).absolute()) == old.task.settings.get(key):
                task[key] = old.task.settings[key]
        changed["task"] = task
    new = resolve(
        old.model_dump(mode="json"), changed, {} if devices is None else {"hardware": {"selected_devices": devices}}
    )
    new = one_micro_batch(changed, new)
    require_named(run, new.model_dump(mode="json"), changes, task_is_given=task_is_given)
    note_named(changes)
    fixed = {
        "task.name": (class_name(old.task.name), class_name(new.task.name)),
        "task": tuple(config.task.model_dump(exclude={"name"}) for config in (old, new)),
        "training.seed": (old.training.seed, new.training.seed),
        "training.lanes": (old.training.lanes, new.training.lanes),
        "data.data_dir": (old.data.data_dir, new.data.data_dir),
    }
    for name, (before, after) in fixed.items():
        if before != after and not (name == "data.data_dir" and before and after):
            raise ConfigError(
                f"{name} differs from that of run {record.id}",
                why="a resumed run sees the same samples in the same order",
                fix="leave it as it was, or start a new run with --init-from",
            )
    _refuse_edits(run.config_file, *(flattened(config.model_dump(mode="json")) for config in (old, edited, new)))
    return new


def _refuse_edits(file: Path, old: Mapping[str, Any], edited: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuse edits of a run's settings that its resume ignores; ``new``: ``old`` with the changes of the user."""
    keys = [key for key in {**old, **edited} if edited.get(key) != old.get(key) == new.get(key)]
    settable = [key for key in keys if not key.startswith(("task.", "training.seed", "training.lanes"))]
    if keys:
        raise RunFolderError(
            f"{file} was edited since the newest attempt: "
            + ", ".join(f"{key} {old.get(key)} → {edited.get(key)}" for key in keys),
            why="the next attempt would train with other settings than the run",
            fix="restore the old value"
            + ", or ask for the new one: lockstep resume RUN" * bool(settable)
            + "".join(" --set " + shlex.quote(f"{key}={json.dumps(edited.get(key))}") for key in settable),
        )


def warn(message: str) -> None:
    sys.stderr.write(f"warning: {printable(message)}\n")


def task_again(
    run: RunDir, config: RunConfig, task: Task | type[Task] | None = None, *, is_named: bool = False
) -> Task:
    """Return the task of a run: ``task`` if it is given and has the run's settings, else made from these.

    ``is_named``: the user has named all that ``config`` names (:func:`changed_config`).

    Raises :class:`RunFolderError` where only the program that started the run can make it.
    """
    if isinstance(task, Task):
        return task_of_run(given_task(task), config, as_given=True)
    if task is not None:
        return task_of_run(class_of(task), config, as_given=False)
    name = config.task.name
    if (run.path / SCRIPT).exists():
        raise RunFolderError(
            f"the model of run {run.read().id} is made by the loop in {name}",
            why="a lockstep.Session trained it, and only its script can make it again",
            fix=f"evaluate it there; Session(init_from={str(run.path)!r}) reads its weights",
        )
    module, _, attribute = name.partition(":")
    if name == FROM_PARTS:
        raise RunFolderError(
            f"the task of run {run.read().id} was made by lockstep.fit()",
            why="its parts are objects of the program that made them",
            fix=f"there, call lockstep.fit() with the same parts, save_dir={str(run.path)!r} and resume=True",
        )
    if "<locals>" in name or (module == "__main__" and not hasattr(sys.modules[module], attribute)):
        raise RunFolderError(
            f"the task of run {run.read().id} is defined in a script or notebook",
            why="only the program that made it can make it again",
            fix=f"there, pass the task: lockstep.Run({str(run.path)!r}).resume(task)",
        )
    if not is_named:
        require_code_named(run)
    return task_of_run(find_task(name), config, as_given=False)


def task_of_run(task: Task | type[Task], config: RunConfig, *, as_given: bool) -> Task:
    """Return the task with the run's settings: made again from its class, or the caller's object if it has them."""
    if not as_given or isinstance(task, type):
        refuse_unrecorded(config.task.model_dump())
        task = make_task(task if isinstance(task, type) else type(task), config.task.settings)
    elif section_of(task) != config.task.model_dump(exclude={"name"}):
        raise ConfigError(
            "the task object's settings differ from the run's",
            why=f"the run has {config.task.settings}",
            fix="make the object with these settings, or start a new run with --init-from",
        )
    runner_of(task).complete({}, config)
    task._lockstep_data = data_settings(config)
    return task
