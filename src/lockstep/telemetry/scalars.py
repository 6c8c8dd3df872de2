"""What a run's numbers are called: ``val_loss`` in its rows, ``val/loss`` in TensorBoard, W&B, MLflow and CSV."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any, TypeVar

from lockstep.events import EpochEnded, Evaluated, Event, RanksLogged, RunEnded, StepLogged

_SPLIT = re.compile(r"(train|val|test)[/_](.+)|valid(?:ation)?[/_](.+)", re.DOTALL)
Value = TypeVar("Value")


def row_name(name: str) -> str:
    """What rows, reports and loggers know a user's ``val/acc``, ``valid_acc`` or ``validation/acc`` by: ``val_acc``."""
    found = _SPLIT.fullmatch(name)
    if found is None:
        return name
    return f"val_{found[3]}" if found[1] is None else f"{found[1]}_{found[2]}"


def monitored(row: Mapping[str, Value], monitor: str) -> tuple[str, Value] | None:
    """The value that ``monitor`` means, and its name: as logged, as in rows, or of the first of several loaders."""
    name = row_name(monitor)
    return next(((known, row[known]) for known in (monitor, name, f"{name}/dataloader_idx_0") if known in row), None)


def as_row(values: Mapping[str, Value], *, taken: Container[str] = ()) -> dict[str, Value]:
    """``values`` by :func:`row_name`; one whose name another value has, or that is ``taken``, keeps its own."""
    row: dict[str, Value] = {}
    for name, value in values.items():
        new = row_name(name)
        row[name if new in taken or new in row or new in values else new] = value
    return row


def named_scalars(event: Event) -> tuple[int, dict[str, float]]:
    """An event's optimizer step and its numbers by name; ``(0, {})`` when it has none.

    ``train/``, ``val/`` and ``test/`` hold losses and metrics, ``train_epoch/`` the means of epochs,
    ``throughput/`` the speed, ``ranks/`` the extremes over ranks.
    """
    match event:
        case StepLogged():
            speed = ("samples_per_s", "data_wait_share", "items_per_s", "mfu")
            values: dict[str, float | None] = {"lr": event.lr}
            values |= {f"train/{name}": getattr(event, name) for name in ("loss", "grad_norm")}
            values |= {f"throughput/{name}": getattr(event, name) for name in speed}
            values |= {f"train/{name}": value for name, value in event.scalars.items()}
            return event.step, {name: value for name, value in values.items() if value is not None}
        case RanksLogged():
            extremes = {"ranks/peak_gb_max": max(rank.peak_gb for rank in event.ranks)}
            if own := [rank.own_s for rank in event.ranks if rank.own_s is not None]:
                extremes |= {"ranks/own_s_min": min(own), "ranks/own_s_max": max(own)}
            return event.step, extremes
        case EpochEnded():
            return event.step, {"epoch": event.epoch, **_by_split(event.row, train="train_epoch")}
        case Evaluated():
            return event.step, _by_split(event.metrics)
        case RunEnded():
            return event.step, _by_split(event.final_metrics, only="test")
        case _:
            return 0, {}


def _by_split(values: Mapping[str, float], *, train: str = "train", only: str | None = None) -> dict[str, float]:
    """``val_loss`` → ``val/loss``; what belongs to no split is left out."""
    folders = {"train": train, "val": "val", "test": "test"}
    result = {}
    for key, value in values.items():
        split, underscore, name = key.partition("_")
        if underscore and split in folders and only in (None, split):
            result[f"{folders[split]}/{name}"] = value
    return result


def flattened(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key: ``{"training": {"epochs": 3}}`` → ``{"training.epochs": 3}``."""
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        flat |= flattened(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def plan_values(plan: Mapping[str, Any]) -> dict[str, str]:
    """What the plan decided, by title; ``plan`` as ``Plan.as_dict()`` gives it."""
    return {decision["title"]: decision["shown"] for decision in plan.get("decisions", {}).values()}
