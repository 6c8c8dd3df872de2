"""LightningCLI with Lockstep's hardware section, runs and launcher: ``lockstep lightning fit -c FILE``.

From Python, :func:`run` does the same, with a script's own classes if it gives them.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import zip_longest
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import distributed

from lockstep.config import resolve as resolve_config
from lockstep.engine.lightning.ckpt_file import check_is_file, refuse_other_classes, told_clearly
from lockstep.engine.lightning.cluster import shared_ddp
from lockstep.engine.lightning.configured import Hardware, HardwareCLI
from lockstep.engine.lightning.dataloaders import SharedBatches, evaluation_loader, replaced_loaders
from lockstep.errors import ConfigError
from lockstep.hardware.world import read_world
from lockstep.launch.local.on_ranks import RanksStopped, run_on_ranks
from lockstep.launch.local.signals import exit_code
from lockstep.launch.local.worker import Rank
from lockstep.launch.run_claim import warn
from lockstep.lightning.settings import OF_HARDWARE, Resolved, resolve
from lockstep.lightning.start import FitRequested, Stored, stored_checkpoint, train_fit
from lockstep.telemetry.rundir import RunDir

_NONE = object()


class RanksNeeded(Exception):
    """The configuration is for ``ranks`` processes, and this one is alone."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.ranks = ranks


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


class LockstepCLI(HardwareCLI):
    """Sections ``model``, ``data``, ``trainer``, ``optimizer``, ``lr_scheduler`` and ``hardware``.

    Subclass it as a ``LightningCLI``. Use :func:`run` rather than the class itself: it trains, and starts the ranks.

    Args:
        args: what follows the program's name, or the same as nested values.

    Raises:
        FitRequested: a run is to train this. RanksNeeded: several processes are to run this.
        UsageError: wrong hardware.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._resolved = Resolved({}, 1)
        self._stored: Stored | None = None
        with ExitStack() as self._open:
            super().__init__(*args, **kwargs)

    def read_checkpoint_settings(self) -> None:
        if self.only_parts:
            return
        settings = self.config[self.config.subcommand]
        self._stored = stored_checkpoint(settings.get("ckpt_path"), settings.run_dir)
        if self._stored is not None and self.config.subcommand == "fit":
            return
        if self._stored is not None:
            folder = self._open.enter_context(TemporaryDirectory(prefix="lockstep-checkpoint-"))
            named = settings.get("model.class_path") if self.subclass_mode_model else None
            settings.ckpt_path = str(self._stored.as_file(Path(folder, "module.ckpt"), named))
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
        if self.only_parts:
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
            raise FitRequested(self, hardware, self._stored)
        if world.launcher == "none":
            for note in self._resolved.notes:
                warn(note.text)
            if self._resolved.ranks > 1:
                raise RanksNeeded(self._resolved.ranks)

    def run_subcommand(self, subcommand: str) -> None:
        if self.only_parts:
            return
        seed = int(self.setting("seed_everything") or 0)
        evaluation = partial(evaluation_loader, world=read_world(os.environ), seed=seed)
        if subcommand == "predict":
            self._write_predictions()
            # Lightning cannot know that these show all samples.
            warnings.filterwarnings("ignore", f"You are using a custom batch sampler .{SharedBatches.__qualname__}.")
        owners = [self.datamodule, self.model]
        with told_clearly(self.setting("ckpt_path")), replaced_loaders(owners, lambda own: own, evaluation, seed=seed):
            super().run_subcommand(subcommand)

    def _write_predictions(self) -> None:
        """Into the run folder of the checkpoint, or else ``--run_dir`` or the Trainer's; unless a callback does it."""
        if any(isinstance(callback, BasePredictionWriter) for callback in self.trainer.callbacks):  # type: ignore[attr-defined]
            return
        run = None if self._stored is None else self._stored.run.path
        folder = Path(str(self.setting("run_dir") or run or self.trainer.default_root_dir))
        self.trainer.callbacks.append(WritePredictions(folder / "predictions.pt"))  # type: ignore[attr-defined]

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        if self.only_parts:
            return super().instantiate_trainer(**kwargs)
        # Lightning's own sampler pads: some samples would count twice.
        arguments: dict[str, Any] = {**self._resolved.trainer, "use_distributed_sampler": False}
        strategy = arguments.get("strategy", self.setting("trainer", instantiated=True).strategy)
        arguments["strategy"] = shared_ddp(strategy, read_world(os.environ).size)
        try:
            return super().instantiate_trainer(**arguments | kwargs)
        except (MisconfigurationException, ModuleNotFoundError, ValueError) as error:
            raise ConfigError(
                "Lightning refuses the trainer section",
                why=str(error)[:500],
                fix="change the trainer or hardware settings that it names; `lockstep devices` lists what is here",
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
        options: further arguments of ``LightningCLI``.

    Raises:
        SystemExit: wrong arguments (code 2) or ``--help``, as ``argparse`` does.
        LockstepError: wrong hardware or settings; or a rank failed.
    """
    tokens = sys.argv[1:] if args is None else args
    options |= {"model_class": model_class, "datamodule_class": datamodule_class}
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # classes are named as seen from here
    try:
        try:
            cli_class(args=tokens, **options)
            return 0
        except (FitRequested, RanksNeeded) as asked:
            wanted = asked  # outside the handler, so that it is not the context of every later error
        if isinstance(wanted, FitRequested):
            return train_fit(wanted, None if cli_class is LockstepCLI else cli_class, options)
        return _run_on_ranks(wanted.ranks, cli_class, {"args": tokens, **options})
    except KeyboardInterrupt:
        return exit_code(signal.SIGINT)


def _run_on_ranks(ranks: int, cli_class: type[LockstepCLI], arguments: dict[str, Any]) -> int:
    """Let ``ranks`` processes run ``cli_class(**arguments)``; returns the exit code. Raises as :func:`run`."""
    with TemporaryDirectory(prefix="lockstep-lightning-") as path:
        folder = RunDir.create(Path(path, "run"), resolve_config({}), run_id="run-00000000", command=sys.argv)
        try:
            run_on_ranks(_be_rank, cli_class, arguments, folder=folder, ranks=ranks, redirect=False)
        except RanksStopped as stopped:
            return stopped.exit_code
    return 0


def _be_rank(_: Rank, cli_class: type[LockstepCLI], arguments: dict[str, Any]) -> None:
    cli_class(**arguments)
