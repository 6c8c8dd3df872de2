"""The keywords of :func:`lockstep.train` and its relatives, for editors and type checkers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from lockstep.config import Precision, RunConfig, Strategy
from lockstep.config.load import from_keywords, merge, nested
from lockstep.rundir.remote import is_url


class Settings(TypedDict, total=False):
    """Common settings by their short names, which are the flags of ``lockstep train`` too.

    A setting that is left out has the task's default, else Lockstep's: ``docs/configuration.md`` has them.
    """

    name: str | None  # a label of the run
    devices: str | Sequence[str] | None  # "cpu", "gpu:0,gpu:1" or "all" GPUs; a device named twice runs two ranks
    strategy: Strategy  # how several devices share the work
    precision: Precision  # of the forward pass
    reproducibility: Literal["fast", "exact"]  # exact: bitwise the same weights on 1, 2, 4 or 8 ranks
    nodes: str | int | None  # machines that train together: 2, or "1:4"
    rdzv: str | None  # host:port where the nodes meet
    epochs: int  # passes over the training data
    max_steps: int | None  # stop after N optimizer steps
    batch_size: int  # samples per device and micro-batch
    global_batch_size: int | None  # samples per optimizer step over all devices
    grad_accum_steps: int  # micro-batches per device and optimizer step
    lr: float
    lr_scaling: Literal["none", "linear", "sqrt"]  # scale the learning rate with the global batch
    warmup_epochs: float | None  # linear warm-up of the learning rate, in epochs
    weight_decay: float  # of the optimizer
    max_grad_norm: float | None  # clip the gradient to this norm; None: off
    early_stopping_patience: int  # evaluations without improvement before the run stops; 0: off
    seed: int  # of parameters, data order, augmentation and dropout
    init_from: str | os.PathLike[str] | None  # a run or a checkpoint folder to take the initial weights from
    fast_dev_run: bool  # three training steps and one validation batch
    data_dir: str | os.PathLike[str] | None  # folder of the task's data
    download: bool  # let the task download its data
    num_workers: int | Literal["auto"] | None  # loader processes per rank
    save_dir: str | os.PathLike[str] | None  # the run's folder
    mirror: str | None  # URL of a copy of the run's folder, from which any machine resumes
    runs_dir: str | os.PathLike[str]  # where new run folders are made
    log_interval: int  # optimizer steps between logged values
    profile: str | None  # "A:B": record optimizer steps A to B with torch's profiler
    profile_ranks: int | str | Sequence[int]  # the ranks that profile records


def mapping_of(config: RunConfig | Mapping[str, Any] | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` with ``settings`` over it, as nested mappings of plain values.

    Raises:
        ConfigError: an unknown keyword.
    """
    base = config.model_dump(exclude_unset=True, mode="json") if isinstance(config, RunConfig) else nested(config or {})
    plain = {k: os.fspath(v) if isinstance(v, os.PathLike) else v for k, v in settings.items()}
    result = merge(base, from_keywords(plain))
    if result.get("init_from") is not None:
        result["init_from"] = weights_folder(str(result["init_from"]), Path(result.get("runs_dir", "runs")))
    return result


def weights_folder(ref: str, runs_dir: Path) -> str:
    """Return ``ref`` if it is a folder, else the folder of the run that it names. Raises :class:`RunFolderError`.

    Of a mirror, it is a copy with the best weights.
    """
    from lockstep.rundir.summary import find_run

    if is_url(ref):
        from lockstep.api.finished.reopen import fetch_weights

        copy = find_run(ref, runs_dir)
        fetch_weights(ref, copy, "best")
        return str(copy.path)
    folder = Path(ref).expanduser()
    return str(folder) if folder.exists() else str(find_run(ref, runs_dir.expanduser()).path)
