"""The run folder of ``lockstep lightning fit``: a new one, or that of an earlier fit; what becomes of it."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.config import RunConfig
from lockstep.config import resolve as resolve_config
from lockstep.errors import LockstepError, RunFolderError
from lockstep.hardware.world import World
from lockstep.launch.folder import create_folder, keep_config, refuse_running, warn
from lockstep.launch.lightning_cli import newest_checkpoint, resume_command
from lockstep.telemetry.heartbeat import announce
from lockstep.telemetry.rundir import RunDir, utc_now


def fit_folder(path: str | None, ckpt_path: str | None, task: str, world: World) -> RunDir | None:
    """The run folder ``path``: that of the run which the checkpoint is of, else a new or a never used one.

    Args:
        path: as given; ``None``: a new folder in ``runs/``.
        ckpt_path: the checkpoint that the fit goes on from.
        task: what the run's record names.

    Returns:
        ``None`` where the ranks cannot agree on one.

    Raises:
        RunFolderError: somebody is at that run; it is another one; or the folder cannot be made.
    """
    if world.from_outside and path is None:
        if world.is_main:
            warn(f"there is no run folder: under {world.launcher}, name one for all ranks with --run_dir")
        return None
    if not world.is_main:
        assert path is not None, "the launcher has named it"
        return RunDir(Path(path))
    config = resolve_config({"task": {"name": task}, "save_dir": path})
    if path is not None and (Path(path) / "run.json").exists():
        run = RunDir.open(Path(path))
        refuse_running(run)
        _refuse_native(run)
        return run if ckpt_path else _used_anew(run, config)
    try:
        return create_folder(config)
    except RunFolderError as error:
        raise RunFolderError(error.what, why=error.why, fix=error.fix.replace("--save-dir", "--run_dir")) from None


def _refuse_native(run: RunDir) -> None:
    """Raise :class:`RunFolderError` for a run with Lockstep's own checkpoints, which would no longer be found."""
    if not run.cli_config_file.exists() and newest_checkpoint(run) is None:
        raise RunFolderError(
            f"{run.path} holds the run {run.read().id}, which is not of `lockstep lightning fit`",
            why="its checkpoints are Lockstep's, and a run folder holds one run",
            fix="choose another --run_dir",
        )


def _used_anew(run: RunDir, config: RunConfig) -> RunDir:
    """``run`` as a new one, where nothing has been trained in it. Raises :class:`RunFolderError`."""
    record = run.read()
    if record.attempt:
        saved = run.cli_config_file.exists() and newest_checkpoint(run) is not None
        go_on = f", or go on with that run: {resume_command(run)}" if saved else ""
        raise RunFolderError(
            f"{run.path} holds the run {record.id}, which is {run.judge(record)}",
            why="a run folder holds one run, and it is not overwritten",
            fix=f"choose another --run_dir{go_on}",
        )
    keep_config(run, config)
    announce(run.heartbeat_file, handing_over=True)
    run.update(
        task=config.task.name,
        status="pending",
        pid=os.getpid(),
        host=socket.gethostname(),
        command=sys.argv,
        error=None,
        completed_at=None,
    )
    return run


@contextmanager
def outcome_recorded(run: RunDir) -> Iterator[None]:
    """Writes down how a fit ended that did not come to its first step; later, ``RunStatus`` does."""
    try:
        yield
    except BaseException as error:
        from lightning.pytorch.utilities.exceptions import SIGTERMException

        # Lightning makes a SystemExit of Ctrl-C.
        stops = (KeyboardInterrupt, SIGTERMException)
        if isinstance(error, stops) or isinstance(error.__context__, stops):
            _end_pending(run, "stopped")
        else:
            clear = isinstance(error, LockstepError)
            _end_pending(run, "failed", str(error) if clear else "".join(traceback.format_exception(error)))
        raise
    _end_pending(run, "completed")


def _end_pending(run: RunDir, status: str, error: str | None = None) -> None:
    if run.read().status == "pending":
        run.update(status=status, error=error, completed_at=utc_now())
