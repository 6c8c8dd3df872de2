"""A configured ``Trainer`` for people who call ``trainer.fit`` themselves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lockstep.config import resolve
from lockstep.errors import ConfigError
from lockstep.hardware.detect import detect_devices
from lockstep.hardware.device import choose_default
from lockstep.hardware.resolve import resolve_hardware

_OF_TRAINING = {
    "epochs": "max_epochs",
    "max_steps": "max_steps",
    "accumulate": "accumulate_grad_batches",
    "max_grad_norm": "gradient_clip_val",
}


def build_trainer(run_dir: Path | str, config: Mapping[str, Any]) -> Trainer:
    """A ``Trainer`` on the devices of ``config["hardware"]``, with ``run_dir`` as its root.

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
    hardware = resolve({"hardware": config.get("hardware") or {}}).hardware
    detected = detect_devices()
    selected = hardware.selected_devices
    if selected is None:
        selected = choose_default(detected).devices
    decided = {**resolve_hardware(list(selected), detected), "precision": hardware.precision}
    training = config.get("training") or {}
    arguments = {name: training[key] for key, name in _OF_TRAINING.items() if training.get(key) is not None}
    arguments |= config.get("trainer") or {}
    both = sorted(arguments.keys() & {*decided, "default_root_dir"})
    if both:
        raise ConfigError(
            f"trainer.{both[0]} is not to be given",
            why="the hardware section and run_dir decide it",
            fix="leave it out",
        )
    return Trainer(**decided, **arguments, default_root_dir=run_dir)
