"""The keywords of :func:`lockstep.train` and its relatives, for editors and type checkers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from lockstep.config import Precision, RunConfig, Strategy
from lockstep.config.load import from_keywords, merge, nested


class Settings(TypedDict, total=False):
    """Common settings by their short names, which are the flags of ``lockstep train`` too.

    A setting that is left out has the task's default, else Lockstep's. ``docs/configuration.md`` has every setting.
    """

    name: str | None
    """A label of the run."""
    devices: str | Sequence[str] | None
    """``"cpu"``, ``"gpu:0,gpu:1"`` or ``"all"`` GPUs; a device named twice runs two ranks. Default: one device."""
    strategy: Strategy
    """How several devices share the work. Default: ``auto``."""
    precision: Precision
    """Of the forward pass. Default: ``"32"``."""
    reproducibility: Literal["fast", "exact"]
    """``exact``: bitwise the same weights on 1, 2, 4 or 8 ranks. Default: ``fast``."""
    nodes: str | int | None
    """Machines that train together: 2, or ``"1:4"``. Default: this one."""
    rdzv: str | None
    """``host:port`` where the nodes meet."""
    epochs: int
    """Passes over the training data. Default: 20."""
    max_steps: int | None
    """Stop after N optimizer steps."""
    batch_size: int
    """Samples per device and micro-batch. Default: 32."""
    global_batch_size: int | None
    """Samples per optimizer step over all devices."""
    grad_accum_steps: int
    """Micro-batches per device and optimizer step. Default: 1."""
    lr: float
    """Learning rate. Default: 0.001."""
    lr_scaling: Literal["none", "linear", "sqrt"]
    """Scale the learning rate with the global batch. Default: ``none``."""
    warmup_epochs: float | None
    """Linear warm-up of the learning rate, in epochs."""
    weight_decay: float
    """Of the optimizer. Default: 0.0001."""
    max_grad_norm: float | None
    """Clip the gradient to this norm; ``None``: off. Default: 1."""
    early_stopping_patience: int
    """Evaluations without improvement before the run stops; 0: off. Default: 7."""
    seed: int
    """Of parameters, data order, augmentation and dropout. Default: 42."""
    init_from: str | os.PathLike[str] | None
    """A run or a checkpoint folder to take the initial weights from."""
    fast_dev_run: bool
    """One training step and one validation batch."""
    data_dir: str | os.PathLike[str] | None
    """Folder of the task's data."""
    download: bool
    """Let the task download its data."""
    num_workers: int | Literal["auto"] | None
    """Loader processes per rank. Default: ``auto``."""
    save_dir: str | os.PathLike[str] | None
    """The run's folder. Default: a new folder in ``runs_dir``."""
    runs_dir: str | os.PathLike[str]
    """Where new run folders are made. Default: ``runs``."""
    log_interval: int
    """Optimizer steps between logged values. Default: 50."""
    profile: str | None
    """``"A:B"``: record optimizer steps A to B with torch's profiler."""
    profile_ranks: int | str | Sequence[int]
    """The ranks that ``profile`` records. Default: 0."""


def mapping_of(config: RunConfig | Mapping[str, Any] | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with ``settings`` over it, as nested mappings of plain values.

    Raises:
        ConfigError: an unknown keyword.
    """
    if isinstance(config, RunConfig):
        given = config.model_dump(exclude_unset=True, mode="json")
    else:
        given = nested(config or {})
    plain = {k: os.fspath(v) if isinstance(v, os.PathLike) else v for k, v in settings.items()}
    result = merge(given, from_keywords(plain))
    if result.get("init_from") is not None:
        result["init_from"] = weights_folder(str(result["init_from"]), Path(result.get("runs_dir", "runs")))
    return result


def weights_folder(ref: str, runs_dir: Path) -> str:
    """A folder as it is; else the folder of the run that ``ref`` means. Raises :class:`RunFolderError`."""
    from lockstep.telemetry.rundir import find_run

    return ref if Path(ref).exists() else str(find_run(ref, runs_dir).path)
