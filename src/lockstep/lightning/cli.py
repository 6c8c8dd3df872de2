"""LightningCLI with Lockstep's hardware section, runs and launcher: ``lockstep lightning fit -c FILE``.

From Python, :func:`run` does the same, with the classes of a script if it gives them.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import LightningDataModule, LightningModule

from lockstep.errors import ConfigError, RunFolderError
from lockstep.hardware.world import read_world
from lockstep.launch.api import train
from lockstep.launch.run_claim import warn
from lockstep.lightning.module_task import ModuleConfig, ModuleTask
from lockstep.lightning.parts import FitRequested, LockstepCLI
from lockstep.lightning.settings import DECIDED, SETTINGS, changed, settings_of
from lockstep.lightning.stored import Stored
from lockstep.tasks.registry import find_class

#: Sections of a parsed ``fit`` that are not saved with the task of the run.
_NOT_KEPT = ("config", "ckpt_path", "weights_only", "run_dir", "hardware")


def run(
    args: Sequence[str] | Mapping[str, Any] | None = None,
    *,
    model_class: type[LightningModule] | None = None,
    datamodule_class: type[LightningDataModule] | None = None,
    cli_class: type[LockstepCLI] = LockstepCLI,
    **options: Any,
) -> int:
    """Run a subcommand of LightningCLI; returns its exit code: 0, or 130 or 143 after a stop.

    ``fit`` is a run as ``lockstep train`` has it. One device trains in this process. For several, Lockstep's launcher
    starts the ranks, and nothing of the caller is executed again: it may be a script without a main guard, a notebook
    or a server's thread.

    Args:
        args: as on the command line (``["fit", "-c", "cli_config.yaml"]``); ``None`` takes this process's.
        model_class: the model, so that the configuration has its arguments; ``None``: named by ``class_path``.
        datamodule_class: the data, likewise.
        cli_class: a subclass of :class:`LockstepCLI`, which may have more arguments.
        options: further arguments of ``LightningCLI``.

    Raises:
        SystemExit: wrong arguments (code 2) or ``--help``, as ``argparse`` does.
        LockstepError: wrong hardware or settings; or a rank failed.
    """
    if LockstepCLI not in cli_class.__mro__:
        raise ConfigError(
            f"cli_class={cli_class.__name__} is not a LockstepCLI",
            why="it lacks options such as --run_dir",
            fix="inherit from lockstep.lightning.cli.LockstepCLI",
        )
    options |= {"args": sys.argv[1:] if args is None else args}
    options |= {"model_class": model_class, "datamodule_class": datamodule_class}
    working_folder = str(Path.cwd())
    if working_folder not in sys.path:
        sys.path.insert(0, working_folder)  # classes are named as seen from here
    try:
        try:
            cli_class(**options)
            return 0
        except FitRequested as request:
            cli = request.cli
        return _fit(cli, options)  # outside the handler, so that the request is not the context of every later error
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _fit(cli: LockstepCLI, options: dict[str, Any]) -> int:
    """Train, or resume a run; return the exit code. Raises as :func:`run`."""
    settings = cli.config["fit"].as_dict()
    run_settings = settings_of(settings["trainer"], cli.hardware)
    run_settings["training"]["seed"] = int(settings.get("seed_everything") or 0)
    run_settings["save_dir"] = _save_dir(settings["run_dir"], cli.stored)
    sections = yaml.safe_load(cli.parser_of("fit").dump(cli.config["fit"], skip_none=False))
    trainer = {name: value for name, value in changed(sections["trainer"]).items() if name not in {*DECIDED, *SETTINGS}}
    sections = {name: value for name, value in sections.items() if name not in _NOT_KEPT and value is not None}
    section: dict[str, Any] = {"cli": {**sections, "trainer": trainer, "seed_everything": False}}
    task = _task(cli, section, options)
    if isinstance(task, str):
        run_settings["task"] = section
    try:
        return train(task, run_settings, resume=cli.stored is not None).exit_code
    except RunFolderError as error:
        raise RunFolderError(error.what, why=error.why, fix=error.fix.replace("--save-dir", "--run_dir")) from None


def _task(cli: LockstepCLI, section: dict[str, Any], options: dict[str, Any]) -> str | ModuleTask:
    """Return the task by name, where every rank can find its classes; else an object."""
    options = {name: value for name, value in options.items() if name != "args"}
    model = options["model_class"]
    data = options["datamodule_class"]
    named = cli.subclass_mode_model or model is None
    path = str(cli.config["fit"].model.class_path) if named else f"{model.__module__}.{model.__qualname__}"
    name = ":".join(path.rsplit(".", 1))
    classes = [kind for kind in (model, data) if kind is not None]
    more = {name for name, value in options.items() if value is not None}
    more -= {"model_class", "datamodule_class", "parser_kwargs"}
    if type(cli) is LockstepCLI and not more and all(map(_importable, classes)):
        if data is not None and not cli.subclass_mode_data:
            section["datamodule"] = f"{data.__module__}:{data.__qualname__}"
        return name
    model = model if isinstance(model, type) else find_class(name)
    attributes = {"module_class": model, "__module__": model.__module__, "__qualname__": model.__qualname__}
    kind: type[ModuleTask] = type(model.__name__, (ModuleTask,), attributes)
    if type(cli) is not LockstepCLI:
        options["cli_class"] = type(cli)
    return kind(ModuleConfig.model_validate(section), cli=options)


def _importable(kind: Any) -> bool:
    module = sys.modules.get(getattr(kind, "__module__", "__main__"))
    return kind.__module__ != "__main__" and getattr(module, kind.__qualname__, None) is kind


def _save_dir(run_dir: str | None, stored: Stored | None) -> str | None:
    """Return the folder of the run: that of the checkpoint, or ``run_dir``, with a number if another run is in it."""
    if stored is not None:
        if run_dir is not None and Path(run_dir).absolute() != stored.run.path:
            raise ConfigError(
                f"--run_dir {run_dir} is not the folder of the checkpoint",
                why=f"a run resumes in its folder, {stored.run.path}",
                fix="leave --run_dir out",
            )
        return str(stored.run.path)
    if run_dir is None or not (Path(run_dir) / "run.json").exists() or read_world(os.environ).from_outside:
        return run_dir
    free = next(name for name in (f"{Path(run_dir)}-{number}" for number in count(2)) if not Path(name).exists())
    warn(f"{run_dir} has a run already, so this one is in {free}; --ckpt_path {run_dir} resumes it")
    return free
