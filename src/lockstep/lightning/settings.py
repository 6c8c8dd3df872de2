"""Arguments of a ``Trainer`` and settings of a run; the sections ``hardware`` and ``trainer`` of LightningCLI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import timedelta
from inspect import signature
from typing import Any, Literal

from lockstep.errors import ConfigError, UnsupportedError
from lockstep.hardware.detect import Device

#: Arguments of the Trainer that the plan and the run's settings decide.
DECIDED = {
    "accelerator": "hardware.selected_devices",
    "devices": "hardware.selected_devices",
    "strategy": "hardware.selected_devices",
    "num_nodes": "a launcher such as torchrun",
    "precision": "hardware.precision",
    "max_epochs": "training.epochs",
    "max_steps": "training.max_steps",
    "max_time": "training.max_time_s",
    "min_epochs": "training.epochs and training.early_stopping_patience",
    "min_steps": "training.epochs and training.early_stopping_patience",
    "limit_train_batches": "training.max_steps; an epoch is the whole data set, which may be a torch.utils.data.Subset",
    "accumulate_grad_batches": "training.accumulate",
    "gradient_clip_val": "training.max_grad_norm",
    "use_distributed_sampler": "nothing: the order is Lockstep's",
    "sync_batchnorm": "distributed.sync_batchnorm",
    "default_root_dir": "save_dir",
    "fast_dev_run": "debug.fast_dev_run",
    "overfit_batches": "nothing",
    "barebones": "nothing",
}
#: Arguments that the hardware section decides; each may be set in ``trainer`` instead, but not beside it.
_OF_HARDWARE = ("accelerator", "devices", "strategy", "precision")
_SAME = "max_epochs max_steps max_time accumulate_grad_batches gradient_clip_val fast_dev_run sync_batchnorm"
#: Settings of a run for arguments of the Trainer.
SETTINGS = {
    **{name: DECIDED[name] for name in _SAME.split()},
    "log_every_n_steps": "telemetry.log_interval",
    "default_root_dir": "runs_dir",
}
_PRECISIONS = {"32-true": "32", "16": "16-mixed", "bf16": "bf16-mixed"}
_FINDS_UNUSED = "ddp_find_unused_parameters_true"
#: Lightning's names of strategies for devices that each have one rank, started by Lockstep.
_STRATEGIES = ("auto", "ddp", _FINDS_UNUSED, "ddp_find_unused_parameters_false")
#: More epochs than a run has time for.
_ENDLESS = 1_000_000


@dataclass
class Hardware:
    """Which devices to train on, and in what precision.

    Args:
        selected_devices: "cpu", "gpu:0", …; "all" alone means every GPU, else the CPU. "cpu" twice means two ranks on
            the CPU. Unset: gpu:0 if there is one, else cpu; unless trainer.accelerator, devices or strategy say it.
        precision: 32, 16-mixed, bf16-mixed or bf16-true. With the section left out, trainer.precision may say another,
            and the devices stay those of the default.
    """

    selected_devices: list[str] | None = None
    precision: Literal["32", "16-mixed", "bf16-mixed", "bf16-true"] = "32"


def changed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a Trainer's arguments that differ from its defaults."""
    from lightning.pytorch import Trainer

    defaults = {name: parameter.default for name, parameter in signature(Trainer).parameters.items()}

    def is_default(value: Any, default: Any) -> bool:
        return value == [] or (type(value) is type(default) and value == default)

    return {name: value for name, value in arguments.items() if not is_default(value, defaults.get(name))}


def refuse_arguments(names: Set[str]) -> None:
    """Raise :class:`ConfigError` on arguments of the Trainer that the run decides."""
    for name in sorted(names & DECIDED.keys()):
        reason = f"the run decides it, by {DECIDED[name]}"
        raise ConfigError(f"trainer.{name} is not available", why=reason, fix=f"leave {name} out")


def as_list(argument: Any) -> list[Any]:
    """Return an argument of the Trainer that may be one object or several."""
    if argument is None:
        return []
    return list(argument) if isinstance(argument, (list, tuple)) else [argument]


def hardware_settings(
    trainer: Mapping[str, Any], hardware: Hardware, detected: Sequence[Device], *, from_outside: bool = False
) -> dict[str, Any]:
    """Return the settings ``hardware`` of a run for both sections.

    Args:
        trainer: the settings of the ``trainer`` section.
        detected: devices of this machine.
        from_outside: a launcher has started the ranks already.

    Raises:
        LockstepError: both sections decide, or the Trainer would start processes or use devices that no run has.
    """
    arguments = changed(trainer)
    set_names = [name for name in _OF_HARDWARE if name in arguments]
    settings = ", ".join(f"trainer.{name}={arguments[name]}" for name in set_names)
    nodes = int(arguments.get("num_nodes", 1))
    if nodes > 1 and not from_outside:
        raise ConfigError(
            f"trainer.num_nodes is {nodes}, but this process is alone",
            why="ranks on other machines must be started there",
            fix="start the command with torchrun or srun on every node",
        )
    if set_names and hardware != Hardware():
        raise ConfigError(
            f"the hardware section and {settings} both say what to train on",
            why="hardware resolves to the trainer's accelerator, devices, strategy and precision",
            fix="leave one of the two out",
        )
    selected = hardware.selected_devices
    is_known = arguments.get("strategy", "auto") in _STRATEGIES
    if is_known and {"accelerator", "devices", "strategy"} & arguments.keys():
        selected = _named_devices(arguments, [device.id for device in detected if device.kind == "gpu"])
        is_known = selected is not None
    if not is_known:
        raise UnsupportedError(
            f"{settings} is not available",
            why="runs train on CPUs and NVIDIA GPUs, a LightningModule on one device or with DDP on several, whose "
            "processes Lockstep starts",
            fix="leave it out, and name devices with hardware.selected_devices",
        )
    precision = str(arguments.get("precision", hardware.precision))
    return {"selected_devices": selected, "precision": _PRECISIONS.get(precision, precision)}


def _named_devices(trainer: Mapping[str, Any], gpus: list[str]) -> list[str] | None:
    """Return the devices of this node that arguments of the Trainer mean; ``None``: no run has them.

    Forms of ``devices``: a number, -1 or "auto" for all, a list of indices, or either as text.
    """
    accelerator = trainer.get("accelerator", "auto")
    if accelerator not in ("auto", "cpu", "gpu", "cuda"):
        return None
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not gpus)
    devices: Any = trainer.get("devices", "auto")
    if isinstance(devices, str):
        parts = [part.strip() for part in devices.split(",") if part.strip()]
        is_list = len(parts) > 1 or devices.strip().endswith(",")
        devices = [int(part) for part in parts] if is_list else int(devices) if devices.strip("- ").isdigit() else -1
    if devices == -1:
        return ["cpu"] if on_cpu else gpus
    indices = range(max(devices, 1)) if isinstance(devices, int) else devices
    return ["cpu" if on_cpu else f"gpu:{index}" for index in indices]


def settings_of(trainer: Mapping[str, Any], hardware: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a run for the section ``trainer``: each argument has one, or is left to the Trainer.

    Args:
        hardware: from :func:`hardware_settings`.

    Raises:
        ConfigError: an argument that a run refuses.
    """
    arguments = changed(trainer)
    refuse_arguments(arguments.keys() - {*_OF_HARDWARE, *SETTINGS, "num_nodes", "use_distributed_sampler"})
    settings: dict[str, Any] = {name: {} for name in ("telemetry", "debug", "distributed")}
    settings["training"] = {"max_steps": None, "max_time_s": None, "accumulate": 1, "max_grad_norm": None}
    settings["hardware"] = dict(hardware)
    if "max_epochs" not in arguments:  # as in Lightning: 1000, or as many as the steps or the time take
        arguments["max_epochs"] = arguments.get("max_steps", _ENDLESS if "max_time" in arguments else 1000)
    for name in SETTINGS.keys() & arguments.keys():
        section, _, key = SETTINGS[name].rpartition(".")
        (settings[section] if section else settings)[key] = _value(name, arguments[name])
    if arguments.get("strategy") == _FINDS_UNUSED:
        settings["distributed"]["find_unused_parameters"] = True
    return settings


def _value(name: str, value: Any) -> Any:
    if name == "max_epochs" and value == -1:
        return _ENDLESS
    if name == "max_steps" and value == -1:
        return None
    if name == "max_time":
        if isinstance(value, str):
            days, hours, minutes, seconds = (float(part) for part in value.split(":"))
            value = {"days": days, "hours": hours, "minutes": minutes, "seconds": seconds}
        return (value if isinstance(value, timedelta) else timedelta(**value)).total_seconds()
    if name == "gradient_clip_val":
        return value or None
    return bool(value) if name == "fast_dev_run" else value
