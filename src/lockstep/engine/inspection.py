"""Facts of a task that the plan must know, without training it: its data, its model and the arithmetic of a sample."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import default_collate

from lockstep.data.reader import Reader
from lockstep.data.sampling import check_lengths, hash_lengths
from lockstep.engine.blueprint import on_meta, trial_of
from lockstep.engine.distributed.sync_batchnorm import has_batchnorm
from lockstep.engine.fingerprint import examined, read_sample, readable_sample
from lockstep.engine.generators import generators_kept
from lockstep.engine.metrics import directions_of, groups_remark, make_metrics
from lockstep.engine.strategies.ddp import joint_bytes
from lockstep.engine.task import Datasets, Task, similar_methods
from lockstep.engine.task_settings import settings_of
from lockstep.engine.training_data import EPOCH_CALLER, array_bytes, check_dataset, check_frames, collate_of, remarks_of
from lockstep.engine.trial_optimizer import optimizer_facts
from lockstep.errors import LockstepError, TaskError
from lockstep.planning.plan import Mode, TaskFacts

#: Handing a batch over from another process costs more than making one of such samples, seconds.
QUICK_S = 1e-4


def inspect_task(task: Task, datasets: Datasets, name: str) -> TaskFacts:
    """Examine sizes of the data sets and traits of the model."""
    if not hasattr(datasets, "train"):
        raise TaskError(
            f"the task's datasets() did not return Datasets, but {type(datasets).__name__}",
            fix="return lockstep.Datasets(train=…, val=…, test=…)",
        )
    named = {f"val {split}": dataset for split, dataset in datasets.named.items()}
    splits = {"train": datasets.train, "val": datasets.val, "test": datasets.test}
    for split, dataset in (splits | named).items():
        check_dataset(dataset, split)
        if collate_of(task) is default_collate:
            check_frames(dataset)
    trial = trial_of(task)
    sample_lengths = task.lengths()
    model = on_meta(trial)
    lr, scheduled = optimizer_facts(trial, model, task)
    lengths = None if sample_lengths is None else hash_lengths(check_lengths(sample_lengths, len(datasets.train)))
    before = _open_files()
    text, unstable = examined(datasets.train, skips=task._lockstep_data.on_bad_row == "skip")
    with generators_kept():
        for dataset in (datasets.val, datasets.test):
            if dataset is not None:
                read_sample(dataset, 0)
    after = _open_files()
    with generators_kept():
        whole_batches = Reader(datasets.train, collate_of(task), 0).gives_whole_batches
    evaluates = datasets.val is not None or datasets.test is not None
    modes, metrics_remark = _metric_facts(trial) if evaluates else ({}, None)
    sampling = None if datasets.weights is None else datasets.weights.facts
    is_stream = sampling is not None and sampling.stream
    opens_files = bool(after.keys() - before.keys())
    return TaskFacts(
        name=name,
        train_samples=len(datasets.train),
        val_samples=0 if datasets.val is None else len(datasets.val),
        test_samples=0 if datasets.test is None else len(datasets.test),
        parameters=sum(p.numel() for p in model.parameters()),
        vectors=sum(p.numel() for p in model.parameters() if p.dim() < 2),
        frozen=sum(p.numel() for p in model.parameters() if not p.requires_grad),
        has_batchnorm=has_batchnorm(model),
        whole_batches=whole_batches,
        quick_samples=opens_files and not is_stream and has_quick_samples(datasets.train),
        lengths=lengths,
        remarks=remarks_of(datasets.train, getattr(task, "epoch_caller", EPOCH_CALLER)),
        sampling=sampling,
        optimizer_lr=lr,
        own_schedule=scheduled,
        unrecorded=settings_of(task).unrecorded,
        monitor=_monitor_of(task),
        metric_modes=modes,
        metrics_remark=metrics_remark,
        similar_methods=similar_methods(type(task)),
        fingerprint=text + (f":{lengths}" if lengths else ""),
        unstable=unstable,
        read_file=next((key[1] for key, position in before.items() if after.get(key, position) != position), None),
        opens_files=opens_files,
        multiply_adds=multiply_adds(model, datasets.train),
        joint_bytes=joint_bytes(model),
        pads=type(task).pad is not Task.pad,
        convolutions=any(isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)) for module in model.modules()),
        array_bytes=array_bytes(datasets.train),
    )


def _open_files() -> dict[tuple[str, str], str | None]:
    """Return positions of files open for reading, by descriptor and name; ``None`` for other open things.

    That is a database or a connection, for example. Empty without /proc.
    """
    positions: dict[tuple[str, str], str | None] = {}
    with contextlib.suppress(OSError):
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                number = link.name
                file = link.readlink()
                _, position, _, flags, *_ = Path(f"/proc/self/fdinfo/{number}").read_text(encoding="ascii").split()
                if int(number) > 2 and not file.is_relative_to("/proc"):
                    is_read = int(flags, 8) & os.O_ACCMODE == os.O_RDONLY and file.is_file()
                    positions[number, str(file)] = position if is_read else None
    return positions


def _monitor_of(task: Task) -> tuple[str, Mode]:
    monitor: Any = task.monitor
    name, mode = monitor if isinstance(monitor, (tuple, list)) and len(monitor) == 2 else (monitor, None)
    if mode not in ("min", "max"):
        raise TaskError(
            f"the task's monitor is {monitor!r}",
            why="it names a metric, and whether its lowest or its highest value is the best",
            fix=f"monitor = ({name!r}, 'min') or ({name!r}, 'max')",
        )
    return name, "min" if mode == "min" else "max"


def _metric_facts(task: Task) -> tuple[dict[str, Mode], str | None]:
    """Return the direction of each metric that states one, by name, and a remark on the metrics.

    Raises:
        TaskError: metrics that cannot be used, or one with the name of the loss.
    """
    try:
        with generators_kept():
            metrics = make_metrics(task)
    except LockstepError:
        raise
    except Exception:  # a rank raises it again, and reports the user's line
        return {}, None
    modes: dict[str, Mode] = {name: "max" if higher else "min" for name, higher in directions_of(metrics).items()}
    return modes, groups_remark(metrics)


def multiply_adds(model: nn.Module, dataset: Any) -> int:
    """Count multiply-adds of a sample's forward pass, rather too many: each parameter used at each position.

    A position is the input of the first layer's kernel: its input features or channels, or one token. A buffer with two
    dimensions counts as a parameter: it is a factor, such as the adjacency of a graph or a bank of filters.
    """
    widths = (getattr(module, name, None) for module in model.modules() for name in ("in_features", "in_channels"))
    width = 1 if any(isinstance(m, nn.Embedding) for m in model.modules()) else next(filter(None, widths), 1)
    with generators_kept():
        positions = _largest(readable_sample(dataset)) / width
    factors = [*model.parameters(), *(b for b in model.buffers() if b.ndim == 2 and b.is_floating_point())]
    return math.ceil(positions) * sum(factor.numel() for factor in factors)


def _largest(sample: Any) -> int:
    """Return numbers in the largest part of a sample; 0: there is none that we know."""
    if isinstance(sample, Tensor | np.ndarray):
        return math.prod(sample.shape)
    if isinstance(sample, Mapping):
        names = [*sample.keys()]  # iterating a TensorDict gives its rows
        return max((_largest(sample[name]) for name in names), default=0)
    if isinstance(sample, (list, tuple)):
        return max(len(sample) if type(sample) is list else 0, *map(_largest, sample), 0)
    return 0


def has_quick_samples(dataset: Any) -> bool:
    """Return whether a sample is there within :data:`QUICK_S`: the median of five all over the data set."""

    def seconds(index: int) -> float:
        started = time.perf_counter()
        with contextlib.suppress(LockstepError):  # examined() has decided about those that cannot be read
            read_sample(dataset, index)
        return time.perf_counter() - started

    with generators_kept():
        return statistics.median(seconds(int(i)) for i in np.linspace(0, len(dataset) - 1, 5)) < QUICK_S
