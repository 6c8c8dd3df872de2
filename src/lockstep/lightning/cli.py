"""LightningCLI with Lockstep's hardware section, runs and launcher: ``lockstep lightning fit -c FILE``.

From Python, :func:`run` does the same, with the classes of a script if it gives them.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count, zip_longest
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import distributed

from lockstep.config import resolve as resolve_config
from lockstep.errors import CheckpointError, ConfigError, RunFolderError
from lockstep.hardware.world import read_world
from lockstep.launch.api import train
from lockstep.launch.local.on_ranks import RanksStopped, run_on_ranks
from lockstep.launch.run_claim import warn
from lockstep.lightning.ckpt_file import as_file, cannot_load, check_file, trainer_loads
from lockstep.lightning.cluster import agreed_logging, shared_ddp
from lockstep.lightning.configured import Hardware, HardwareCLI, changed
from lockstep.lightning.dataloaders import SharedBatches, cut_batches, evaluation_loader, replaced_loaders
from lockstep.lightning.module_task import DECIDED, ModuleConfig, ModuleTask
from lockstep.lightning.settings import OF_HARDWARE, SETTINGS, Resolved, resolve, settings_of
from lockstep.lightning.stored import Stored, stored_checkpoint
from lockstep.rundir.folder import RunDir
from lockstep.tasks.registry import find_class

_NONE = object()
#: Sections of a parsed ``fit`` that are not saved with the task of the run.
_NOT_KEPT = ("config", "ckpt_path", "weights_only", "run_dir", "hardware")


class Elsewhere(Exception):
    """Parsed options are run by ``start(cli_class, options)``, which returns an exit code, and not by their parser."""

    def __init__(self, start: Callable[[type[LockstepCLI], dict[str, Any]], int]) -> None:
        super().__init__()
        self.start = start


class WritePredictions(Callback):
    """Writes what ``predict_step`` returned to ``file``: a list in index order, or one for each of several loaders."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop = trainer.predict_loop
        ranks: list[Any] = [loop.predictions if loop.num_dataloaders > 1 else [loop.predictions]]
        if trainer.world_size > 1:
            predictions = ranks[0]
            ranks = [None] * trainer.world_size
            distributed.all_gather_object(ranks, predictions)
        if trainer.is_global_zero:
            # Batches are dealt to the ranks in turn.
            rounds = [zip_longest(*of_loader, fillvalue=_NONE) for of_loader in zip(*ranks, strict=True)]
            whole = [[batch for dealt in of_loader for batch in dealt if batch is not _NONE] for of_loader in rounds]
            self._file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(whole[0] if len(whole) == 1 else whole, self._file)
            print(f"predictions: {self._file}")


class LockstepCLI(HardwareCLI):
    """Sections ``model``, ``data``, ``trainer``, ``optimizer``, ``lr_scheduler`` and ``hardware``.

    Subclass it as a ``LightningCLI``. Use :func:`run` rather than the class itself, which raises :class:`Elsewhere`
    if a run trains the parsed parts, or several processes run them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._resolved = Resolved({}, 1)
        self._stored: Stored | None = None
        with ExitStack() as self._open:
            super().__init__(*args, **kwargs)

    def read_checkpoint_settings(self) -> None:
        subcommand = self.config.get("subcommand")
        if subcommand is None:
            return
        settings = self.config[subcommand]
        runs_dir = Path(settings.get("trainer.default_root_dir") or resolve_config({}).runs_dir)
        self._stored = stored = stored_checkpoint(settings.get("ckpt_path"), settings.run_dir, runs_dir)
        if stored is not None and subcommand == "fit":
            return
        if stored is not None:
            content = as_file(stored.load())
            named = settings.get("model.class_path") if self.subclass_mode_model else None
            if named and content.get("hyper_parameters"):  # LightningCLI needs the class beside its arguments
                content["hyper_parameters"] = {"_class_path": named, **content["hyper_parameters"]}
            folder = self._open.enter_context(TemporaryDirectory(prefix="lockstep-checkpoint-"))
            settings.ckpt_path = str(Path(folder, "module.ckpt"))
            torch.save(content, settings.ckpt_path)
        path = settings.get("ckpt_path")
        trusted = settings.get("weights_only") is False
        with cannot_load(path):
            check_file(path, None if trusted else settings.as_dict())
            try:
                super().read_checkpoint_settings()
            except UnpicklingError:
                if not trusted:  # such a file may hold more than Lightning looks for here
                    raise

    def before_instantiate_classes(self) -> None:
        if self.subcommand is None:
            return
        settings = self.config[self.subcommand]
        if settings.get("ckpt_path") is not None and settings.weights_only is None:
            settings.weights_only = True  # Lightning would run the code in one that comes from an address
        world = read_world(os.environ)
        hardware = Hardware(settings.hardware.selected_devices, settings.hardware.precision)
        trainer = {name: settings.trainer.get(name) for name in (*OF_HARDWARE, "num_nodes")}
        defaults = {name: self.parser_of(self.subcommand).get_default(f"trainer.{name}") for name in OF_HARDWARE}
        self._resolved = resolve(hardware, trainer, defaults, world)
        if self.subcommand == "fit":
            raise Elsewhere(partial(_fit, self, hardware, self._stored))
        if world.launcher == "none":
            for note in self._resolved.notes:
                warn(note.text)
            if self._resolved.ranks > 1:
                raise Elsewhere(partial(_run_on_ranks, self._resolved.ranks))

    def run_subcommand(self, subcommand: str) -> None:
        seed = int(self.setting("seed_everything") or 0)
        world = read_world(os.environ)

        def evaluation(loader: Any) -> Any:
            shared = evaluation_loader(loader, world, seed, drops_last=subcommand != "predict")  # as in Lightning
            if (text := cut_batches(shared)) and world.is_main:
                warn(text)
            return shared

        if subcommand == "predict":
            callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
            if not any(isinstance(callback, BasePredictionWriter) for callback in callbacks):
                run = None if self._stored is None else self._stored.run.path
                folder = Path(str(self.setting("run_dir") or run or self.trainer.default_root_dir))
                callbacks.append(WritePredictions(folder / "predictions.pt"))
            # Lightning cannot know that these show all samples.
            warnings.filterwarnings("ignore", f"You are using a custom batch sampler .{SharedBatches.__qualname__}.")
        owners = [self.datamodule, self.model]
        path = self.setting("ckpt_path")
        loaders = replaced_loaders(owners, lambda loader: loader, evaluation, seed=seed)
        with trainer_loads(path), loaders, agreed_logging(self.trainer):
            super().run_subcommand(subcommand)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        if self.subcommand is None:
            return super().instantiate_trainer(**kwargs)
        # The sampler of Lightning pads: some samples would count twice.
        arguments: dict[str, Any] = {**self._resolved.trainer, "use_distributed_sampler": False}
        strategy = arguments.get("strategy", self.setting("trainer", instantiated=True).strategy)
        arguments["strategy"] = shared_ddp(strategy, read_world(os.environ).size)
        try:
            return super().instantiate_trainer(**arguments | kwargs)
        except (MisconfigurationException, ModuleNotFoundError, ValueError) as error:
            raise ConfigError(
                "Lightning refuses the trainer section",
                why=str(error)[:500],
                fix="change the trainer or hardware settings that it names; `lockstep devices` lists devices",
            ) from error


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
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # classes are named as seen from here
    try:
        try:
            cli_class(**options)
            return 0
        except Elsewhere as asked:
            start = asked.start  # outside the handler, so that it is not the context of every later error
        return start(cli_class, options)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _run_on_ranks(ranks: int, cli_class: type[LockstepCLI], options: dict[str, Any]) -> int:
    """Let ``ranks`` processes run ``cli_class(**options)``. Raises as :func:`run`."""
    with TemporaryDirectory(prefix="lockstep-lightning-") as path:
        folder = RunDir.create(Path(path, "run"), resolve_config({}), run_id="run-00000000", command=sys.argv)
        try:
            run_on_ranks(_be_rank, cli_class, options, folder=folder, ranks=ranks, redirect=False)
        except RanksStopped as stopped:
            return stopped.exit_code
    return 0


def _be_rank(_: Any, cli_class: type[LockstepCLI], options: dict[str, Any]) -> None:
    cli_class(**options)


def _fit(
    cli: HardwareCLI, hardware: Hardware, stored: Stored | None, cli_class: type[LockstepCLI], options: dict[str, Any]
) -> int:
    """Train with the options of ``cli``, or resume ``stored``; return the exit code. Raises as :func:`run`."""
    settings = cli.config["fit"].as_dict()
    run_settings = settings_of(settings["trainer"], hardware)
    run_settings["training"]["seed"] = int(settings.get("seed_everything") or 0)
    run_settings["save_dir"] = _save_dir(settings["run_dir"], stored)
    sections = yaml.safe_load(cli.parser_of("fit").dump(cli.config["fit"], skip_none=False))
    trainer = {name: value for name, value in changed(sections["trainer"]).items() if name not in {*DECIDED, *SETTINGS}}
    sections = {name: value for name, value in sections.items() if name not in _NOT_KEPT and value is not None}
    section: dict[str, Any] = {"cli": {**sections, "trainer": trainer, "seed_everything": False}}
    file = settings.get("ckpt_path") if stored is None else None
    if file is not None:
        if not Path(file).is_file():
            raise CheckpointError(
                f"there is no checkpoint {file}",
                fix="name a run folder, one of its checkpoints, or a checkpoint file of Lightning's",
            )
        section |= {"ckpt_path": str(Path(file).absolute()), "weights_only": settings["weights_only"]}
    task = _task(cli, section, cli_class, options)
    if isinstance(task, str):
        run_settings["task"] = section
    try:
        return train(task, run_settings, resume=stored is not None).exit_code
    except RunFolderError as error:
        raise RunFolderError(error.what, why=error.why, fix=error.fix.replace("--save-dir", "--run_dir")) from None


def _task(
    cli: HardwareCLI, section: dict[str, Any], cli_class: type[LockstepCLI], options: dict[str, Any]
) -> str | ModuleTask:
    """The task by name, where every rank can find its classes; else an object."""
    options = {name: value for name, value in options.items() if name != "args"}
    model = options["model_class"]
    data = options["datamodule_class"]
    named = cli.subclass_mode_model or model is None
    path = str(cli.config["fit"].model.class_path) if named else f"{model.__module__}.{model.__qualname__}"
    name = ":".join(path.rsplit(".", 1))
    classes = [kind for kind in (model, data) if kind is not None]
    more = {name for name, value in options.items() if value is not None}
    more -= {"model_class", "datamodule_class", "parser_kwargs"}
    if cli_class is LockstepCLI and not more and all(map(_importable, classes)):
        if data is not None and not cli.subclass_mode_data:
            section["datamodule"] = f"{data.__module__}:{data.__qualname__}"
        return name
    model = model if isinstance(model, type) else find_class(name)
    attributes = {"module_class": model, "__module__": model.__module__, "__qualname__": model.__qualname__}
    kind: type[ModuleTask] = type(model.__name__, (ModuleTask,), attributes)
    if cli_class is not LockstepCLI:
        options["cli_class"] = cli_class
    return kind(ModuleConfig(**section), cli=options)


def _importable(kind: Any) -> bool:
    module = sys.modules.get(getattr(kind, "__module__", "__main__"))
    return kind.__module__ != "__main__" and getattr(module, kind.__qualname__, None) is kind


def _save_dir(run_dir: str | None, stored: Stored | None) -> str | None:
    """The folder of the run: that of the checkpoint, or ``run_dir``, with a number if another run is in it."""
    if stored is not None:
        if run_dir is not None and Path(run_dir).absolute() != stored.run.path:
            raise ConfigError(
                f"--run_dir {run_dir} is not the folder of the checkpoint",
                why=f"a run resumes in its folder, {stored.run.path}",
                fix="leave --run_dir out; or export the checkpoint (`lockstep export`) and give its module.ckpt",
            )
        return str(stored.run.path)
    if run_dir is None or not (Path(run_dir) / "run.json").exists() or read_world(os.environ).from_outside:
        return run_dir
    free = next(name for name in (f"{Path(run_dir)}-{number}" for number in count(2)) if not Path(name).exists())
    warn(f"{run_dir} has a run already, so this one is in {free}; --ckpt_path {run_dir} resumes it")
    return free
