"""A run's configuration as text: what is written can be read again, and names no code in the run folder."""

from __future__ import annotations

from pathlib import Path

import yaml

from lockstep.config import RunConfig, dump, resolve
from lockstep.config.load import MAX_CONFIG_BYTES, parse_yaml
from lockstep.errors import ConfigError

#: What :func:`parse_frozen` raises when there is no configuration in the text, or none that may be used.
NO_CONFIG = (yaml.YAMLError, ValueError, TypeError, RuntimeError, ConfigError)


def frozen_text(config: RunConfig, folder: Path) -> str:
    """What :func:`parse_frozen` will read in the run folder ``folder``.

    Raises:
        ConfigError: it could not.
    """
    content = dump(config)
    try:
        size = len(content.encode("utf-8"))
        if size > MAX_CONFIG_BYTES:
            raise ValueError(f"it has {size:,} bytes, and at most {MAX_CONFIG_BYTES:,} are read")
        parse_frozen(content, folder)
    except NO_CONFIG as error:
        raise ConfigError(
            "the configuration could not be read back from the run folder",
            why=str(error)[:500],
            fix="give absolute paths of code files, and keep long lists in a file that the task reads",
        ) from None
    return content


def parse_frozen(content: str | bytes, folder: Path) -> RunConfig:
    """The configuration of the run in ``folder``. Raises one of ``NO_CONFIG``."""
    settings = parse_yaml(content)
    if not isinstance(settings, dict):
        raise ValueError("it has no settings")
    if isinstance(settings.get("training"), dict):
        settings["training"].pop("engine", None)  # of older runs; checkpoints of both engines are read the same way
    config = resolve(settings)
    _refuse_own_code(config, folder)
    return config


def _refuse_own_code(config: RunConfig, folder: Path) -> None:
    """Raise :class:`ValueError` when a setting names a file of code inside ``folder``.

    Of what Lockstep itself imports, the task and a data module, it writes the whole, resolved path. Other settings
    mean what the task takes them for, but no code of the user's lies in a run folder.
    """
    settings = config.task.settings
    imported = (config.task.name, settings.get("datamodule"))
    for setting in (config.task.name, *settings.values()):
        place = setting.rpartition(":")[0] if isinstance(setting, str) else ""
        if not place.endswith(".py"):
            continue
        file = Path(place).resolve()
        if file.is_relative_to(folder.resolve()):
            raise ValueError(f"it names {place[:200]}, inside the run folder: code in a run folder is not run")
        if setting in imported and str(file) != place:
            raise ValueError(f"it names {place[:200]}, which is not an absolute, resolved path")
