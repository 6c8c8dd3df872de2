"""LightningCLI with Lockstep's hardware section, run folder and launcher: ``lockstep lightning fit -c FILE``.

From Python, :func:`run` does the same, with a script's own classes if it gives them.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter, Checkpoint, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser
from torch import distributed

from lockstep._compat.lightning_cli import OpenCLI
from lockstep.engine.lightning.cluster import shared_ddp
from lockstep.engine.lightning.dataloaders import SharedBatches, evaluation_loader, replaced_loaders
from lockstep.errors import ConfigError
from lockstep.hardware.world import read_world
from lockstep.launch.local.signals import exit_code
from lockstep.launch.run_claim import claimed, warn
from lockstep.lightning.callbacks import (
    ConfigurationCheck,
    DeviceMonitor,
    JSONMetricsLogger,
    LearningRate,
    RunStatus,
    StopOnSignal,
)
from lockstep.lightning.folder import fit_folder, outcome_recorded, remember_configuration
from lockstep.lightning.hardware import DECIDED, Hardware, Resolved, resolve
from lockstep.lightning.loading import check_is_file, refuse_other_classes, told_clearly
from lockstep.lightning.order import TrainingOrder
from lockstep.lightning.ranks import run_in_ranks
from lockstep.telemetry.loggers import tensorboard_wanted
from lockstep.telemetry.rundir import RunDir

CONFIG_FILE = "cli_config.yaml"
_NONE = object()


class RanksNeeded(Exception):
    """The configuration is for several processes, and this one is alone.

    ``run_dir``: of a fit, its folder; ``claim``: on it, until the ranks have ended.
    """

    def __init__(self, ranks: int, run_dir: RunDir | None, claim: ExitStack) -> None:
        super().__init__(ranks, run_dir)
        self.ranks, self.run_dir, self.claim = ranks, run_dir, claim


class WritePredictions(Callback):
    """Writes what ``predict_step`` returned to ``file``: a list in index order, or one for each of several loaders."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop = trainer.predict_loop
        ranks: list[Any] = [loop.predictions if loop.num_dataloaders > 1 else [loop.predictions]]
        if trainer.world_size > 1:
            own, ranks = ranks[0], [None] * trainer.world_size
            distributed.all_gather_object(ranks, own)
        if trainer.is_global_zero:
            # Batches are dealt to the ranks in turn.
            rounds = [zip_longest(*of_loader, fillvalue=_NONE) for of_loader in zip(*ranks, strict=True)]
            whole = [[batch for dealt in found for batch in dealt if batch is not _NONE] for found in rounds]
            self._file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(whole[0] if len(whole) == 1 else whole, self._file)
            print(f"predictions: {self._file}")


class LockstepCLI(OpenCLI):
    """Sections ``model``, ``data``, ``trainer``, ``optimizer``, ``lr_scheduler`` and ``hardware``.

    Subclass it as a ``LightningCLI``. Use :func:`run` rather than the class itself: it starts the ranks.

    Args:
        run_dir: the folder that a launcher has made for this run.
        args: what follows the program's name, or the same as nested values.

    Raises:
        RanksNeeded: several processes are to run this.
        UsageError: wrong hardware or run folder.
    """

    def __init__(self, *args: Any, run_dir: RunDir | None = None, **kwargs: Any) -> None:
        self.run_dir = run_dir
        self.stop = StopOnSignal()
        self._resolved = Resolved({}, 1)
        kwargs = {"save_config_kwargs": {"config_filename": CONFIG_FILE, "overwrite": True}} | kwargs
        with ExitStack() as self._claim:
            super().__init__(*args, **kwargs)

    @property
    def exit_code(self) -> int:
        """0, or 128 and the number of the signal that stopped the training."""
        return 0 if self.stop.stopped_by is None else exit_code(self.stop.stopped_by)

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_core_arguments_to_parser(parser)
        parser.add_class_arguments(Hardware, "hardware")
        parser.add_argument(
            "--run_dir", type=str | None, default=None, help="Run folder of a fit. Default: a new one in runs/."
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        # As in Lightning, but without its warning about a program that has arguments itself.
        self.config = parser.parse_object(args) if isinstance(args, Mapping) else parser.parse_args(args)

    def read_checkpoint_settings(self) -> None:
        settings = self.config[self.config.subcommand]
        path = settings.get("ckpt_path")
        check_is_file(path)
        if settings.get("weights_only") is False:
            with suppress(UnpicklingError):  # it may hold more than Lightning looks for here
                super().read_checkpoint_settings()
            return
        with told_clearly(path):
            refuse_other_classes(path, settings.as_dict())
            super().read_checkpoint_settings()

    def before_instantiate_classes(self) -> None:
        assert self.subcommand is not None, "ranks are started for a subcommand"
        settings = self.config[self.subcommand]
        if settings.get("ckpt_path") is not None and settings.weights_only is None:
            settings.weights_only = True  # Lightning would run the code in one that comes from an address
        world = read_world(os.environ)
        hardware = Hardware(settings.hardware.selected_devices, settings.hardware.precision)
        trainer = {name: settings.trainer.get(name) for name in (*DECIDED, "num_nodes")}
        defaults = {name: self.parser_of(self.subcommand).get_default(f"trainer.{name}") for name in DECIDED}
        self._resolved = resolve(hardware, trainer, defaults, world)
        if self.subcommand == "fit" and self.run_dir is None:
            self.run_dir = fit_folder(settings.run_dir, settings.get("ckpt_path"), self._model_name(settings), world)
            if self.run_dir is not None and world.is_main:
                self._claim_folder(self.run_dir)
        if world.launcher == "none":
            for note in self._resolved.notes:
                warn(note.text)
            if self._resolved.ranks > 1:
                raise RanksNeeded(self._resolved.ranks, self.run_dir, self._claim.pop_all())

    def _claim_folder(self, run: RunDir) -> None:
        self._claim.enter_context(claimed(run))
        self._claim.enter_context(outcome_recorded(run))
        if self.save_config_callback is not None:
            kept = {"skip_none": False, "overwrite": True, "multifile": False}  # as Lightning keeps it beside its logs
            self.parser_of("fit").save(self.config["fit"], str(run.cli_config_file), **kept)
            remember_configuration(run)

    def _model_name(self, settings: Any) -> str:
        """Where the model's class is: ``package.module:Class``."""
        if self.subclass_mode_model:
            return ":".join(str(settings.model.class_path).rsplit(".", 1))
        return f"{self.model_type.__module__}:{self.model_type.__qualname__}"

    def run_subcommand(self, subcommand: str) -> None:
        seed, world = self.seed, read_world(os.environ)
        loaders = replaced_loaders(
            [self.datamodule, self.model],
            lambda loader: self.order.loader(loader, self.trainer, self.model),
            partial(evaluation_loader, world=world, seed=seed),
            seed=seed,
        )
        if subcommand == "predict":
            self._write_predictions()
            # Lightning cannot know that these show all samples.
            warnings.filterwarnings("ignore", f"You are using a custom batch sampler .{SharedBatches.__qualname__}.")
        with told_clearly(self.setting("ckpt_path")), loaders:
            super().run_subcommand(subcommand)

    def _write_predictions(self) -> None:
        """Into the run folder of the checkpoint, or else ``--run_dir`` or the Trainer's; unless a callback does it."""
        if any(isinstance(callback, BasePredictionWriter) for callback in self.trainer.callbacks):  # type: ignore[attr-defined]
            return
        checkpoint, given = (self.setting(name) for name in ("ckpt_path", "run_dir"))
        run = Path(checkpoint).absolute().parent.parent if checkpoint else None
        in_run = run is not None and (run / "run.json").exists()
        folder = Path(str(given or (run if in_run else self.trainer.default_root_dir)))
        self.trainer.callbacks.append(WritePredictions(folder / "predictions.pt"))  # type: ignore[attr-defined]

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        settings = self.setting("trainer", instantiated=True)
        # Lightning's own sampler pads and forgets where it was: some samples would count twice.
        arguments: dict[str, Any] = {**self._resolved.trainer, "use_distributed_sampler": False}
        arguments["strategy"] = shared_ddp(arguments.get("strategy", settings.strategy), read_world(os.environ).size)
        if self.subcommand == "fit":
            callbacks = list(settings.callbacks or [])
            arguments["callbacks"] = [self.order, *callbacks]
            if self.run_dir is not None:
                arguments["callbacks"] += self._listeners(self.run_dir, settings, callbacks)
                arguments |= self._places(self.run_dir, settings)
        try:
            return super().instantiate_trainer(**arguments | kwargs)
        except (MisconfigurationException, ModuleNotFoundError, ValueError) as error:
            raise ConfigError(
                "Lightning refuses the trainer section",
                why=str(error)[:500],
                fix="change the trainer or hardware settings that it names; `lockstep devices` lists what is here",
            ) from error

    @cached_property
    def order(self) -> TrainingOrder:
        """Of a fit's training samples."""
        return TrainingOrder(read_world(os.environ), self.seed)

    @property
    def seed(self) -> int:
        """Of the order of samples, of loader workers and of ``setup()``."""
        return int(self.setting("seed_everything") or 0)

    def _listeners(self, run: RunDir, settings: Any, callbacks: list[Callback]) -> list[Callback]:
        """The callbacks that write the run folder, except those that the user has given."""
        self.stop = next((c for c in callbacks if isinstance(c, StopOnSignal)), StopOnSignal(run.checkpoints))
        wanted: list[Callback] = [
            ConfigurationCheck(),
            RunStatus(run.path),
            JSONMetricsLogger(run.path),
            LearningRate(),
            DeviceMonitor(run.path),
            self.stop,
        ]
        if settings.enable_checkpointing is not False and not any(isinstance(c, Checkpoint) for c in callbacks):
            wanted.append(ModelCheckpoint(run.checkpoints, save_last=True))
        kinds = {type(callback) for callback in callbacks}
        return [callback for callback in wanted if type(callback) not in kinds]

    @staticmethod
    def _places(run: RunDir, settings: Any) -> dict[str, Any]:
        """Where the trainer writes; what the user has set stays."""
        arguments: dict[str, Any] = {}
        if settings.default_root_dir is None:
            arguments["default_root_dir"] = str(run.path)
        if settings.logger is None:
            from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

            kind = TensorBoardLogger if tensorboard_wanted("auto") else CSVLogger
            arguments["logger"] = kind(run.path, name="", version="logs")
        return arguments


def run(
    args: Sequence[str] | Mapping[str, Any] | None = None,
    *,
    model_class: type[LightningModule] | None = None,
    datamodule_class: type[LightningDataModule] | None = None,
    cli_class: type[LockstepCLI] = LockstepCLI,
    **options: Any,
) -> int:
    """Run a subcommand of LightningCLI; returns its exit code: 0, or 130 or 143 after a stop.

    One device trains in this process. For several, Lockstep's launcher starts the ranks, and nothing of the
    caller is executed again: it may be a script without a main guard, a notebook or a server's thread.

    Args:
        args: as on the command line (``["fit", "-c", "cli_config.yaml"]``); ``None`` takes this process's.
        model_class: the model, so that the configuration has its arguments; ``None``: named by ``class_path``.
        datamodule_class: the data, likewise.
        options: further arguments of ``LightningCLI``.

    Raises:
        SystemExit: wrong arguments (code 2) or ``--help``, as ``argparse`` does.
        LockstepError: wrong hardware; or a rank failed.
    """
    tokens = sys.argv[1:] if args is None else args
    options |= {"model_class": model_class, "datamodule_class": datamodule_class}
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # classes are named as seen from here
    try:
        return cli_class(args=tokens, **options).exit_code
    except RanksNeeded as needed:
        with needed.claim:
            return run_in_ranks(needed.run_dir, needed.ranks, cli_class, {"args": tokens, **options})
    except KeyboardInterrupt:
        return exit_code(signal.SIGINT)
