"""Checkpoints of ``lockstep lightning fit``: files of Lightning's ``ModelCheckpoint`` in the run folder."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from lockstep.checkpoint.store import Snapshot
from lockstep.errors import CheckpointError
from lockstep.telemetry.rundir import RunDir


def newest_checkpoint(run: RunDir) -> Path | None:
    """The newest one in the run folder; the run's own callbacks may save elsewhere."""
    found: list[tuple[float, Path]] = []
    for file in run.checkpoints.glob("*.ckpt"):
        with contextlib.suppress(OSError):  # the run may just have removed it
            found.append((file.stat().st_mtime, file))
    return max(found)[1] if found else None


def load_checkpoint(run: RunDir, checkpoint: str | int = "last") -> tuple[Path, Snapshot]:
    """The file that ``best`` (by the run's ``ModelCheckpoint``), ``last`` or a step means, and its content.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    found = newest_checkpoint(run)
    if isinstance(checkpoint, int):
        found = next(iter(sorted(run.checkpoints.glob(f"*step={checkpoint}.ckpt"))), None)
    if found is not None:
        try:
            content = _read(found)
            best = _best_of(content["callbacks"]) if checkpoint == "best" else None
            if best is not None:
                found, content = best, _read(best)
            return found, Snapshot(content["global_step"], content.pop("state_dict"), {"lightning": content}, {})
        except Exception as error:  # whatever is wrong with the file
            raise CheckpointError(f"cannot load {found}", why=f"{type(error).__name__}: {str(error)[:300]}") from error
    have = ", ".join(sorted(file.name for file in run.checkpoints.glob("*.ckpt"))) or "none"
    raise CheckpointError(
        f"run {run.read().id} has no checkpoint {checkpoint!r}",
        why=f"in {run.checkpoints}: {have}",
        fix="name best, last or the step of one of these; `lockstep lightning … --ckpt_path FILE` reads any other",
    )


def _read(file: Path) -> Any:
    import torch

    return torch.load(file, map_location="cpu", weights_only=True)


def _best_of(callbacks: dict[str, Any]) -> Path | None:
    """The best file by the first ``ModelCheckpoint`` that monitors a metric."""
    for state in callbacks.values():
        if isinstance(state, dict) and state.get("monitor") and Path(state.get("best_model_path") or "/").is_file():
            return Path(state["best_model_path"])
    return None
