"""What ``--ckpt_path`` of ``lockstep lightning`` names in run folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from lockstep.api.finished.reopen import find_checkpoint
from lockstep.checkpoint.store import Snapshot
from lockstep.errors import CheckpointError, RunFolderError
from lockstep.rundir.folder import RunDir
from lockstep.rundir.summary import find_run


class Stored(NamedTuple):
    """A checkpoint in a run folder."""

    run: RunDir
    name: str

    def load(self) -> Snapshot:
        """Raise :class:`CheckpointError`."""
        return find_checkpoint(self.run, self.name)


def stored_checkpoint(path: Any, run_dir: str | None, runs_dir: Path) -> Stored | None:
    """Return the checkpoint that ``--ckpt_path`` names in a run folder; ``None``: it is not given.

    ``best`` and ``last`` mean a checkpoint of ``run_dir`` if that is a run, else of the latest run.

    Raises:
        CheckpointError: it is not a checkpoint of a run.
    """
    if path is None:
        return None
    location = Path(path).absolute()
    if path in ("best", "last") and run_dir is not None and (Path(run_dir) / "run.json").exists():
        return Stored(RunDir.open(Path(run_dir)), path)
    if path and location.is_dir() and (location.parent.parent / "run.json").exists():
        return Stored(RunDir.open(location.parent.parent), location.name.removeprefix("step-"))
    try:
        return Stored(find_run("last" if path == "best" else str(path), runs_dir), "best")
    except RunFolderError as error:
        raise CheckpointError(
            f"there is no checkpoint {path}",
            why=error.what,
            fix="name a run (its folder, its id, or `last`) or one of its checkpoints; of another Trainer's file, pass "
            "the module to lockstep.lightning.fit: MODULE.load_from_checkpoint(FILE)",
        ) from None
