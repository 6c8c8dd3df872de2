"""Training on and evaluating an older run of ``lockstep lightning fit``, which has checkpoint files of Lightning's."""

from __future__ import annotations

import hashlib
import shlex
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from lockstep.engine.lightning.ckpt_file import read_file
from lockstep.engine.lightning.cluster import quiet_trainer
from lockstep.errors import TaskError, UnsupportedError
from lockstep.launch.lightning_cli import find_file
from lockstep.launch.run_claim import refuse_running
from lockstep.lightning.cli import LockstepCLI, run
from lockstep.tasks.trusted_tasks import known
from lockstep.telemetry.rundir import RunDir
from lockstep.telemetry.scalars import as_row


def resume(folder: RunDir, *, devices: str | Sequence[str] | None = None, **other: Any) -> int:
    """Train on from its latest checkpoint, in a folder beside its own; returns the exit code.

    Args:
        other: what only other runs can be given.

    Raises:
        RunFolderError: the run is still training. CheckpointError: it has no checkpoint.
        TaskError: its configuration is from elsewhere. UnsupportedError: it does not name its classes, or one of
            ``other`` is given.
    """
    refuse_running(folder)
    return run(_arguments(folder, "fit", find_file(folder), devices, other))


def evaluate(
    folder: RunDir, *, split: str, checkpoint: str | int, devices: str | None = None, **other: Any
) -> dict[str, Any]:
    """Metrics of a checkpoint on one device, as ``launch.api.evaluate`` has them. Raises as :func:`resume`."""
    file = find_file(folder, checkpoint)
    arguments = _arguments(folder, "validate" if split == "val" else "test", file, devices, other, one=True)
    quiet = ("--verbose", "false", "--trainer.logger", "false", "--trainer.enable_progress_bar", "false")
    with quiet_trainer():
        for message in (".*callbacks used to create the checkpoint.*", "The dirpath has changed.*"):
            warnings.filterwarnings("ignore", message)
        cli = LockstepCLI(args=[*arguments, *quiet])
    metrics = {name: float(value) for name, value in as_row(cli.trainer.callback_metrics).items()}
    return {"run": folder.read().id, "split": split, "step": read_file(file).step, "metrics": metrics}


def _arguments(
    folder: RunDir,
    subcommand: str,
    file: Path,
    devices: str | Sequence[str] | None,
    other: dict[str, Any],
    *,
    one: bool = False,
) -> list[str]:
    """The command line; ``one``: on one device."""
    kept = folder.cli_config_file
    arguments = [subcommand, "--config", str(kept), "--ckpt_path", str(file)]
    arguments += ["--run_dir", str(folder.path)] if subcommand == "fit" else []
    fix = shlex.join(["lockstep", "lightning", *arguments])
    given = [name for name, value in other.items() if value]
    if given:
        what = f"{given[0]} is not available for run {folder.read().id}, which `lockstep lightning fit` made"
        raise UnsupportedError(what, fix=f"use its flags: {fix}")
    if f"sha256:{hashlib.sha256(kept.read_bytes()).hexdigest()}" not in known():
        raise TaskError(
            f"{kept} was not written by a fit of yours on this machine",
            why="reading it imports the classes that it names, and a file from elsewhere could name anything",
            fix=f"if you trust it, run it yourself: {fix}",
        )
    settings = yaml.safe_load(kept.read_bytes())
    if "class_path" not in (settings.get("model") or {}):
        raise UnsupportedError(
            f"only the program that started run {folder.read().id} knows its classes",
            why="it passed the model's class to lockstep.lightning.cli.run()",
            fix=f"call run() there, with the arguments of: {fix}",
        )
    hardware = settings.get("hardware") or {}
    chosen = devices.split(",") if isinstance(devices, str) else devices or hardware.get("selected_devices")
    if one and devices is None:
        chosen = chosen and chosen[:1]
        own = settings.get("trainer", {}).get("devices", "auto") != "auto"
        arguments += ["--trainer.devices", "1", "--trainer.strategy", "auto"] if own else []
    return [*arguments, *([f"--hardware.selected_devices=[{','.join(chosen)}]"] if chosen else [])]
