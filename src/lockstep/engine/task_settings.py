"""Settings of a task: the fields of its ``Config`` and the parameters of its ``__init__``; recorded from an object."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path, PurePath
from typing import Annotated, Any, NamedTuple, Optional, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    TypeAdapter,
    create_model,
    field_validator,
)

from lockstep.config.sections import expanded

#: Characters of one recorded value; a longer one belongs in a file, since ``config.yaml`` is a short text.
MAX_TEXT = 1 << 16
#: Keys of the section ``task`` with a meaning for every task.
RESERVED = frozenset({"name", "unrecorded"})
_CONFIG = frozenset({"config", "cfg"})
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_ANY: TypeAdapter[Any] = TypeAdapter(Any)


class TaskConfig(BaseModel):
    """Base of ``Task.Config``: frozen, closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _in_home(cls, value: object) -> object:
        return expanded(value)


class Recorded(NamedTuple):
    """The settings of a task object as plain values, and the names of arguments that are none."""

    settings: dict[str, Any]
    unrecorded: tuple[str, ...] = ()


class _Field(NamedTuple):
    annotation: Any
    default: Any  # ``...``: the value is required


def settings_model(kind: type[Any]) -> type[BaseModel]:
    """Make the fields of the task's ``Config`` and of the parameters of its ``__init__`` that take plain values."""
    config: Any = kind.Config
    if not issubclass(config, BaseModel):  # a dataclass, or another class with an __init__
        config = create_model(config.__name__, __base__=TaskConfig, **_fields(config.__init__))
    fields = _arguments(kind)
    if _takes_keywords(kind):
        config = type(config.__name__, (config,), {"model_config": ConfigDict(extra="allow")})
    return create_model(kind.__name__, __base__=config, **fields) if fields else config


def arguments_of(kind: type[Any], settings: Mapping[str, Any], validated: BaseModel) -> tuple[Any, dict[str, Any]]:
    """Return the task's configuration, and the arguments to make it with; ``validated``: ``settings`` as a model."""
    fields = _arguments(kind)
    is_model = issubclass(kind.Config, BaseModel)
    names = {*fields, *(validated.model_extra or ())}
    arguments = {name: getattr(validated, name) for name in validated.model_fields_set if name in names}
    values = {name: value for name, value in settings.items() if name not in names}
    if not is_model:
        values = {name: getattr(validated, name) for name in values}
    config = kind.Config.model_validate(values) if is_model else kind.Config(**values)
    parameter = config_parameter(kind)
    return config, {**({} if parameter is None else {parameter: config}), **arguments}


def record_arguments(kind: type[Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Recorded:
    """Record the arguments of ``kind(*arguments, **keywords)``, with defaults; none if Python will refuse them."""
    if not kind.records_arguments or not isinstance(kind.Config, type):  # the latter is refused later
        return Recorded({})
    signature = inspect.signature(kind.__init__)
    try:
        bound = signature.bind(None, *arguments, **keywords)
    except TypeError:
        return Recorded({})
    fields = _arguments(kind)
    values = {name: field.default for name, field in fields.items() if field.default is not ...}
    for name, value in [*bound.arguments.items()][1:]:
        values |= value if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    config = values.pop(config_parameter(kind) or "", None)
    settings, unrecorded = ({}, ()) if config is None else _record_config(kind, config)
    for name, value in values.items():
        is_setting = name in fields or (_takes_keywords(kind) and name not in signature.parameters)
        parameter = signature.parameters.get(name)
        try:
            settings[name] = _plain(value, fields[name].annotation if name in fields else Any, accept=is_setting)
        except Exception:  # whatever an object of the user's raises
            is_default = parameter is not None and value is parameter.default
            unrecorded += () if is_default else (name,)
    return Recorded(settings, unrecorded)


def settings_of(task: Any) -> Recorded:
    """Return the settings that make a task like ``task``: its arguments and its configuration."""
    kind = type(task)
    recorded: Recorded = task._lockstep_recorded
    config = vars(task).get("config")
    if isinstance(config, kind.Config):  # it may have been made, or changed, by __init__
        live = _record_config(kind, config)
        return Recorded(live.settings | recorded.settings | live.settings, recorded.unrecorded + live.unrecorded)
    if config_names(kind) <= recorded.settings.keys():
        return recorded
    return Recorded(_record_config(kind, kind.Config()).settings | recorded.settings, recorded.unrecorded)


def config_parameter(kind: type[Any]) -> str | None:
    """Return the parameter of ``__init__`` that takes the task's ``Config``."""
    declared = kind.Config is not TaskConfig
    for parameter in _signature(kind.__init__).parameters.values():
        if parameter.name in _CONFIG:
            types = (parameter.annotation, *get_args(parameter.annotation))
            if any(map(_is_omegaconf, types)):
                continue
            named = any(isinstance(part, type) and issubclass(kind.Config, part) for part in types)
            if declared or named or parameter.default is parameter.empty:
                return parameter.name
    return "config" if declared and _takes_keywords(kind) else None


def _takes_keywords(kind: type[Any]) -> bool:
    parameters = inspect.signature(kind.__init__).parameters.values()
    return kind.records_arguments and any(p.kind is p.VAR_KEYWORD for p in parameters)


def _arguments(kind: type[Any]) -> dict[str, Any]:
    return _fields(kind.__init__, without=config_parameter(kind)) if kind.records_arguments else {}


def config_names(kind: type[Any]) -> set[str]:
    config: Any = kind.Config
    return set(config.model_fields) if issubclass(config, BaseModel) else set(_fields(config.__init__))


def _record_config(kind: type[Any], config: Any) -> Recorded:
    if not isinstance(config, kind.Config):
        return Recorded({}, (config_parameter(kind) or "config",))
    if isinstance(config, BaseModel):
        paths = {name: str(value.absolute()) for name, value in config if isinstance(value, Path)}
        return Recorded({**config.model_dump(mode="json"), **paths})
    settings = dict[str, Any]()
    unrecorded = list[str]()
    for name, field in _fields(kind.Config.__init__).items():
        try:
            settings[name] = _plain(getattr(config, name), field.annotation)
        except Exception:  # whatever an object of the user's raises
            unrecorded.append(name)
    return Recorded(settings, tuple(unrecorded))


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function, eval_str=True)
    except Exception:  # an annotation that only a type checker can resolve
        return inspect.signature(function)


def _fields(function: Callable[..., Any], without: str | None = None) -> dict[str, Any]:
    """Return the parameters of ``function`` with plain values, as fields of a model."""
    fields = dict[str, Any]()
    for parameter in [*_signature(function).parameters.values()][1:]:
        name = parameter.name
        default = parameter.default
        is_reserved = name in RESERVED or name.startswith("_") or hasattr(BaseModel, name)
        if parameter.kind not in _BY_NAME or name == without or is_reserved:
            continue
        annotation = parameter.annotation
        if annotation is parameter.empty or isinstance(annotation, str):
            is_typed = isinstance(default, tuple | PurePath | Enum | BaseModel) or dataclasses.is_dataclass(default)
            annotation = type(default) if is_typed else Any
        annotation = _of_omegaconf(annotation)
        if default is None:
            annotation = Optional[annotation]  # noqa: UP045  # an annotation may be any object
        try:
            TypeAdapter(annotation).json_schema()
            if default is not parameter.empty:
                _plain(default, annotation)
        except Exception:  # an annotation may be any object: then its parameter is not a setting
            continue
        fields[name] = _Field(annotation, ... if default is parameter.empty else default)
    return fields


def _of_omegaconf(annotation: Any) -> Any:
    """Return the type of a field that holds a ``DictConfig`` or ``ListConfig`` as plain data; else ``annotation``."""
    kind = next((part for part in (annotation, *get_args(annotation)) if _is_omegaconf(part)), None)
    if kind is None:
        return annotation
    from omegaconf import DictConfig, OmegaConf

    content = dict[str, Any] if issubclass(kind, DictConfig) else list[Any]
    return Annotated[
        content, BeforeValidator(_container), AfterValidator(OmegaConf.create), PlainSerializer(_container)
    ]


def _is_omegaconf(kind: Any) -> bool:
    return isinstance(kind, type) and kind.__module__.partition(".")[0] == "omegaconf"


def _container(value: Any) -> Any:
    """Return a ``DictConfig`` or ``ListConfig`` as mappings and lists, interpolations resolved; else ``value``."""
    if not _is_omegaconf(type(value)):
        return value
    from omegaconf import OmegaConf

    return OmegaConf.to_container(value, resolve=True)


def _plain(value: Any, annotation: Any, *, accept: bool = True) -> Any:
    """Return ``value`` as plain data of a configuration. Raises :class:`ValueError` if it would be read as another."""
    value = _container(value)
    if not accept or not _is_plain(value):
        raise ValueError("not a plain value")
    adapter = TypeAdapter(annotation)
    plain = _ANY.dump_python(adapter.dump_python(value, mode="json", warnings=False), mode="json")
    read = _container(adapter.validate_python(plain))
    if isinstance(read, tuple) and isinstance(value, list):  # a list is as good, and comes back as a tuple
        value = tuple(value)
    if read != value or len(json.dumps(plain)) > MAX_TEXT:
        raise ValueError("read as another value")
    return str(value.absolute()) if isinstance(value, Path) else plain


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    is_object = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return is_object or value is None or isinstance(value, bool | int | float | str | PurePath | Enum | BaseModel)
