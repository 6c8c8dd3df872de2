"""Checkpoints of older runs of ``lockstep lightning fit``: files of Lightning's in the run folder."""

from __future__ import annotations

import contextlib
from pathlib import Path

from lockstep.checkpoint.store import Snapshot
from lockstep.engine.lightning.ckpt_file import read_file
from lockstep.errors import CheckpointError
from lockstep.telemetry.rundir import RunDir


def newest_checkpoint(run: RunDir) -> Path | None:
    """The newest one in the run folder; the run's own callbacks may save elsewhere."""
    found: list[tuple[float, Path]] = []
    for file in run.checkpoints.glob("*.ckpt"):
        with contextlib.suppress(OSError):  # the run may just have removed it
            found.append((file.stat().st_mtime, file))
    return max(found)[1] if found else None


def find_file(run: RunDir, checkpoint: str | int = "last") -> Path:
    """The file that ``best`` (by the run's ``ModelCheckpoint``), ``last`` or a step means.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    found = newest_checkpoint(run)
    if isinstance(checkpoint, int):
        found = next(iter(sorted(run.checkpoints.glob(f"*step={checkpoint}.ckpt"))), None)
    elif found is not None and checkpoint == "best":
        found = _best_of(read_file(found)) or found
    if found is not None:
        return found
    have = ", ".join(sorted(file.name for file in run.checkpoints.glob("*.ckpt"))) or "none"
    raise CheckpointError(
        f"run {run.read().id} has no checkpoint {checkpoint!r}",
        why=f"in {run.checkpoints}: {have}",
        fix="name best, last or the step of one of these; `lockstep lightning … --ckpt_path FILE` reads any other",
    )


def _best_of(newest: Snapshot) -> Path | None:
    """The best file by the first ``ModelCheckpoint`` that monitors a metric."""
    for state in newest.trainer["lightning"].get("callbacks", {}).values():
        if isinstance(state, dict) and state.get("monitor") and Path(state.get("best_model_path") or "/").is_file():
            return Path(state["best_model_path"])
    return None
