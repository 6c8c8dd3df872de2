"""The flags of ``train`` and ``plan``: most of them are settings by a short name (``SHORT_NAMES``).

A flag overrides only when it is given; otherwise the configuration files, the task's defaults and the
general ones decide, in this order.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import make_dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from cyclopts import Group, Parameter

from lockstep.api.settings import weights_folder
from lockstep.cli.output import DEFAULT_RUNS_DIR
from lockstep.config import RunConfig
from lockstep.config.load import SHORT_NAMES, merge, nested
from lockstep.errors import UsageError
from lockstep.tasks import DEFAULTS

_DEVICES = Group("Devices", sort_key=1)
_TRAINING = Group(
    "Training", "A task can have other defaults: `lockstep plan TASK` shows the settings of the run.", sort_key=2
)
FILES = Group("Data and files", sort_key=3)
_OTHER = Group("Any other setting", sort_key=4)
_ALIASES = Group("Other spellings", sort_key=5)


#: The flags of each group that stand for a setting, in the order of the help page.
_OF_SETTINGS = {
    _DEVICES: ("devices", "strategy", "precision", "reproducibility", "nodes", "rdzv"),
    _TRAINING: (
        *("epochs", "max_steps", "batch_size", "global_batch_size", "grad_accum_steps", "lr", "lr_scaling"),
        *("warmup_epochs", "weight_decay", "max_grad_norm", "early_stopping_patience", "seed", "init_from"),
        "fast_dev_run",
    ),
    FILES: (
        *("data_dir", "download", "num_workers", "save_dir", "mirror", "runs_dir", "log_interval"),
        "profile",
        "profile_ranks",
    ),
}
#: Flags whose text is read as a setting of another type.
_TEXTS = {
    "devices": "DEVICE,...",
    "nodes": "N|MIN:MAX",
    "rdzv": "HOST[:PORT]",
    "init_from": "RUN",
    "num_workers": "INT|auto",
    "mirror": "URL",
    "profile": "A:B",
    "profile_ranks": "N,...",
}


def _flag(kind: Any, group: Group, help: str, metavar: str | None = None) -> Any:
    return Annotated[kind | None, Parameter(help=help, group=group, negative="", metavar=metavar)]


def _of_setting(name: str, group: Group) -> Any:
    """Make a flag with the type, the description and the default of its setting."""
    section, _, key = SHORT_NAMES[name].rpartition(".")
    model: Any = RunConfig.model_fields[section].annotation if section else RunConfig
    field = model.model_fields[key]
    schema = {"description": field.description}
    if callable(field.json_schema_extra):
        field.json_schema_extra(schema)
    # On the command line, leaving a flag out does not mean null.
    description = schema["description"].replace("null: ", f"--set {SHORT_NAMES[name]}=null: ")
    text, *unset = re.split(r"[;.] [Uu]nset: ", description)
    if not re.match(r"\w+:", text):  # one of its values
        text = text[0].upper() + text[1:]
    default = unset[0] if unset else _as_text(field.default)
    of_tasks = [
        f"{task} {_as_text(value)}"
        for task, sections in DEFAULTS.items()
        if (value := sections.get(section, {}).get(key, field.default)) != field.default
    ]
    if of_tasks:
        default += f" ({', '.join(of_tasks)})"
    help = f"{text}. Default: {default}."
    kind = field.annotation
    if NoneType in get_args(kind):
        kind = get_args(kind)[0]
    if "enum" in schema:
        kind = Literal[tuple(schema["enum"])]
    return _flag(str if name in _TEXTS else kind, group, help, _TEXTS.get(name))


def _as_text(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return "none" if default is None else f"{default:g}" if isinstance(default, float) else str(default)


_FLAGS = {
    **{name: _of_setting(name, group) for group, names in _OF_SETTINGS.items() for name in names},
    "skip_bad": _flag(
        bool, FILES, "speech: leave out utterances that cannot be used, instead of refusing to start. Default: off."
    ),
    "config": _flag(list[Path], _OTHER, "A YAML file with settings; later files win. May be repeated.", "FILE"),
    "set": _flag(
        list[str],
        _OTHER,
        "Set any key of docs/configuration.md, e.g. optimizer.name=sgd. May be repeated.",
        "KEY=VALUE",
    ),
    "multi_gpu": _flag(Literal["ddp", "dp"], _ALIASES, "--strategy ddp or dp, on every GPU unless devices are named."),
    "gpu_ids": _flag(str, _ALIASES, "--devices by number: 0,1,3 is gpu:0,gpu:1,gpu:3; commas, no spaces.", "N,..."),
    "mode": _flag(
        str,
        _ALIASES,
        "--set task.mode=...: how the har task turns a window's channels into samples "
        "(joint, flatten, average or first).",
    ),
    "no_amp": _flag(bool, _ALIASES, "--precision 32."),
}
if TYPE_CHECKING:
    Settings = Any
else:  # None for a flag that was not given
    _fields = [(*flag, None) for flag in _FLAGS.items()]
    Settings = make_dataclass("Settings", _fields, frozen=True, kw_only=True, namespace={"__module__": __name__})
#: The flags as a parameter of a command.
Flags = Annotated[Settings, Parameter(name="*")]
#: Used where no flag is given.
NO_SETTINGS = Settings()

TaskName = Annotated[
    str | None,
    Parameter(
        name="task",
        help="What to train: har, path/to/file.py:Class or package.module:Class. Default: task.name of --config.",
    ),
]

ScriptArguments = Annotated[str, Parameter(help="Of a script with a session, after --. Default: none.")]


def refuse_arguments(task: str | None, arguments: Sequence[str]) -> None:
    """Raise :class:`UsageError` where ``arguments`` are for no script."""
    if arguments and not (task or "").endswith(".py"):
        raise UsageError(
            f"unexpected {'arguments' if len(arguments) > 1 else 'argument'}: {' '.join(arguments)}",
            fix="write a list with commas: --gpu-ids 0,1. A script with a session takes arguments after --",
        )


def flag_table() -> dict[str, str]:
    """Return every flag that stands for one setting, and that setting's key: ``{"--epochs": "training.epochs", …}``."""
    return {f"--{name.replace('_', '-')}": key for name, key in SHORT_NAMES.items()}


def all_flags() -> list[str]:
    """Return every flag of :class:`Settings`, aliases included."""
    return ["--" + name.replace("_", "-") for name in _FLAGS]


def to_mapping(settings: Settings, task: str | None) -> tuple[str, dict[str, Any]]:
    """Return the task's name, and the nested settings that files, ``--set`` and flags give, later over earlier.

    Raises:
        UsageError: no task, or flags that contradict each other.
        ConfigError: a file or a ``--set`` that cannot be read, an unknown key, or an invalid value.
    """
    from lockstep.config import load, resolve

    flags = {key: value for name, key in SHORT_NAMES.items() if (value := getattr(settings, name)) is not None}
    flags |= _aliases(settings)
    overrides = nested({key: str(value) if isinstance(value, Path) else value for key, value in flags.items()})
    mapping = load(settings.config or (), settings.set or (), overrides)
    if settings.init_from is not None:
        runs_dir = Path(str(mapping.get("runs_dir", DEFAULT_RUNS_DIR)))
        mapping["init_from"] = weights_folder(settings.init_from, runs_dir)
    section = mapping.get("task")
    name = task or (section.get("name") if isinstance(section, dict) else None)
    if not isinstance(name, str) or not name:
        raise UsageError(
            "no task was named", fix="write for example `lockstep train har`, or set task.name in a --config file"
        )
    if isinstance(section, dict) or section is None:
        mapping["task"] = {**(section or {}), "name": name}
    typed = merge(load(sets=settings.set or (), overrides=overrides), {"task": {"name": task}} if task else {})
    _require_named(settings.config or (), typed, mapping)
    resolve(mapping)  # without the task's defaults: report mistakes before torch is loaded
    return name, mapping


def _require_named(files: Sequence[Path], typed: Mapping[str, Any], mapping: Mapping[str, Any]) -> None:
    """Raise :class:`TaskError` when a file names a class that the command line does not, nor has before.

    A file of a run folder may not name an address to write to, either. ``typed``: settings of the command line.
    """
    from lockstep.config.named import code_in, named, references_in

    of_run = any((file.parent / "run.json").exists() for file in files)
    named.require((references_in if of_run else code_in)(mapping), "the configuration", references_in(typed))


def _aliases(settings: Settings) -> dict[str, Any]:
    """Convert ``--multi-gpu``, ``--gpu-ids`` and ``--no-amp``, other spellings of settings, to settings."""
    from lockstep.hardware.world import read_world

    result: dict[str, Any] = {}
    if settings.gpu_ids is not None:
        if settings.devices is not None:
            raise _contradiction("--gpu-ids", "--devices", "they both name the devices")
        ids = numbers("--gpu-ids", settings.gpu_ids, "0,1", kind="GPU numbers", fix=", or --devices gpu:0,gpu:1")
        result["hardware.selected_devices"] = [f"gpu:{number}" for number in ids]
    if settings.multi_gpu is not None:
        if settings.strategy not in (None, settings.multi_gpu):
            raise _contradiction(f"--multi-gpu {settings.multi_gpu}", f"--strategy {settings.strategy}", "")
        result["hardware.strategy"] = settings.multi_gpu
        if settings.devices is None and settings.gpu_ids is None and not read_world(os.environ).from_outside:
            result["hardware.selected_devices"] = "all"
    if settings.no_amp:
        if settings.precision not in (None, "32"):
            raise _contradiction("--no-amp", f"--precision {settings.precision}", "--no-amp means --precision 32")
        result["hardware.precision"] = "32"
    return result


def numbers(flag: str, text: str, example: str, *, kind: str = "numbers", fix: str = "") -> list[int]:
    names = [name.strip() for name in text.split(",")]
    if not all(name.isascii() and name.isdigit() for name in names):
        raise UsageError(f"{flag} {text!r} is not a list of {kind}", fix=f"write for example {flag} {example}{fix}")
    return [int(name) for name in names]


def fork_ranks_from_here(devices: Sequence[str] | str | None, *, script: bool = False, launches: int = 1) -> None:
    """Let the ranks share the imports of this process; call it after the import of torch, before any computation.

    Args:
        devices: their names, or these in a text with commas; several need ranks.
        script: it has a rank on one device, too.
        launches: how often ranks may be started.
    """
    from lockstep.hardware.world import read_world
    from lockstep.launch.local.launcher_process import fork_launcher_ahead

    names = devices.split(",") if isinstance(devices, str) else devices or ()
    if (script or len(names) > 1 or "all" in names) and not read_world(os.environ).from_outside:
        for _ in range(launches):
            fork_launcher_ahead()


def _contradiction(first: str, second: str, reason: str) -> UsageError:
    return UsageError(f"{first} and {second} contradict each other", why=reason, fix="give one of them")
