"""From YAML files, ``--set`` pairs and flags to one frozen :class:`RunConfig`, and back."""

from __future__ import annotations

import contextlib
import difflib
import functools
import re
import stat
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import BaseModel, ValidationError

from lockstep.config.sections import RunConfig
from lockstep.errors import ConfigError

#: Of a user's file as of a run's; the values are enough for a list of the classes of ImageNet-21k.
MAX_CONFIG_BYTES = 1 << 20
MAX_VALUES = 100_000
_MAX_DIGITS = 1000
_FLOAT = "tag:yaml.org,2002:float"
_NUMBERS = ("tag:yaml.org,2002:int", _FLOAT)
#: Of the core schema (YAML 1.2, section 10.3.2); YAML 1.1, which PyYAML reads and writes, takes ``1e-5`` for text.
_CORE_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")


#: Settings that had another name in an earlier version, which is still accepted: ``section.name``, and the key today.
RENAMED = {"telemetry.monitor": "telemetry.system_metrics"}

#: What other trainers call a setting.
PEER_NAMES = {
    **dict.fromkeys(
        ("grad_clip", "gradient_clip_val", "clip_grad_norm", "gradient_clipping"), "training.max_grad_norm"
    ),
    **dict.fromkeys(("max_epochs", "num_epochs", "num_train_epochs"), "training.epochs"),
    **dict.fromkeys(("accumulate_grad_batches", "gradient_accumulation_steps"), "training.accumulate"),
    **dict.fromkeys(("per_device_train_batch_size", "train_batch_size"), "training.batch_size"),
    **dict.fromkeys(("learning_rate", "base_lr"), "optimizer.lr"),
    **dict.fromkeys(("devices", "gpus", "num_gpus"), "hardware.selected_devices"),
    **dict.fromkeys(("patience", "early_stopping"), "training.early_stopping_patience"),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type"), "scheduler.name"),
    **dict.fromkeys(("log_every_n_steps", "logging_steps"), "telemetry.log_interval"),
    **{"val_check_interval": "validation.every_steps", "save_steps": "checkpoint.every_steps"},
    **{"deterministic": "training.reproducibility", "mixed_precision": "hardware.precision"},
    **{"warmup_ratio": "scheduler.warmup_epochs", "output_dir": "save_dir", "default_root_dir": "save_dir"},
}
#: Sections that others call otherwise, and which are less like them than the name of another section.
_PEER_SECTIONS = {**dict.fromkeys(("logging", "logger", "loggers"), "telemetry"), "trainer": "training"}


def resolve(*layers: Mapping[str, Any]) -> RunConfig:
    """Merge nested mappings, later over earlier, and validate the result.

    Raises:
        ConfigError: an unknown key (with the nearest right one) or a bad value.
    """
    merged: dict[str, Any] = functools.reduce(merge, layers, {})
    try:
        return RunConfig.model_validate(with_current_names(merged))
    except ValidationError as error:
        raise explain(error, RunConfig) from None


def with_current_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """``settings`` with the old names of :data:`RENAMED` replaced; a line on standard error names the new one."""
    result = dict(settings)
    for old, new in RENAMED.items():
        section, _, name = old.partition(".")
        values = result.get(section)
        if isinstance(values, Mapping) and name in values:
            result[section] = {key: value for key, value in values.items() if key != name}
            result = merge(parse_path(new, values[name]), result)
            _report_renamed(old, new)
    return result


@functools.cache
def _report_renamed(old: str, new: str) -> None:
    sys.stderr.write(f"warning: the setting {old} is now {new}\n")


def load(
    files: Iterable[Path] = (), sets: Iterable[str] = (), overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Read files in order (each with its ``defaults:`` first), then ``a.b=c`` pairs, then flags.

    Returns the merged mapping, not yet validated, so that a task's own defaults can go under it.
    """
    layers = [*(read_file(Path(file)) for file in files), *map(parse_set, sets), overrides or {}]
    return functools.reduce(merge, layers, {})


def read_file(path: Path, _trail: tuple[Path, ...] = ()) -> dict[str, Any]:
    """One YAML (or JSON) file with the files named under ``defaults:`` merged beneath it.

    Names are relative to the file that gives them; the ending ``.yaml`` may be left out.
    """
    try:
        path = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL
        raise ConfigError(f"cannot read {path}", why=str(error), fix="check the path given to --config") from None
    if path in _trail:
        cycle = " → ".join(p.name for p in (*_trail, path))
        raise ConfigError(f"the files name each other as defaults: {cycle}", fix="remove one of the entries")
    content = _yaml_of(path)
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        fix = "write `section:` lines"
        raise ConfigError(f"{path} does not hold settings", why="its top level must be a mapping", fix=fix)
    defaults = content.pop("defaults", [])
    if not isinstance(defaults, list) or not all(isinstance(name, str) for name in defaults):
        raise ConfigError(f"`defaults` in {path} must be a list of file names", fix="write `defaults: [base_config]`")
    beneath = (read_file(_default_file(path, name), (*_trail, path)) for name in defaults)
    return functools.reduce(merge, [*beneath, content])


def _yaml_of(path: Path) -> Any:
    """The content of a file. Raises :class:`ConfigError`."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a named pipe would be waited for, a device read for ever
            raise ConfigError(f"{path} is not a regular file", fix="check the path given to --config")
        if status.st_size > MAX_CONFIG_BYTES:
            why = "a configuration is a short text"
            raise ConfigError(f"{path} is larger than 1 MiB", why=why, fix="check the path")
        return parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}", fix="check the path given to --config") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}", why=str(error), fix="check that it is a readable text file") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        fix = "correct the line that it names"
        raise ConfigError(f"{path} is not valid YAML", why=str(error)[:500], fix=fix) from None


def _default_file(path: Path, name: str) -> Path:
    """The file that ``name`` under ``defaults:`` of ``path`` means."""
    try:
        base = path.parent / name
        if base.is_dir() or (not base.exists() and base.suffix not in {".yaml", ".yml", ".json"}):
            base = base.with_name(base.name + ".yaml")
        return base.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, a NUL in it
        raise ConfigError(
            f"`defaults` in {path} names {name[:100]!r}, which is not a path", why=str(error)[:300], fix="name a file"
        ) from None


class _Rules(yaml.composer.Composer, yaml.resolver.Resolver):
    """With the floats of YAML 1.2, and without YAML 1.1's numbers to base 60, in which ``1:4`` is 64.

    A key that is twice in a mapping is refused, as YAML demands; PyYAML would forget the first one's value.
    """

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        tag: str = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        is_base_60 = kind is yaml.ScalarNode and ":" in value and tag in _NUMBERS
        return yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG if is_base_60 else tag

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                known = (key.tag, key.value)
                if known in lines:
                    problem = f"the key {key.value[:100]!r} is there already, in line {lines[known]}"
                    raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
                lines[known] = key.start_mark.line + 1
        return node


class _Loader(_Rules, yaml.SafeLoader):
    """In Python: its errors show the line."""


_FastLoader: type[Any] = _Loader
if yaml.__with_libyaml__:

    class _Libyaml(_Rules, yaml.CSafeLoader):
        """Ten times as fast; libyaml's own composer would not ask :class:`_Rules`."""

        def __init__(self, text: str | bytes) -> None:
            yaml.CSafeLoader.__init__(self, text)
            _Rules.__init__(self)

    _FastLoader = _Libyaml


class _Dumper(yaml.SafeDumper):
    """Quotes text that the loaders would take for a number, and escapes U+0085, which they would take for a space."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar(self.DEFAULT_SCALAR_TAG, text, style='"' if "\x85" in text else None)


_Dumper.add_representer(str, _Dumper.represent_str)

for _kind in (_Loader, _FastLoader, _Dumper):
    _kind.add_implicit_resolver(_FLOAT, _CORE_FLOAT, list("-+.0123456789"))


def parse_yaml(text: str | bytes) -> Any:
    """``text`` as plain values; no tag makes an object of a class.

    Raises:
        yaml.YAMLError: it is not YAML; or it is more than ``MAX_VALUES`` values once its aliases are written out,
            which a text of a kilobyte can be.
    """
    with contextlib.suppress(yaml.YAMLError, UnicodeError):
        return _parsed(text, _FastLoader)
    return _parsed(text, _Loader)


def _parsed(text: str | bytes, kind: type[Any]) -> Any:
    loader = kind(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _expanded(node, {}) > MAX_VALUES:
            raise yaml.YAMLError(f"it has more than {MAX_VALUES:,} values")
        return loader.construct_document(node)
    except (AttributeError, LookupError, RecursionError, ValueError) as error:
        # What PyYAML raises for `!!bool maybe`, `!!int ''`, `!!timestamp soon`, the 31st of February, deep nesting.
        raise yaml.YAMLError(f"a value cannot be read ({type(error).__name__}: {error})") from None
    finally:
        loader.dispose()


def _expanded(node: yaml.Node, known: dict[int, int | None]) -> int:
    """How many values ``node`` is; ``known`` has the nodes seen before, ``None`` for those that are being counted."""
    if id(node) in known:
        size = known[id(node)]
        if size is None:
            raise yaml.YAMLError("an alias stands for a part of itself")
        return size
    if node.tag == "tag:yaml.org,2002:int" and len(node.value) > _MAX_DIGITS:
        raise yaml.YAMLError(f"a number has {len(node.value):,} digits")
    known[id(node)] = None
    inner = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
    size = 1 + (0 if isinstance(node, yaml.ScalarNode) else sum(_expanded(part, known) for part in inner))
    known[id(node)] = size
    return size


def parse_set(pair: str) -> dict[str, Any]:
    """``training.batch_size=64`` → ``{"training": {"batch_size": 64}}``; the value is read as YAML."""
    key, equals, text = pair.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(part.isidentifier() for part in parts):
        raise ConfigError(
            f"--set {pair!r} is not of the form section.key=value", fix="for example --set training.epochs=5"
        )
    try:
        value = parse_yaml(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"--set {key}: the value is not valid YAML", why=str(error)[:300], fix="quote it") from None
    return parse_path(key.strip(), value)


def parse_path(key: str, value: Any) -> dict[str, Any]:
    """``training.epochs``, 3 → ``{"training": {"epochs": 3}}``."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return cast(dict[str, Any], value)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Nested merge; anything that is not a mapping is replaced whole."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def dump(config: RunConfig) -> str:
    """The whole configuration as YAML; ``load`` of it gives the same configuration."""
    return to_yaml(config.model_dump(mode="json"))


def to_yaml(settings: Mapping[str, Any]) -> str:
    """Nested settings as a configuration file, which is read as the same."""
    return yaml.dump(settings, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def key_for(option: str) -> str | None:
    """The setting that an unknown command-line option most likely means: by its own name, or by a peer's."""
    name = option.lstrip("-").replace("-", "_")
    leaves = {key.rpartition(".")[2]: key for key in reversed(all_keys(RunConfig))}
    return PEER_NAMES.get(name) or leaves.get(name)


def explain(error: ValidationError, model: type[BaseModel], prefix: str = "") -> ConfigError:
    """One :class:`ConfigError` for all that pydantic found wrong with ``model``'s input."""
    problems, fixes = [], []
    for item in error.errors():
        place = prefix + ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            near = _nearest(item["loc"], model)
            problems.append(f"unknown key {place}")
            fixes.append(f"did you mean {prefix}{near}?" if near else "docs/configuration.md lists every key")
        elif place:
            given = item.get("input")
            shown = "" if isinstance(given, dict) else f" (given: {repr(given)[:200]})"
            problems.append(f"{place}: {message[:1].lower() + message[1:]}{shown}")
        else:
            problems.append(message)
    return ConfigError("; ".join(problems), fix="; ".join(dict.fromkeys(fixes)) or "change the value named above")


def _nearest(location: tuple[int | str, ...], model: type[BaseModel]) -> str | None:
    """The known key most like the unknown one, looked for in its section first, then everywhere."""
    *parents, wrong = (str(part) for part in location)
    if model is RunConfig and (peer := PEER_NAMES.get(wrong) or _PEER_SECTIONS.get(wrong)):
        return peer
    here: type[BaseModel] | None = model
    for parent in parents:
        field = here.model_fields.get(parent) if here else None
        here = _section_of(field.annotation) if field else None
    if here:
        close = difflib.get_close_matches(wrong, here.model_fields, n=1, cutoff=0.6)
        if close:
            return ".".join([*parents, close[0]])
    everywhere = {key.rpartition(".")[2]: key for key in reversed(all_keys(model))}
    close = difflib.get_close_matches(wrong, everywhere, n=1, cutoff=0.75)
    return everywhere[close[0]] if close else None


def all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key of a settings model, sections excluded."""
    keys = []
    for name, field in model.model_fields.items():
        section = _section_of(field.annotation)
        keys += [prefix + name] if section is None else all_keys(section, f"{prefix}{name}.")
    return keys


def _section_of(kind: Any) -> type[BaseModel] | None:
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


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
    return functools.reduce(merge, (parse_path(key, value) for key, value in settings.items()), {})


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
