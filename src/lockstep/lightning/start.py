"""``lockstep lightning fit``: from a parsed configuration to a run, or to an earlier run that resumes."""

from __future__ import annotations

import os
import sys
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from lockstep.engine.lightning.ckpt_file import as_file
from lockstep.engine.lightning.configured import Hardware, HardwareCLI, changed
from lockstep.engine.lightning.module_task import DECIDED, ModuleConfig, ModuleTask
from lockstep.errors import CheckpointError, ConfigError, RunFolderError
from lockstep.hardware.detect import detect_devices
from lockstep.hardware.world import read_world
from lockstep.launch.api import train
from lockstep.launch.finished.reopen import find_checkpoint
from lockstep.launch.run_claim import warn
from lockstep.lightning.settings import SETTINGS, settings_of
from lockstep.tasks.registry import find_class
from lockstep.telemetry.rundir import RunDir

#: Of a parsed ``fit``, what is not kept with the run's task.
_NOT_KEPT = ("config", "ckpt_path", "weights_only", "run_dir", "hardware")


class Stored(NamedTuple):
    """A checkpoint in a run folder."""

    run: RunDir
    name: str

    def as_file(self, file: Path, class_path: str | None) -> Path:
        """Write it as Lightning reads one; returns ``file``. Raises :class:`CheckpointError`.

        Args:
            class_path: the module's class, if the command line names it: LightningCLI needs it beside the arguments.
        """
        content = as_file(find_checkpoint(self.run, self.name))
        if class_path and content.get("hyper_parameters"):
            content["hyper_parameters"] = {"_class_path": class_path, **content["hyper_parameters"]}
        torch.save(content, file)
        return file


def stored_checkpoint(path: Any, run_dir: str | None) -> Stored | None:
    """What ``--ckpt_path`` names in a run folder: the folder, one of its checkpoints, or ``last`` in ``run_dir``.

    ``None`` for a file.
    """
    if path in ("best", "last") and run_dir is not None:
        return Stored(RunDir.open(Path(run_dir)), path)
    if not isinstance(path, str | Path) or not Path(path).is_dir():
        return None
    place = Path(path).absolute()
    if (place / "run.json").exists():
        return Stored(RunDir.open(place), "best")
    if (place.parent.parent / "run.json").exists():
        return Stored(RunDir.open(place.parent.parent), place.name.removeprefix("step-"))
    return None


class FitRequested(Exception):
    """A run is to train what ``cli`` has parsed; ``stored``: a checkpoint of the run to resume."""

    def __init__(self, cli: HardwareCLI, hardware: Hardware, stored: Stored | None) -> None:
        super().__init__()
        self.cli, self.hardware, self.stored = cli, hardware, stored


def train_fit(fit: FitRequested, cli_class: type[HardwareCLI] | None, options: dict[str, Any]) -> int:
    """Train, or resume; returns the exit code.

    Args:
        cli_class: the user's own; ``None``: that of ``lockstep lightning``.
        options: arguments of the class.

    Raises:
        LockstepError: settings that no run can have; or the run failed.
    """
    settings = fit.cli.config["fit"].as_dict()
    given = settings_of(settings["trainer"], fit.hardware, detect_devices())
    given["training"]["seed"] = int(settings.get("seed_everything") or 0)
    given["save_dir"] = _save_dir(settings["run_dir"], fit.stored)
    section: dict[str, Any] = {"cli": _sections(fit.cli)}
    file = settings.get("ckpt_path") if fit.stored is None else None
    if file is not None:
        if not Path(file).is_file():
            fix = "name a run folder, one of its checkpoints, or a checkpoint file of Lightning's"
            raise CheckpointError(f"there is no checkpoint {file}", fix=fix)
        section |= {"ckpt_path": str(Path(file).absolute()), "weights_only": settings["weights_only"]}
    task = _task(fit.cli, section, cli_class, options)
    if isinstance(task, str):
        given["task"] = section
    try:
        return train(task, given, resume=fit.stored is not None).exit_code
    except RunFolderError as error:
        raise RunFolderError(error.what, why=error.why, fix=error.fix.replace("--save-dir", "--run_dir")) from None


def _sections(cli: HardwareCLI) -> dict[str, Any]:
    """What makes module, data and the rest of the Trainer's arguments, as plain values."""
    kept = yaml.safe_load(cli.parser_of("fit").dump(cli.config["fit"], skip_none=False))
    trainer = {name: value for name, value in changed(kept["trainer"]).items() if name not in {*DECIDED, *SETTINGS}}
    kept = {name: value for name, value in kept.items() if name not in _NOT_KEPT and value is not None}
    return {**kept, "trainer": trainer, "seed_everything": False}


def _task(
    cli: HardwareCLI, section: dict[str, Any], cli_class: type[HardwareCLI] | None, options: dict[str, Any]
) -> str | ModuleTask:
    """The task by name, where every rank can find its classes; else an object."""
    model, data = options["model_class"], options["datamodule_class"]
    named = cli.subclass_mode_model or model is None
    path = str(cli.config["fit"].model.class_path) if named else f"{model.__module__}.{model.__qualname__}"
    name = ":".join(path.rsplit(".", 1))
    more = {key for key, value in options.items() if value is not None} - {
        *("model_class", "datamodule_class", "parser_kwargs")
    }
    if cli_class is None and not more and all(_importable(kind) for kind in (model, data) if kind is not None):
        if data is not None and not cli.subclass_mode_data:
            section["datamodule"] = f"{data.__module__}:{data.__qualname__}"
        return name
    model = model if isinstance(model, type) else find_class(name)
    own = {} if cli_class is None else {"cli_class": cli_class}
    where = {"__module__": model.__module__, "__qualname__": model.__qualname__}
    kind: type[ModuleTask] = type(model.__name__, (ModuleTask,), {"module_class": model, **where})
    return kind(ModuleConfig(**section), cli={**options, **own})


def _importable(kind: Any) -> bool:
    module = sys.modules.get(getattr(kind, "__module__", "__main__"))
    return kind.__module__ != "__main__" and getattr(module, kind.__qualname__, None) is kind


def _save_dir(given: str | None, stored: Stored | None) -> str | None:
    """The folder of the run: that of the checkpoint, or the given one with a number where another run is in it."""
    if stored is not None:
        if given is not None and Path(given).absolute() != stored.run.path:
            raise ConfigError(
                f"--run_dir {given} is not the folder of the checkpoint",
                why=f"a run resumes in its own folder, {stored.run.path}",
                fix="leave --run_dir out; or export the checkpoint (`lockstep export`) and give its module.ckpt",
            )
        return str(stored.run.path)
    if given is None or not (Path(given) / "run.json").exists() or read_world(os.environ).from_outside:
        return given
    free = next(name for name in (f"{Path(given)}-{number}" for number in count(2)) if not Path(name).exists())
    warn(f"{given} has a run already, so this one is in {free}; --ckpt_path {given} resumes it")
    return free
