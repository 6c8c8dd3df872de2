"""LightningCLI with Lockstep's hardware section, and the objects that its sections make."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.cli import LightningArgumentParser

from lockstep._compat.lightning_cli import OpenCLI
from lockstep.config import DistributedConfig, HardwareConfig
from lockstep.config import resolve as resolve_config
from lockstep.errors import ConfigError, UnsupportedError
from lockstep.hardware.detect import detect_devices
from lockstep.hardware.resolve import resolve_placement
from lockstep.hardware.world import World, read_world
from lockstep.launch.run_claim import warn
from lockstep.lightning.ckpt_file import as_file, check_classes, module_fits
from lockstep.lightning.cluster import rank_arguments
from lockstep.lightning.dataloaders import evaluation_loader, replaced_loaders
from lockstep.lightning.settings import Hardware, as_list, changed, hardware_settings
from lockstep.lightning.stored import Stored, stored_checkpoint


class FitRequested(Exception):
    """The options of a ``fit`` are parsed in ``cli``, and a run trains with them."""

    def __init__(self, cli: LockstepCLI) -> None:
        super().__init__()
        self.cli = cli


class WritePredictions(Callback):
    """Writes what ``predict_step`` returned to ``file``: a list in index order, or one for each of several loaders."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(trainer.predict_loop.predictions, self._file)
        print(f"predictions: {self._file}")


class LockstepCLI(OpenCLI):
    """Sections ``model``, ``data``, ``trainer``, ``optimizer``, ``lr_scheduler`` and ``hardware``.

    Subclass it as a ``LightningCLI``. Use :func:`run` rather than the class itself, which raises :class:`FitRequested`
    for a ``fit``. With ``run=False`` it makes module, data module and, as ``trainer``, the arguments of the Trainer.

    Attributes:
        hardware: settings of a run for the devices that its sections name.
        stored: the checkpoint of a run that ``--ckpt_path`` names.
    """

    hardware: dict[str, Any]
    stored: Stored | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._placement: dict[str, Any] | None = None
        with ExitStack() as self._open:
            super().__init__(*args, **kwargs)

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_core_arguments_to_parser(parser)
        parser.usage = "%(prog)s [options]"  # an error would print a page of them before its message
        parser.add_class_arguments(Hardware, "hardware")
        parser.add_argument(
            "--run_dir", type=str | None, default=None, help="Run folder of a fit. Default: a new one in runs/."
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        # As in Lightning, but without its warning about a program that has arguments itself.
        self.config = parser.parse_object(args) if isinstance(args, Mapping) else parser.parse_args(args)

    def read_checkpoint_settings(self) -> None:
        subcommand = self.config.get("subcommand")
        if subcommand is None:
            return
        settings = self.config[subcommand]
        runs_dir = Path(settings.get("trainer.default_root_dir") or resolve_config({}).runs_dir)
        self.stored = stored = stored_checkpoint(settings.get("ckpt_path"), settings.run_dir, runs_dir)
        if stored is None or subcommand == "fit":
            return
        content = as_file(stored.load())
        check_classes(content, settings.as_dict())
        class_path = settings.get("model.class_path") if self.subclass_mode_model else None
        if class_path and content.get("hyper_parameters"):  # LightningCLI needs the class beside its arguments
            content["hyper_parameters"] = {"_class_path": class_path, **content["hyper_parameters"]}
        folder = self._open.enter_context(TemporaryDirectory(prefix="lockstep-checkpoint-"))
        settings.ckpt_path = str(Path(folder, "module.ckpt"))
        settings.weights_only = True
        torch.save(content, settings.ckpt_path)
        super().read_checkpoint_settings()

    def before_instantiate_classes(self) -> None:
        if self.subcommand is None:
            return
        settings = self.config[self.subcommand]
        world = read_world(os.environ)
        detected = detect_devices()
        self.hardware = hardware_settings(
            settings.trainer.as_dict(),
            Hardware(settings.hardware.selected_devices, settings.hardware.precision),
            detected,
            from_outside=world.from_outside,
        )
        if self.subcommand == "fit":
            raise FitRequested(self)
        config = HardwareConfig.model_validate(self.hardware)
        placement = resolve_placement(config, DistributedConfig(), world, detected)
        device = placement.devices[0]
        if world.size > 1:
            raise UnsupportedError(
                f"{self.subcommand} has one process, and {world.launcher} started {world.size}",
                fix="start it once",
            )
        for note in placement.notes:
            warn(note.text)
        if len(placement.devices) > 1:
            warn(f"{self.subcommand} uses one device: {device}")
        self._placement = {**placement.as_dict(), "devices": [device]}

    def run_subcommand(self, subcommand: str) -> None:
        seed = int(self.setting("seed_everything") or 0)

        def evaluation(loader: Any) -> Any:
            return evaluation_loader(loader, World(), seed, predicts=subcommand == "predict")

        if subcommand == "predict":
            callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
            if not any(isinstance(callback, BasePredictionWriter) for callback in callbacks):
                run = None if self.stored is None else self.stored.run.path
                folder = Path(str(self.setting("run_dir") or run or self.trainer.default_root_dir))
                callbacks.append(WritePredictions(folder / "predictions.pt"))
        owners = [self.datamodule, self.model]
        loaders = replaced_loaders(owners, evaluation, seed=seed)
        fits = nullcontext() if self.stored is None else module_fits(self.stored.run.path)
        with fits, loaders:
            super().run_subcommand(subcommand)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        if self._placement is None:
            self.trainer_class = dict  # type: ignore[assignment]
            return super().instantiate_trainer(**kwargs)
        arguments = rank_arguments(self._placement, World())
        arguments["plugins"] += as_list(self.setting("trainer", instantiated=True).plugins)
        try:
            return super().instantiate_trainer(**arguments | kwargs)
        except (MisconfigurationException, ModuleNotFoundError, ValueError) as error:
            raise ConfigError(
                "Lightning refuses the trainer section",
                why=str(error)[:500],
                fix="change the trainer or hardware settings that it names; `lockstep devices` lists devices",
            ) from error


def make_parts(sections: Mapping[str, Any], options: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Make module, data module and arguments of the Trainer from ``sections`` of LightningCLI.

    ``options``: ``cli_class``, a subclass of :class:`LockstepCLI`, and further arguments of this class.
    """
    kind: type[LockstepCLI] = options.get("cli_class", LockstepCLI)
    decided = {"args": deepcopy(dict(sections)), "run": False, "save_config_callback": None}
    cli = kind(**{name: value for name, value in (options | decided).items() if name != "cli_class"})
    return cli.model, cli.datamodule, changed(cli.trainer)  # type: ignore[arg-type]
