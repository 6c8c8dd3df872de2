"""Runs of ``lockstep lightning fit``: only Lightning's commands can read their checkpoints."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path
from typing import Literal

from lockstep.errors import UnsupportedError
from lockstep.telemetry.rundir import RunDir


def refuse_lightning_cli(run: RunDir, verb: Literal["resume", "evaluate", "export"], *, split: str = "test") -> None:
    """Refuse to resume, evaluate or export a run of LightningCLI, and name the command that can.

    Args:
        split: of ``evaluate``: "test" or "val".

    Raises:
        UnsupportedError: it is such a run; the command to use instead.
    """
    if not run.cli_config_file.exists():
        return
    if verb == "resume":
        fix = _command(run, "fit", "--run_dir", str(run.path))
    elif verb == "evaluate":
        fix = _command(run, "validate" if split == "val" else "test")
    else:
        kind = run.read().task.rpartition(":")[2]
        fix = f"in Python: {kind}.load_from_checkpoint({_named(run)!r})"
    none_here = "" if newest_checkpoint(run) else f"; there is none in {run.checkpoints}"
    raise UnsupportedError(
        f"`lockstep {verb}` cannot read the checkpoints of run {run.read().id}",
        why=f"`lockstep lightning fit` made it, and its checkpoints are Lightning's{none_here}",
        fix=fix,
    )


def _command(run: RunDir, subcommand: str, *more: str) -> str:
    words = ["lockstep", "lightning", subcommand, "--config", str(run.cli_config_file), *more]
    command = shlex.join([*words, "--ckpt_path", _named(run)])
    if run.read().command[1:2] != ["lightning"]:
        command += " (or the program that started it, with these arguments, if it names the model's class itself)"
    return command


def newest_checkpoint(run: RunDir) -> Path | None:
    """The newest one in the run folder; the run's own callbacks may save elsewhere."""
    found: list[tuple[float, Path]] = []
    for file in run.checkpoints.glob("*.ckpt"):
        with contextlib.suppress(OSError):  # the run may just have removed it
            found.append((file.stat().st_mtime, file))
    return max(found)[1] if found else None


def _named(run: RunDir) -> str:
    return str(newest_checkpoint(run) or "YOUR_CHECKPOINT.ckpt")
