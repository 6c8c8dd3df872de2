"""Training a user's ``LightningModule``: with Lockstep's order, run folder and launcher, or a ``Trainer`` to call."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.api.run import Run
from lockstep.api.settings import mapping_of
from lockstep.api.train import train
from lockstep.checkpoint.store import CheckpointStore
from lockstep.config import RunConfig, resolve
from lockstep.config.load import merge
from lockstep.errors import ConfigError
from lockstep.hardware.detect import detect_devices
from lockstep.hardware.resolve import choose_default, resolve_hardware
from lockstep.lightning.module_task import ModuleTask
from lockstep.lightning.settings import DECIDED, refuse_arguments
from lockstep.rundir.folder import RunDir

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer


def fit(
    model: LightningModule,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    datamodule: LightningDataModule | None = None,
    *,
    hardware: Mapping[str, Any] | None = None,
    config: RunConfig | Mapping[str, Any] | None = None,
    trainer: Mapping[str, Any] | None = None,
    resume: bool = False,
    **settings: Any,
) -> Run:
    """Train ``model`` on the devices of ``hardware``; returns when the run has ended. ``model`` then has its weights.

    The first arguments are those of ``Trainer.fit``. Model and data run unchanged on Lightning's Trainer. One device
    trains in this process, several in new processes that share nothing with it, so this may be called from a
    script without a main guard, a notebook, a thread or a server; callbacks then have what their ``state_dict`` saves.
    Promised are the order of training samples (Lockstep's: no ``DistributedSampler``, no padding, resumed anywhere on
    any number of ranks), that each validation sample counts once, and the run folder. Losses are the means that
    the module computes, with its denominators.

    Args:
        model: its ``configure_optimizers`` decides optimizer and schedule.
        train_dataloaders: or a ``LightningDataModule``; ``None`` when ``model`` has ``train_dataloader`` itself.
        hardware: the section ``hardware``: ``{"selected_devices": ["gpu:0", "gpu:1"], "precision": "bf16-mixed"}``.
        config: other settings that differ from the defaults: ``{"training": {"epochs": 5}, "save_dir": "run"}``.
            The batch size per device is the DataLoader's.
        trainer: more arguments of the ``Trainer``: callbacks, loggers, a profiler.
        resume: resume the unfinished run in ``save_dir``; on a fresh folder just start.
        settings: the short names of :func:`lockstep.train`: ``devices="gpu:0,gpu:1", epochs=5``.

    Raises:
        UsageError: before anything starts. RunError: when the run fails.
    """
    run_settings = mapping_of(config, settings)
    if hardware is not None:
        if run_settings.get("hardware"):
            raise ConfigError("hardware is given twice", fix="leave it out of config, and leave out devices=")
        run_settings = merge(run_settings, {"hardware": dict(hardware)})
    data = _data_of(model, train_dataloaders, val_dataloaders, datamodule)
    task = ModuleTask(module=model, datamodule=data, trainer=dict(trainer or {}))
    run = train(task, run_settings, resume=resume)
    # Other processes may have trained it, or an earlier attempt, which left nothing to do.
    folder = RunDir.open(run.run_dir)
    store = CheckpointStore(folder.checkpoints)
    step = store.step_of("last")
    if step is not None:
        snapshot = store.load(step)
        model.load_state_dict(snapshot.model, strict=model.strict_loading)
        if (folder.read().placement or {}).get("world_size", 1) > 1:
            _load_callbacks(task.trainer_arguments.get("callbacks", []), snapshot.trainer["lightning"])
    return run


def _load_callbacks(callbacks: list[Any], state: Mapping[str, Any]) -> None:
    """Give callbacks the state that other processes have trained them to."""
    saved = state.get("callbacks", {})
    for callback in callbacks:
        if callback.state_key in saved:
            if getattr(callback, "dirpath", "") is None:  # a ModelCheckpoint would warn of another folder
                callback.dirpath = saved[callback.state_key].get("dirpath")
            callback.load_state_dict(deepcopy(saved[callback.state_key]))


def _data_of(
    model: LightningModule, train: Any, val: Any, datamodule: LightningDataModule | None
) -> LightningDataModule | None:
    """Return the data module, or one with these loaders, as ``Trainer.fit`` takes them: the others are the model's."""
    from lightning.pytorch import LightningDataModule

    from lockstep.lightning.dataloaders import defines

    if isinstance(train, LightningDataModule):
        train, datamodule = datamodule, train
    loaders = {"train_dataloader": train, "val_dataloader": val}
    hooks: dict[str, Any] = {
        name: (lambda _, loader=loader: loader) for name, loader in loaders.items() if loader is not None
    }
    if not hooks:
        return datamodule
    if datamodule is not None:
        raise ConfigError("a data module and loaders are both given", fix="leave one of the two out")
    for name in ("val_dataloader", "test_dataloader", "predict_dataloader"):
        if name not in hooks and defines(model, name):
            hook = getattr(model, name)
            hooks[name] = lambda _, hook=hook: hook()
    return type("GivenLoaders", (LightningDataModule,), hooks)()  # type: ignore[no-any-return]


#: Arguments that ``build_trainer`` takes from the section ``training``.
_OF_TRAINING = ("max_epochs", "max_steps", "accumulate_grad_batches", "gradient_clip_val")


def build_trainer(run_dir: Path | str, config: Mapping[str, Any]) -> Trainer:
    """Build a ``Trainer`` on the devices of ``config["hardware"]``, with ``run_dir`` as its root.

    With several devices its strategy is ``ddp``: Lightning then starts the other processes by running the
    script again, unless a launcher has started them. :func:`lockstep.lightning.fit` runs nothing again.

    Args:
        run_dir: where the Trainer's logs and checkpoints go.
        config: ``{"hardware": {"selected_devices": ["gpu:0"], "precision": "32"}}``; without devices the first
            GPU, else the CPU. ``config["trainer"]`` has more arguments of the ``Trainer``; of ``config["training"]``
            it takes ``epochs``, ``max_steps``, ``accumulate`` and ``max_grad_norm``. Other sections are left alone.

    Raises:
        DeviceError: an empty selection, or a device that is malformed, absent or named twice.
        ConfigError: an unknown key or value of the hardware, or a Trainer argument that the devices decide.
    """
    from lightning.pytorch import Trainer

    hardware = resolve({"hardware": config.get("hardware") or {}}).hardware
    detected = detect_devices()
    selected = hardware.selected_devices
    if selected is None:
        selected = choose_default(detected).devices
    decided = {**resolve_hardware(list(selected), detected), "precision": hardware.precision}
    training = config.get("training") or {}
    values = {name: training.get(DECIDED[name].removeprefix("training.")) for name in _OF_TRAINING}
    arguments = {name: value for name, value in values.items() if value is not None} | (config.get("trainer") or {})
    refuse_arguments(arguments.keys() & {*decided, "default_root_dir"})
    return Trainer(**decided, **arguments, default_root_dir=run_dir)
