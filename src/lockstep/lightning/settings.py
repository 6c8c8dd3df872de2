"""Convert the sections ``hardware`` and ``trainer`` of LightningCLI to a ``Trainer`` and to settings of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from lockstep.config import DistributedConfig, HardwareConfig
from lockstep.errors import ConfigError, UnsupportedError
from lockstep.events import Note
from lockstep.hardware.detect import Device, detect_devices
from lockstep.hardware.resolve import resolve_placement
from lockstep.hardware.world import World
from lockstep.lightning.cluster import ddp_arguments
from lockstep.lightning.configured import Hardware, changed
from lockstep.lightning.module_task import DECIDED, refuse_arguments

#: Arguments that the hardware section decides; each may be set in ``trainer`` instead, but not beside it.
OF_HARDWARE = ("accelerator", "devices", "strategy", "precision")
_SAME = "max_epochs max_steps max_time accumulate_grad_batches gradient_clip_val fast_dev_run sync_batchnorm"
#: Settings of a run for arguments of the Trainer.
SETTINGS = {
    **{name: DECIDED[name] for name in _SAME.split()},
    "log_every_n_steps": "telemetry.log_interval",
    "default_root_dir": "runs_dir",
}
_PRECISIONS = {"32": "32", "32-true": "32", "16": "16-mixed", "bf16": "bf16-mixed"}
#: More epochs than a run has time for.
_ENDLESS = 1_000_000


class Resolved(NamedTuple):
    """``trainer``: arguments of a ``Trainer`` that differ from its settings; ``ranks``: processes on this node."""

    trainer: dict[str, Any]
    ranks: int
    notes: tuple[Note, ...] = ()


def resolve(
    hardware: Hardware,
    trainer: Mapping[str, Any],
    defaults: Mapping[str, Any],
    world: World,
    detected: Sequence[Device] | None = None,
) -> Resolved:
    """Decide the devices of a ``Trainer``.

    Args:
        trainer: the settings of the ``trainer`` section, and ``defaults``: their default values.
        world: whether a launcher has started the ranks already.

    Raises:
        LockstepError: both sections decide, a device is absent or unfit, or Lightning would start processes itself.
    """
    detected = detect_devices() if detected is None else detected
    set_names = [name for name in OF_HARDWARE if trainer.get(name) != defaults.get(name)]
    if int(trainer.get("num_nodes") or 1) > 1 and not world.from_outside:
        raise ConfigError(
            f"trainer.num_nodes is {trainer['num_nodes']}, but this process is alone",
            why="ranks on other machines must be started there",
            fix="start the command with torchrun or srun on every node",
        )
    if trainer.get("strategy") == "dp":
        raise UnsupportedError(
            "trainer.strategy=dp is not available", why="Lightning 2.0 removed it", fix="set it to ddp or auto"
        )
    if set_names and hardware != Hardware():
        settings = ", ".join(f"trainer.{name}={trainer[name]}" for name in set_names)
        raise ConfigError(
            f"the hardware section and {settings} both say what to train on",
            why="hardware resolves to the trainer's accelerator, devices, strategy and precision",
            fix="leave one of the two out",
        )
    if set_names and set_names != ["precision"]:
        return Resolved({}, len(named_devices(trainer, detected) or [""]))
    selected = None if hardware.selected_devices is None else tuple(hardware.selected_devices)
    config = HardwareConfig(selected_devices=selected, precision=hardware.precision)
    placement = resolve_placement(config, DistributedConfig(), world, detected)
    devices = placement.devices
    on_cpu = placement.accelerator == "cpu"
    if not on_cpu and len(set(devices)) < len(devices):
        raise UnsupportedError(
            f"a GPU is named twice ({', '.join(devices)})",
            why="a Lightning Trainer takes each GPU once",
            fix="name each GPU once, or train a lockstep.Task, for which a repeated GPU has two ranks",
        )
    arguments = {
        "accelerator": placement.accelerator,
        "devices": len(devices) if on_cpu else [int(name.partition(":")[2]) for name in devices],
        "strategy": "ddp" if placement.world_size > 1 else "auto",
        "num_nodes": placement.nodes,
    }
    if not set_names:  # else the trainer sets the precision
        arguments["precision"] = placement.precision
    return Resolved(arguments, len(devices), placement.notes)


def named_devices(trainer: Mapping[str, Any], detected: Sequence[Device]) -> list[str] | None:
    """Return the devices of this node that settings of the Trainer mean; ``None``: only Lightning resolves them."""
    strategy, accelerator, devices = (trainer.get(name) for name in ("strategy", "accelerator", "devices"))
    gpus = [device.id for device in detected if device.kind == "gpu"]
    if accelerator == "auto":
        accelerator = "gpu" if gpus else "cpu"
    if accelerator not in ("cpu", "gpu", "cuda"):
        return None
    named = _chosen(devices, None if accelerator == "cpu" else gpus)
    if len(named) > 1 and isinstance(strategy, str) and strategy.startswith(("ddp_spawn", "ddp_fork", "ddp_notebook")):
        raise UnsupportedError(
            f"trainer.strategy={strategy} would start processes itself",
            why="samples are shared out among ranks that Lockstep's launcher starts; each of these would see them all",
            fix="set it to ddp: the launcher starts ranks from notebooks and scripts without a main guard, too",
        )
    return named


def _chosen(devices: Any, gpus: Sequence[str] | None) -> list[str]:
    """Lightning's forms of ``devices``: a number, -1 or "auto" for all, a list of indices, or either as text."""
    every = ["cpu"] if gpus is None else list(gpus)
    if isinstance(devices, str):
        parts = [part.strip() for part in devices.split(",") if part.strip()]
        listed = len(parts) > 1 or devices.strip().endswith(",")
        devices = [int(part) for part in parts] if listed else int(devices) if devices.strip("- ").isdigit() else -1
    if isinstance(devices, int):
        if devices == -1:
            return every
        return ["cpu"] * max(devices, 1) if gpus is None else [f"gpu:{index}" for index in range(max(devices, 1))]
    return ["cpu" if gpus is None else f"gpu:{index}" for index in devices]


def settings_of(
    trainer: Mapping[str, Any], hardware: Hardware, detected: Sequence[Device] | None = None
) -> dict[str, Any]:
    """Settings of a run for the section ``trainer``: each argument has one, is left to the Trainer, or is refused."""
    arguments = changed(trainer)
    detected = detect_devices() if detected is None else detected
    settings: dict[str, Any] = {name: {} for name in ("telemetry", "debug", "distributed")}
    settings["training"] = {"max_steps": None, "max_time_s": None, "accumulate": 1, "max_grad_norm": None}
    settings["hardware"] = _hardware(arguments, hardware, detected)
    refuse_arguments(arguments.keys() - {*OF_HARDWARE, *SETTINGS, "num_nodes", "use_distributed_sampler"})
    if "max_epochs" not in arguments:  # as in Lightning: 1000, or as many as the steps or the time take
        arguments["max_epochs"] = arguments.get("max_steps", _ENDLESS if "max_time" in arguments else 1000)
    for name in SETTINGS.keys() & arguments.keys():
        section, _, key = SETTINGS[name].rpartition(".")
        (settings[section] if section else settings)[key] = _value(name, arguments[name])
    if ddp := ddp_arguments(arguments.get("strategy", "auto")):
        settings["distributed"]["find_unused_parameters"] = ddp.get("find_unused_parameters", False)
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


def _hardware(arguments: Mapping[str, Any], hardware: Hardware, detected: Sequence[Device]) -> dict[str, Any]:
    chosen = dict.fromkeys(("accelerator", "devices", "strategy"), "auto")
    set_names = [name for name in chosen if name in arguments]
    selected = named_devices({**chosen, **arguments}, detected) if set_names else hardware.selected_devices
    strategy = arguments.get("strategy", "auto")
    if (set_names and selected is None) or (strategy != "auto" and ddp_arguments(strategy) is None):
        raise UnsupportedError(
            f"{', '.join(f'trainer.{name}={arguments[name]}' for name in set_names)} is not available for a run",
            why="runs train on CPUs and NVIDIA GPUs, a LightningModule on one device or with DDP on several",
            fix="leave it out, and name devices with hardware.selected_devices",
        )
    precision = str(arguments.get("precision", hardware.precision))
    return {"selected_devices": selected, "precision": _PRECISIONS.get(precision, precision)}
