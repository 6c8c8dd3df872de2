"""Short names of common settings: the flags of the command line, and the keywords of ``lockstep.train``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from lockstep.config.load import key_for, merge
from lockstep.config.sections import RunConfig
from lockstep.errors import ConfigError

#: Of each short name, the key. ``skip_bad`` and ``mode`` are settings of built-in tasks: flags only.
SHORT_NAMES = {
    "devices": "hardware.selected_devices",
    "strategy": "hardware.strategy",
    "precision": "hardware.precision",
    "reproducibility": "training.reproducibility",
    "nodes": "launch.nodes",
    "rdzv": "launch.rdzv",
    "epochs": "training.epochs",
    "max_steps": "training.max_steps",
    "batch_size": "training.batch_size",
    "global_batch_size": "training.global_batch_size",
    "grad_accum_steps": "training.accumulate",
    "lr": "optimizer.lr",
    "lr_scaling": "optimizer.lr_scaling",
    "warmup_epochs": "scheduler.warmup_epochs",
    "weight_decay": "optimizer.weight_decay",
    "max_grad_norm": "training.max_grad_norm",
    "early_stopping_patience": "training.early_stopping_patience",
    "seed": "training.seed",
    "init_from": "init_from",
    "fast_dev_run": "debug.fast_dev_run",
    "data_dir": "data.data_dir",
    "download": "data.download",
    "skip_bad": "task.skip_bad",
    "num_workers": "data.num_workers",
    "save_dir": "save_dir",
    "runs_dir": "runs_dir",
    "log_interval": "telemetry.log_interval",
    "profile": "telemetry.profile",
    "profile_ranks": "telemetry.profile_ranks",
    "mode": "task.mode",
}


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings whose keys may have dots, as nested mappings: ``{"optimizer.lr": 1}`` → ``{"optimizer": {"lr": 1}}``."""
    result: dict[str, Any] = {}
    for key, value in settings.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        result = merge(result, value)
    return result


def from_keywords(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by short name, key or top-level name as nested mappings.

    Raises:
        ConfigError: an unknown name; with the most similar one.
    """
    for name in settings:
        if name not in SHORT_NAMES and "." not in name and name not in RunConfig.model_fields:
            raise ConfigError(f"unknown setting {name!r}", fix=_suggestion(name))
    return nested({SHORT_NAMES.get(name, name): value for name, value in settings.items()})


def _suggestion(name: str) -> str:
    """What to write instead of ``name``."""
    key = key_for(name)
    short = next((short for short, of in SHORT_NAMES.items() if of == key), None)
    if key is not None and short is None:
        return f'it has no short name: pass it by its key, in config={{"{key}": …}}'
    close = [short] if short else difflib.get_close_matches(name, SHORT_NAMES, n=1)
    return f"did you mean {close[0]}?" if close else "docs/configuration.md lists every setting"
