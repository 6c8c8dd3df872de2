"""The settings that a sweep varies: lists of values, or ranges that a search draws from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import yaml
from cyclopts import Group

from lockstep.cli.output import flag
from lockstep.config.load import parse_yaml
from lockstep.errors import ConfigError

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"(log:)?({_NUMBER})\.\.({_NUMBER})")


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, integers if both are; ``is_log``: drawn evenly on a logarithmic scale."""

    low: float
    high: float
    is_log: bool = False


_flag = partial(flag, group=Group("Sweep", sort_key=0))


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """How a sweep trains its trials; the flags of its command."""

    seeds: Annotated[int, _flag("Seeds of each combination, from --seed upwards. Default: 1.")] = 1
    parallel: Annotated[
        int | None,
        _flag("Trials at the same time; each has as many of --devices. Default: one on each GPU, or one on the CPU."),
    ] = None
    search: Annotated[
        Literal["grid", "optuna"], _flag("optuna chooses the points, and stops bad trials early. Default: grid.")
    ] = "grid"
    trials: Annotated[int | None, _flag("Trials of a search. Default: 20.")] = None
    resume: Annotated[bool, _flag("Train the remaining trials of the sweep in --save-dir, if there is one.")] = False
    on: Annotated[Literal["ray"] | None, _flag("ray: trials on the free resources of a Ray cluster.")] = None
    ray_address: Annotated[str | None, _flag("Of the cluster, as in `lockstep train`.", metavar="HOST:PORT")] = None
    ray_resource: Annotated[
        list[str] | None,
        _flag("Reserved for each device of a trial, e.g. CPU=4; GPU=0.5: two share a GPU.", metavar="NAME=NUMBER"),
    ] = None


#: Values by the key of their setting.
Space = Mapping[str, Sequence[Any] | Range]


def split_sets(pairs: Iterable[str]) -> tuple[dict[str, Sequence[Any] | Range], list[str]]:
    """Separate ``--set`` pairs with several values, ``KEY=A,B`` or a range ``KEY=A..B``, from those with one.

    A list in brackets is one value.
    """
    space: dict[str, Sequence[Any] | Range] = {}
    fixed = []
    for pair in pairs:
        key, _, text = pair.partition("=")
        values = _values(text)
        if isinstance(values, Range) or len(values) > 1:
            space[key.strip()] = values
        else:
            fixed.append(pair)
    return space, fixed


def _values(text: str) -> list[Any] | Range:
    number_range = parse_range(text)
    if number_range is not None:
        return number_range
    try:
        values = parse_yaml(f"[{text}]")
    except yaml.YAMLError:  # one value, whose error `--set` reports
        return [text]
    return values if isinstance(values, list) else [text]


def parse_range(text: str) -> Range | None:
    """Parse ``1e-5..1e-2`` or ``log:1e-5..1e-2``; ``None`` for other texts. Raises :class:`ConfigError`."""
    parts = _RANGE.fullmatch(text.strip())
    if parts is None:
        return None
    low = parse_yaml(parts[2])
    high = parse_yaml(parts[3])
    is_log = parts[1] is not None
    if not low < high or (is_log and low <= 0):
        raise ConfigError(
            f"{text} is not a range",
            why="a logarithmic range begins above 0" if low < high else "its first number must be the smaller one",
            fix="write for example log:1e-5..1e-2",
        )
    return Range(low, high, is_log)


def checked(space: Mapping[str, Any]) -> dict[str, Sequence[Any] | Range]:
    """Check the space of a program: lists of values, or ranges, also as text. Raises :class:`ConfigError`."""
    result: dict[str, Sequence[Any] | Range] = {}
    for key, values in space.items():
        number_range = parse_range(values) if isinstance(values, str) else values
        if isinstance(number_range, Range):
            result[key] = number_range
        elif isinstance(values, str) or not isinstance(values, Iterable):
            raise ConfigError(
                f"{key}: {values!r} is not a list of values",
                fix="give a list of values, or a range such as 'log:1e-5..1e-2'",
            )
        else:
            result[key] = list(values)
    return result
