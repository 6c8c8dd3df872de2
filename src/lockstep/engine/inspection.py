"""What the plan must know of a task, found out without a GPU and without a trace in the random state."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lockstep._compat.torch import compiler_not_imported
from lockstep.config import RunConfig
from lockstep.data.reader import Reader
from lockstep.data.sampling import check_lengths, hash_lengths
from lockstep.engine.dataset_checks import check_dataset, examined, read_sample, readable_sample, remarks_of
from lockstep.engine.distributed.sync_batchnorm import has_batchnorm
from lockstep.engine.lightning.module_task import ModuleTask
from lockstep.engine.optim.optimizers import build_optimizer, check_optimizer, scheduler_of
from lockstep.engine.process.runtime import generators_kept
from lockstep.engine.strategies.ddp import joint_bytes
from lockstep.engine.task import Datasets, Task
from lockstep.engine.trained import bare, build_model
from lockstep.engine.training_data import array_bytes, collate_of
from lockstep.errors import LockstepError, TaskError, UnsupportedError
from lockstep.planning.plan import Mode, TaskFacts

#: Handing a batch over from another process costs more than making one of such samples, seconds.
QUICK_S = 1e-4


def inspect_task(task: Task, datasets: Datasets, name: str) -> TaskFacts:
    """Sizes of the data sets and traits of the model.

    Raises:
        UnsupportedError: an iterable data set.
        DataError: a data set without length, an empty one, or lengths that do not fit it.
    """
    if not hasattr(datasets, "train"):
        raise TaskError(
            "the task's datasets() did not return Datasets",
            why=f"it returned {type(datasets).__name__}",
            fix="return lockstep.Datasets(train=…, val=…, test=…)",
        )
    for split in ("train", "val", "test"):
        check_dataset(getattr(datasets, split), split)
    for split, dataset in datasets.named.items():
        check_dataset(dataset, f"val {split}")
    trial, given = trial_of(task), task.lengths()
    model = on_meta(trial)
    lr, scheduled = optimizer_facts(trial, model, task)
    lengths = None if given is None else hash_lengths(check_lengths(given, len(datasets.train)))
    before = _open_files()
    text, unstable = examined(datasets.train, skips=task.data.on_bad_row == "skip")
    with generators_kept():
        for dataset in (d for d in (datasets.val, datasets.test) if d is not None):
            read_sample(dataset, 0)
    after = _open_files()
    with generators_kept():
        whole_batches = Reader(datasets.train, collate_of(task), 0).gives_whole_batches
    is_stream = datasets.weights is not None and datasets.weights.facts.stream
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
        remarks=remarks_of(datasets.train),
        sampling=None if datasets.weights is None else datasets.weights.facts,
        loader=task.loader_facts if isinstance(task, ModuleTask) else None,
        optimizer_lr=lr,
        own_schedule=scheduled,
        monitor=_monitor_of(task),
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
    """The position of files that are open for reading, by descriptor and name; ``None`` of anything else that is open.

    That is a database or a connection, for example. Empty where there is no /proc.
    """
    found: dict[tuple[str, str], str | None] = {}
    with contextlib.suppress(OSError):
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                number, file = link.name, link.readlink()
                _, position, _, flags, *_ = Path(f"/proc/self/fdinfo/{number}").read_text(encoding="ascii").split()
                if int(number) > 2 and not file.is_relative_to("/proc"):
                    is_read = int(flags, 8) & os.O_ACCMODE == os.O_RDONLY and file.is_file()
                    found[number, str(file)] = position if is_read else None
    return found


def blueprint(task: Task) -> nn.Module:
    """The model without its memory where possible: many models can be built on the meta device."""
    return on_meta(trial_of(task))


def trial_of(task: Task) -> Task:
    """A copy of ``task`` that may keep what its ``model()`` makes: the task itself would train a model without memory.

    Containers are copied too, since a layer may be kept in one; what they hold is shared.
    """
    trial = copy.copy(task)
    for name, value in vars(task).items():
        if type(value) in (list, dict, set):
            setattr(trial, name, copy.copy(value))
    return trial


def on_meta(task: Task) -> nn.Module:
    before, model = dict(vars(trial_of(task))), None
    with generators_kept():
        with contextlib.suppress(Exception), torch.device("meta"):  # it may need values; if not, it fails again
            model = build_model(task)
        if model is None:  # only now, when what the first try has opened or locked is closed with its frames
            vars(task).clear()
            vars(task).update(before)
            model = build_model(task)
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise UnsupportedError(
            f"the parameter {lazy[0]} of the model has no shape yet",
            why="a lazy module makes its parameters in its first forward pass, after the optimizer is made",
            fix="call the model once with a small batch in the task's model(), or name the number of input features",
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise TaskError("the model has no trainable parameters", fix="leave requires_grad on for some parameters")
    return model


def check_configured_optimizer(task: Task, config: RunConfig) -> None:
    """Raise what a rank would where the configured optimizer cannot be made for the task's model."""
    settings = config.optimizer
    if settings.name not in ("adamw", "adam", "sgd") or settings.options or settings.layer_decay < 1:
        with compiler_not_imported():
            build_optimizer(settings, blueprint(task), settings.lr, task)


def optimizer_facts(task: Task, model: nn.Module, untried: Task) -> tuple[float | None, bool]:
    """The learning rate of the task's own optimizer, of the first group that has one; whether it has a scheduler.

    ``None``: it makes no optimizer.

    Args:
        model: of ``task``; may be without its memory.
        untried: the task whose ``model()`` has not been called.

    Raises:
        TaskError, UnsupportedError: its optimizer cannot train its model.
    """
    own, scheduled = type(task).optimizer is not Task.optimizer, type(task).scheduler is not Task.scheduler
    if not own and not scheduled:
        return None, False
    with generators_kept(), compiler_not_imported():
        try:
            optimizer = task.optimizer(bare(model))
        except Exception:  # it may need values, or a real device; if not, it fails again
            task = trial_of(untried)
            model = build_model(task)
            optimizer = task.optimizer(bare(model))
        if optimizer is not None:
            check_optimizer(optimizer, model)
        made = optimizer or torch.optim.SGD(model.parameters(), lr=1.0)
        lr = None if optimizer is None else next((float(g["lr"]) for g in made.param_groups if g["lr"]), None)
        return lr, scheduler_of(task, made) is not None


def _monitor_of(task: Task) -> tuple[str, Mode]:
    given: Any = task.monitor
    name, mode = given if isinstance(given, (tuple, list)) and len(given) == 2 else (given, None)
    if mode not in ("min", "max"):
        raise TaskError(
            f"the task's monitor is {given!r}",
            why="it names a metric, and whether its lowest or its highest value is the best",
            fix=f"monitor = ({name!r}, 'min') or ({name!r}, 'max')",
        )
    return name, "min" if mode == "min" else "max"


def multiply_adds(model: nn.Module, dataset: Any) -> int:
    """Of a sample's forward pass, rather too many: as if each parameter were used at each position.

    A position is what the first layer reads at once: its input features or channels, or one token.
    """
    widths = (getattr(module, name, None) for module in model.modules() for name in ("in_features", "in_channels"))
    width = 1 if any(isinstance(m, nn.Embedding) for m in model.modules()) else next(filter(None, widths), 1)
    with generators_kept():
        positions = _largest(readable_sample(dataset)) / width
    return math.ceil(positions) * sum(p.numel() for p in model.parameters())


def _largest(sample: Any) -> int:
    """Numbers in the largest part of a sample; 0: there is none that we know."""
    if isinstance(sample, Tensor):
        return sample.numel()
    if isinstance(sample, np.ndarray):
        return sample.size
    if isinstance(sample, Mapping):
        return max(map(_largest, sample.values()), default=0)
    if isinstance(sample, (list, tuple)):
        return max(len(sample) if type(sample) is list else 0, *map(_largest, sample), 0)
    return 0


def has_quick_samples(dataset: Any) -> bool:
    """Whether a sample is there within :data:`QUICK_S`: the median of five all over the data set."""

    def seconds(index: int) -> float:
        started = time.perf_counter()
        with contextlib.suppress(LockstepError):  # examined() has decided about those that cannot be read
            read_sample(dataset, index)
        return time.perf_counter() - started

    with generators_kept():
        return statistics.median(seconds(int(i)) for i in np.linspace(0, len(dataset) - 1, 5)) < QUICK_S
