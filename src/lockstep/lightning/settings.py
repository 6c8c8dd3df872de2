"""From sections of LightningCLI to the settings of a run: each argument of the Trainer has one, or is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from lockstep.engine.lightning.cluster import ddp_arguments
from lockstep.engine.lightning.configured import Hardware, changed
from lockstep.engine.lightning.module_task import DECIDED
from lockstep.errors import ConfigError, UnsupportedError
from lockstep.hardware.device import Device
from lockstep.lightning.hardware import named_devices

_SAME = "max_epochs max_steps max_time accumulate_grad_batches gradient_clip_val fast_dev_run sync_batchnorm"
#: Arguments of the Trainer, and what they are in a run.
SETTINGS = {
    **{name: DECIDED[name] for name in _SAME.split()},
    "log_every_n_steps": "telemetry.log_interval",
    "default_root_dir": "runs_dir",
}
_PRECISIONS = {"32": "32", "32-true": "32", "16": "16-mixed", "bf16": "bf16-mixed"}
#: More epochs than a run has time for.
_ENDLESS = 1_000_000


def settings_of(trainer: Mapping[str, Any], hardware: Hardware, detected: Sequence[Device]) -> dict[str, Any]:
    """Settings of a run, nested.

    Args:
        trainer: the section ``trainer``.
        detected: the devices of this machine.

    Raises:
        ConfigError, UnsupportedError: what no run can have.
    """
    given = changed(trainer)
    settings: dict[str, Any] = {name: {} for name in ("telemetry", "debug", "distributed")}
    settings["training"] = {"max_steps": None, "max_time_s": None, "accumulate": 1, "max_grad_norm": None}
    settings["hardware"] = _hardware(given, hardware, detected)
    given.setdefault("max_epochs", _epochs(given))
    for name in given.keys() & DECIDED.keys() - {*settings["hardware"].pop("known"), "use_distributed_sampler"}:
        if name not in SETTINGS:
            raise ConfigError(
                f"trainer.{name} is not available",
                why="a run's plan decides it, so that every device count trains the same steps",
                fix=f"leave it out; see {DECIDED[name]}",
            )
    given["max_epochs"] = _ENDLESS if given["max_epochs"] == -1 else given["max_epochs"]
    for name in SETTINGS.keys() & given.keys():
        section, _, key = SETTINGS[name].rpartition(".")
        (settings[section] if section else settings)[key] = _value(name, given[name])
    if ddp := ddp_arguments(given.get("strategy", "auto")):
        settings["distributed"]["find_unused_parameters"] = ddp.get("find_unused_parameters", False)
    return settings


def _epochs(given: Mapping[str, Any]) -> int:
    """As in Lightning, where they are not given: 1000, or as many as the steps or the time take."""
    if given.get("max_steps", -1) != -1:
        return int(given["max_steps"])
    return _ENDLESS if "max_time" in given else 1000


def _value(name: str, value: Any) -> Any:
    if name == "max_steps":
        return None if value == -1 else value
    if name == "max_time":
        return _seconds(value)
    if name == "gradient_clip_val":
        return value or None
    if name == "fast_dev_run":
        return bool(value)
    return value


def _seconds(value: Any) -> float:
    if isinstance(value, str):
        days, hours, minutes, seconds = (float(part) for part in value.split(":"))
        value = {"days": days, "hours": hours, "minutes": minutes, "seconds": seconds}
    return (value if isinstance(value, timedelta) else timedelta(**value)).total_seconds()


def _hardware(given: Mapping[str, Any], hardware: Hardware, detected: Sequence[Device]) -> dict[str, Any]:
    """The section ``hardware`` of the run; ``known``: what of ``given`` it is made of."""
    chosen = dict.fromkeys(("accelerator", "devices", "strategy"), "auto")
    own = [name for name in chosen if name in given]
    selected = named_devices({**chosen, **given}, detected) if own else hardware.selected_devices
    strategy = given.get("strategy", "auto")
    if (own and selected is None) or (strategy != "auto" and ddp_arguments(strategy) is None):
        raise UnsupportedError(
            f"{', '.join(f'trainer.{name}={given[name]}' for name in own)} is not available for a run",
            why="runs train on CPUs and NVIDIA GPUs, a LightningModule on one device or with DDP on several",
            fix="leave it out, and name devices with hardware.selected_devices",
        )
    precision = str(given.get("precision", hardware.precision))
    precision = _PRECISIONS.get(precision, precision)
    return {"selected_devices": selected, "precision": precision, "known": (*own, "precision", "num_nodes")}
