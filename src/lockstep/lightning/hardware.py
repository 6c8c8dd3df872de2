"""The ``hardware`` section of ``lockstep lightning``: from selected devices to arguments of a ``Trainer``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.config import DistributedConfig, HardwareConfig
from lockstep.engine.lightning.configured import Hardware
from lockstep.errors import ConfigError, UnsupportedError
from lockstep.events import Note
from lockstep.hardware.detect import detect_devices
from lockstep.hardware.device import Device
from lockstep.hardware.resolve import resolve_placement
from lockstep.hardware.world import World

#: What the section decides; each may be set in ``trainer`` instead, but not beside it.
DECIDED = ("accelerator", "devices", "strategy", "precision")


@dataclass(frozen=True)
class Resolved:
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
    """Decide what a ``Trainer`` runs on.

    Args:
        trainer: the settings of the ``trainer`` section.
        defaults: their default values.
        world: whether a launcher has started the ranks already.
        detected: what this machine has; ``None``: looked up.

    Raises:
        ConfigError: both sections decide, or several nodes without a launcher.
        DeviceError: a device that is absent or malformed, or that lacks the precision.
        UnsupportedError: a GPU named twice, or several processes that Lightning would start itself.
    """
    detected = detect_devices() if detected is None else detected
    own = [name for name in DECIDED if trainer.get(name) != defaults.get(name)]
    _check_nodes(trainer, world)
    if trainer.get("strategy") == "dp":
        raise UnsupportedError(
            "trainer.strategy=dp is not available", why="Lightning 2.0 removed it", fix="set it to ddp or auto"
        )
    if own and hardware != Hardware():
        settings = ", ".join(f"trainer.{name}={trainer[name]}" for name in own)
        raise ConfigError(
            f"the hardware section and {settings} both say what to train on",
            why="hardware resolves to the trainer's accelerator, devices, strategy and precision",
            fix="leave one of the two out",
        )
    if own and own != ["precision"]:
        return Resolved({}, len(named_devices(trainer, detected) or [""]))
    selected = None if hardware.selected_devices is None else tuple(hardware.selected_devices)
    config = HardwareConfig(selected_devices=selected, precision=hardware.precision)
    placement = resolve_placement(config, DistributedConfig(), world, detected)
    if placement.accelerator == "gpu" and len(set(placement.devices)) < len(placement.devices):
        raise UnsupportedError(
            f"a GPU is named twice ({', '.join(placement.devices)})",
            why="a Lightning Trainer takes each GPU once",
            fix="name each GPU once, or train with Lockstep's own engine, where a repeated GPU carries two ranks",
        )
    on_cpu = placement.accelerator == "cpu"
    arguments = {
        "accelerator": placement.accelerator,
        "devices": len(placement.devices) if on_cpu else [int(name.partition(":")[2]) for name in placement.devices],
        "strategy": "ddp" if placement.world_size > 1 else "auto",
        "num_nodes": placement.nodes,
    }
    if not own:  # else the trainer sets the precision
        arguments["precision"] = placement.precision
    return Resolved(arguments, len(placement.devices), placement.notes)


def _check_nodes(trainer: Mapping[str, Any], world: World) -> None:
    if int(trainer.get("num_nodes") or 1) > 1 and not world.from_outside:
        raise ConfigError(
            f"trainer.num_nodes is {trainer['num_nodes']}, but this process is alone",
            why="ranks on other machines must be started there",
            fix="start the command with torchrun or srun on every node",
        )


def named_devices(trainer: Mapping[str, Any], detected: Sequence[Device]) -> list[str] | None:
    """The devices of this node that Lightning's own settings mean; ``None`` where only Lightning knows them."""
    strategy, accelerator, devices = (trainer.get(name) for name in ("strategy", "accelerator", "devices"))
    gpus = [device.id for device in detected if device.kind == "gpu"]
    if accelerator == "auto":
        accelerator = "gpu" if gpus else "cpu"
    if accelerator not in ("cpu", "gpu", "cuda"):
        return None
    found = _chosen(devices, None if accelerator == "cpu" else gpus)
    if len(found) > 1 and isinstance(strategy, str) and strategy.startswith(("ddp_spawn", "ddp_fork", "ddp_notebook")):
        raise UnsupportedError(
            f"trainer.strategy={strategy} would start processes itself",
            why="samples are shared out among ranks that Lockstep's launcher starts; each of these would see them all",
            fix="set it to ddp: the launcher starts ranks from notebooks and scripts without a main guard, too",
        )
    return found


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
