"""The run folder of ``lockstep lightning fit``: a new one, or that of an earlier fit, and how the fit ended."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from lockstep.config import resolve as resolve_config
from lockstep.errors import LockstepError, RunFolderError
from lockstep.hardware.world import World
from lockstep.launch.lightning_cli import newest_checkpoint
from lockstep.launch.run_claim import create_folder, refuse_running, warn
from lockstep.tasks.trusted_tasks import known, remember
from lockstep.telemetry.rundir import RunDir, utc_now


def fit_folder(path: str | None, ckpt_path: str | None, task: str, world: World) -> RunDir | None:
    """The run folder ``path``: that of the run which the checkpoint is of, else a new one.

    Args:
        path: as given, with a number where another run is in it; ``None``: a new folder in ``runs/``.
        ckpt_path: the checkpoint that the fit resumes from.
        task: what the run's record names.

    Returns:
        ``None`` where the ranks cannot agree on one.

    Raises:
        RunFolderError: the run is still being trained, is another one, or its folder could not be created.
    """
    if world.from_outside and path is None:
        if world.is_main:
            warn(f"there is no run folder: under {world.launcher}, name one for all ranks with --run_dir")
        return None
    if not world.is_main:
        assert path is not None, "the launcher has named it"
        return RunDir(Path(path))
    if path is not None and (Path(path) / "run.json").exists():
        if ckpt_path:
            return _of_lightning(RunDir.open(Path(path)))
        if not world.from_outside:  # the other ranks would not know
            taken, path = path, _free_beside(path)
            warn(
                f"{taken} has a run already, so this one is in {path}; --ckpt_path resumes an earlier one in its folder"
            )
    try:
        return create_folder(resolve_config({"task": {"name": task}, "save_dir": path}))
    except RunFolderError as error:
        raise RunFolderError(error.what, why=error.why, fix=error.fix.replace("--save-dir", "--run_dir")) from None


def _free_beside(path: str) -> str:
    """``path-2``, ``path-3``, …: the first that is not there."""
    return next(name for name in (f"{Path(path)}-{number}" for number in count(2)) if not Path(name).exists())


def _of_lightning(run: RunDir) -> RunDir:
    """Raise :class:`RunFolderError` for one that is running, or has Lockstep's own checkpoints."""
    refuse_running(run)
    if not run.cli_config_file.exists() and newest_checkpoint(run) is None:
        raise RunFolderError(
            f"{run.path} holds the run {run.read().id}, which is not of `lockstep lightning fit`",
            why="its checkpoints are Lockstep's, and a run folder holds one run",
            fix="choose another --run_dir",
        )
    return run


def remember_configuration(run: RunDir) -> None:
    """Note that this user's fit has written the configuration, so that `lockstep resume` may import what it names."""
    remember([_key(run)])


def is_remembered(run: RunDir) -> bool:
    """Whether :func:`remember_configuration` has noted the file as it is now."""
    return _key(run) in known()


def _key(run: RunDir) -> str:
    return f"sha256:{hashlib.sha256(run.cli_config_file.read_bytes()).hexdigest()}"


@contextmanager
def outcome_recorded(run: RunDir) -> Iterator[None]:
    """Records the end of a fit that did not reach its first step; later, ``RunStatus`` does."""
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
