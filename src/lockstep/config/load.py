"""Load YAML files, ``--set`` pairs and flags into one frozen :class:`RunConfig`, and dump it again."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import BaseModel, ValidationError

from lockstep.config.sections import RunConfig, listed
from lockstep.errors import ConfigError
from lockstep.strategies import strategies

#: Maximum size of a configuration file, a user's or a run's.
MAX_CONFIG_BYTES = 1 << 20
_INT = "tag:yaml.org,2002:int"
_FLOAT = "tag:yaml.org,2002:float"
#: Numbers of the core schema (YAML 1.2, section 10.3.2). In YAML 1.1, PyYAML's version, ``1e-5`` is text and 010 is 8.
_CORE_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_CORE_INT = re.compile(r"([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z")

#: Settings of earlier versions and their replacements. Removed at the next minor version.
REMOVED = {
    "lightning.profiler": "give the Trainer a profiler: trainer={'profiler': SimpleProfiler(dirpath=…, filename=…)}",
    "telemetry.upload_to": "use storage.mirror",
    "telemetry.upload_every_epochs": "leave it out; storage.mirror copies each checkpoint when it is complete",
    "telemetry.csv": "leave it out; pandas.DataFrame(lockstep.Run(RUN).steps).to_csv(FILE) writes one",
    "telemetry.forecast": "leave it out; compare the forecast with samples_per_s of `lockstep show`",
    "telemetry.memory_snapshot": "call torch.cuda.memory._record_memory_history() and _dump_snapshot() in the task",
    "telemetry.monitor": "use telemetry.system_metrics",
    "training.engine": "leave it out; `lockstep lightning fit` trains a LightningModule",
    "pipeline.in_process": "leave it out: a pipeline has one process per device",
    "optimizer.layer_decay": "return parameter groups with their rates from Task.optimizer()",
    "training.cuda_graphs": "use training.compile=true with training.compile_mode=reduce-overhead",
}

#: Keys by short name. ``skip_bad`` and ``mode`` are settings of built-in tasks: flags only.
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
    "mirror": "storage.mirror",
    "runs_dir": "runs_dir",
    "log_interval": "telemetry.log_interval",
    "profile": "telemetry.profile",
    "profile_ranks": "telemetry.profile_ranks",
    "mode": "task.mode",
}

#: Names of settings and sections in other trainers, by key.
_PEER_NAMES = {
    "training": "trainer",
    "training.max_grad_norm": "grad_clip gradient_clip_val clip_grad_norm gradient_clipping",
    "training.epochs": "max_epochs num_epochs num_train_epochs",
    "training.accumulate": "accumulate_grad_batches gradient_accumulation_steps",
    "training.batch_size": "per_device_train_batch_size train_batch_size",
    "training.early_stopping_patience": "patience early_stopping",
    "training.reproducibility": "deterministic",
    "optimizer.lr": "learning_rate base_lr",
    "hardware.selected_devices": "device devices gpus num_gpus world_size nproc_per_node distributed.enabled",
    "hardware.precision": "mixed_precision",
    "scheduler.name": "lr_scheduler lr_scheduler_type",
    "scheduler.warmup_epochs": "warmup_ratio",
    "telemetry": "logging logger loggers",
    "telemetry.log_interval": "log_every_n_steps logging_steps",
    "validation.every_steps": "val_check_interval",
    "checkpoint.every_steps": "save_steps",
    "save_dir": "output_dir default_root_dir",
}
_KEY_OF_OTHER_TRAINERS = {name: key for key, names in _PEER_NAMES.items() for name in names.split()}


def resolve(*layers: Mapping[str, Any]) -> RunConfig:
    """Merge nested mappings, later over earlier, and validate the result. Raises :class:`ConfigError`."""
    merged: dict[str, Any] = functools.reduce(merge, layers, {})
    _refuse_removed(merged)
    try:
        return RunConfig.model_validate(merged)
    except ValidationError as error:
        raise explain(error, RunConfig) from None


def one_micro_batch(settings: Mapping[str, Any], config: RunConfig) -> RunConfig:
    """Make a device's share of a global batch one micro-batch, unless ``settings`` has another size for it.

    A pipeline keeps its micro-batches: they follow one another through its stages.

    Args:
        settings: settings of the user, without defaults.
        config: the complete configuration. Settings that default to its ``training.batch_size`` keep their value.
    """
    training = settings.get("training") or {}
    spec = strategies().get(config.hardware.strategy)
    is_pipeline = spec is not None and spec.state == "staged"
    if training.get("global_batch_size") is None or training.get("batch_size") is not None or is_pipeline:
        return config
    default = config.training.batch_size
    return config.with_values(
        training={"batch_size": config.training.global_batch_size},
        optimizer={"base_batch_size": config.optimizer.base_batch_size or default},
        validation={"batch_size": config.validation.batch_size or default},
    )


def devices_in(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the devices in nested settings that are not validated; () without any."""
    devices: Any = listed(settings.get("hardware", {}).get("selected_devices"))
    return tuple(devices or ())


def _refuse_removed(settings: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigError` for a setting of :data:`REMOVED`."""
    for key, replacement in REMOVED.items():
        section, _, name = key.partition(".")
        values = settings.get(section)
        if isinstance(values, Mapping) and name in values:
            raise ConfigError(f"the setting {key} no longer exists", fix=replacement)


def load(
    files: Iterable[Path] = (), sets: Iterable[str] = (), overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Merge files in order (each with its ``defaults:`` first), then ``a.b=c`` pairs, then flags.

    The result is not validated, so that the defaults of a task can be merged beneath it.
    """
    layers = [*(read_file(Path(file)) for file in files), *map(parse_set, sets), overrides or {}]
    return functools.reduce(merge, layers, {})


def read_file(path: Path, _trail: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a YAML (or JSON) file, and merge the files named under ``defaults:`` beneath it.

    Names are relative to the file that contains them; the suffix ``.yaml`` may be left out.
    """
    try:
        if path.suffix not in {".yaml", ".yml", ".json"} and not path.is_file():
            path = path.with_name(path.name + ".yaml")
        path = path.resolve()
        if not path.exists():
            raise ConfigError(f"configuration file not found: {path}", fix="check the path of --config")
        if not path.is_file():  # a pipe would block, and a device could be read forever
            raise ConfigError(f"{path} is not a regular file", fix="check the path of --config")
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(
                f"{path} is larger than 1 MiB", why="a configuration is a short text", fix="check the path"
            )
        text = path.read_text(encoding="utf-8")
    except (OSError, RuntimeError, ValueError) as error:  # name too long, loop of links, NUL in a name, not a text
        fix = "check that it is a readable text file"
        raise ConfigError(f"cannot read {str(path)[:200]}", why=str(error)[:300], fix=fix) from None
    if path in _trail:
        cycle = " → ".join(p.name for p in (*_trail, path))
        raise ConfigError(f"the files name each other as defaults: {cycle}", fix="remove one of the entries")
    content = parse_settings(text, str(path))
    defaults = content.pop("defaults", [])
    if not isinstance(defaults, list) or not all(isinstance(name, str) for name in defaults):
        raise ConfigError(f"`defaults` in {path} must be a list of file names", fix="write `defaults: [base_config]`")
    beneath = (read_file(path.parent / name, (*_trail, path)) for name in defaults)
    return functools.reduce(merge, [*beneath, content])


_Parser: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


class _Loader(yaml.composer.Composer, _Parser):  # type: ignore[misc]
    """Reads numbers as in YAML 1.2, without YAML 1.1's numbers to base 60, in which ``1:4.5`` is 64.5.

    Refuses duplicate keys in a mapping, as YAML demands; PyYAML would drop the first value.
    """

    def __init__(self, text: str | bytes) -> None:
        _Parser.__init__(self, text)
        yaml.composer.Composer.__init__(self)  # libyaml's composer ends the process if values are nested very deeply

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        tag: str = super().resolve(kind, value, implicit)
        is_base_60 = kind is yaml.ScalarNode and ":" in value and tag == _FLOAT
        return yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG if is_base_60 else tag

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys: dict[tuple[str, str], yaml.Node] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            first = keys.setdefault((key.tag, key.value), key)
            if first is not key:
                problem = f"duplicate key {key.value[:100]!r}, first in line {first.start_mark.line + 1}"
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes text that the loader would read as a number, and escapes U+0085, which it would read as a space."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar(self.DEFAULT_SCALAR_TAG, text, style='"' if "\x85" in text else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def _core_int(loader: Any, node: yaml.ScalarNode) -> int:
    """Read an integer: ``010`` is ten, and octal numbers begin with ``0o``."""
    text = loader.construct_scalar(node)
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _INT]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
_Loader.add_constructor(_INT, _core_int)
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(_INT, _CORE_INT, list("-+0123456789"))
    _kind.add_implicit_resolver(_FLOAT, _CORE_FLOAT, list("-+.0123456789"))


def parse_yaml(text: str | bytes) -> Any:
    """Parse ``text`` into plain values; no tag constructs an object of a class. Raises ``yaml.YAMLError``."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark is not None else ""
        context = ""
        if error.context and error.context_mark is not None:
            context = f" ({error.context} from line {error.context_mark.line + 1})"
        raise yaml.YAMLError(f"{line}{error.problem}{context}") from None
    except (AttributeError, LookupError, RecursionError, ValueError) as error:
        # PyYAML raises these for `!!bool maybe`, `!!int ''`, `!!timestamp soon`, the 31st of February, deep nesting.
        raise yaml.YAMLError(f"a value cannot be read ({type(error).__name__}: {error})") from None


def parse_settings(text: str, name: str) -> dict[str, Any]:
    """Parse the text of a configuration file. Raises :class:`ConfigError` with the ``name`` of the file."""
    try:
        content = parse_yaml(text)
    except yaml.YAMLError as error:
        fix = "compare the indentation of that line with its neighbours; check its colon and quotes"
        raise ConfigError(f"{name} is not valid YAML", why=str(error)[:500], fix=fix) from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        fix = "write `section:` lines"
        raise ConfigError(f"{name} does not hold settings", why="its top level must be a mapping", fix=fix)
    return content


def parse_set(pair: str) -> dict[str, Any]:
    """Parse ``training.batch_size=64`` to ``{"training": {"batch_size": 64}}``; the value is YAML."""
    key, equals, text = pair.partition("=")
    if not equals or not all(part.isidentifier() for part in key.strip().split(".")):
        fix = "for example --set training.epochs=5"
        raise ConfigError(f"--set {pair!r} is not of the form section.key=value", fix=fix)
    try:
        return parse_path(key.strip(), parse_yaml(text))
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {key}: the value is not valid YAML", why=str(error)[:300], fix="quote it") from None


def parse_path(key: str, value: Any) -> dict[str, Any]:
    """Nest a value under its key: ``training.epochs``, 3 → ``{"training": {"epochs": 3}}``."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return cast(dict[str, Any], value)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested mappings; any other value of ``base`` is replaced by that of ``over``."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nest settings whose keys may have dots: ``{"optimizer.lr": 1}`` → ``{"optimizer": {"lr": 1}}``."""
    return functools.reduce(merge, (parse_path(key, value) for key, value in settings.items()), {})


def dump(config: RunConfig) -> str:
    """Write the whole configuration as YAML; loading it results in the same configuration."""
    return to_yaml(config.model_dump(mode="json"))


def to_yaml(settings: Mapping[str, Any]) -> str:
    """Write nested settings as a configuration file; reading it results in the same settings."""
    return yaml.dump(settings, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def explain(error: ValidationError, model: type[BaseModel], prefix: str = "") -> ConfigError:
    """Convert all errors of pydantic in the input of ``model`` to one :class:`ConfigError`."""
    problems = []
    fixes = []
    settings = {}
    for item in error.errors():
        key = prefix + ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            replacement = getattr(model, "removed_settings", {}).get(item["loc"][-1])
            if replacement is not None:
                problems.append(f"the setting {key} no longer exists")
                fixes.append(replacement)
                continue
            nearest = _nearest(item["loc"], model)
            problems.append(f"unknown key {key}")
            fixes.append(f"did you mean {prefix}{nearest}?" if nearest else "docs/configuration.md lists every key")
        elif item["type"] == "missing":
            problems.append(f"{key} is required")
            settings[key] = "a value is required"
            fixes.append(f"set it: --set {key}=…")
        elif key:
            value = item.get("input")
            if item["type"] == "string_type" and isinstance(value, bool | int | float):
                fixes.append(f"a text that looks like another value needs quotes: --set {key}='\"…\"'")
            shown = "" if isinstance(value, dict) else f" (given: {repr(value)[:200]})"
            settings[key] = f"{message[:1].lower() + message[1:]}{shown}"
            problems.append(f"{key}: {settings[key]}")
        else:
            problems.append(message)
    fix = "; ".join(dict.fromkeys(fixes)) or "docs/configuration.md lists the values"
    refusal = ConfigError("; ".join(problems), fix=fix)
    refusal.settings = settings
    return refusal


def _nearest(location: tuple[int | str, ...], model: type[BaseModel]) -> str | None:
    """Find the key for an unknown one: its name in other trainers, or the most similar in its section, or anywhere."""
    *parents, unknown = (str(part) for part in location)
    if model is RunConfig:
        for name in (".".join([*parents, unknown]), unknown):
            if name in _KEY_OF_OTHER_TRAINERS:
                return _KEY_OF_OTHER_TRAINERS[name]
    keys = all_keys(model)
    section = "".join(f"{part}." for part in parents)
    section_names = [key.removeprefix(section).partition(".")[0] for key in keys if key.startswith(section)]
    if matches := difflib.get_close_matches(unknown, section_names, n=1, cutoff=0.6):
        return section + matches[0]
    keys_by_leaf = {key.rpartition(".")[2]: key for key in reversed(keys)}
    matches = difflib.get_close_matches(unknown, keys_by_leaf, n=1, cutoff=0.75)
    return keys_by_leaf[matches[0]] if matches else None


def all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """List every dotted key of a settings model, without its sections."""
    keys = []
    for name, field in model.model_fields.items():
        section: Any = field.annotation
        is_section = isinstance(section, type) and issubclass(section, BaseModel)
        keys += all_keys(section, f"{prefix}{name}.") if is_section else [prefix + name]
    return keys


def key_for(option: str) -> str | None:
    """Find the setting for an unknown command-line option, by its last part or by its name in other trainers."""
    name = option.lstrip("-").replace("-", "_")
    keys_by_leaf = {key.rpartition(".")[2]: key for key in reversed(all_keys(RunConfig))}
    return _KEY_OF_OTHER_TRAINERS.get(name) or keys_by_leaf.get(name)


def from_keywords(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nest settings by short name, key or top-level name. Raises :class:`ConfigError` for an unknown one."""
    for name in settings:
        if name not in SHORT_NAMES and "." not in name and name not in RunConfig.model_fields:
            raise ConfigError(f"unknown setting {name!r}", fix=_suggestion(name))
    return nested({SHORT_NAMES.get(name, name): value for name, value in settings.items()})


def _suggestion(name: str) -> str:
    key = key_for(name)
    if key is not None and key not in SHORT_NAMES.values():
        return f'it has no short name: pass it by its key, in config={{"{key}": …}}'
    short_names = [short_name for short_name, target in SHORT_NAMES.items() if target == key]
    matches = short_names or difflib.get_close_matches(name, SHORT_NAMES, n=1)
    return f"did you mean {matches[0]}?" if matches else "docs/configuration.md lists every setting"
