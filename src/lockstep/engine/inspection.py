"""What the plan must know of a task, found out without a GPU and without a trace in the random state."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
import os
import random
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import IterableDataset

from lockstep.data.bucketed import check_lengths, hash_lengths
from lockstep.data.reader import Reader, sample_error
from lockstep.data.rows import leaf_of
from lockstep.engine.distributed.sync_batchnorm import has_batchnorm
from lockstep.engine.lightning.module_task import ModuleTask
from lockstep.engine.optim.fused_adam import compiler_not_imported
from lockstep.engine.optim.groups import check_optimizer
from lockstep.engine.optim.step import scheduler_of
from lockstep.engine.process.determinism import generators_kept
from lockstep.engine.task import Datasets, Task
from lockstep.engine.trained import bare, build_model
from lockstep.engine.training_data import collate_of
from lockstep.errors import DataError, LockstepError, TaskError, UnsupportedError
from lockstep.plan import TaskFacts
from lockstep.plan.plan import Mode

PROBES = 16
#: Handing a batch over from another process costs more than making one of such samples, seconds.
QUICK_S = 1e-4
#: Seconds for reading samples a second time.
AGAIN_S = 1.0
#: As what the bits of values are read whose type NumPy lacks, by size in bytes.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


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
    trial, given = trial_of(task), task.lengths()
    model = on_meta(trial)
    lr, scheduled = optimizer_facts(trial, model)
    lengths = None if given is None else hash_lengths(check_lengths(given, len(datasets.train)))
    before = _open_files()
    text, unstable = examined(datasets.train)
    with generators_kept():
        for dataset in filter(None, (datasets.val, datasets.test)):
            _read(dataset, 0)
    after = _open_files()
    opens_files = bool(after.keys() - before.keys())
    return TaskFacts(
        name=name,
        train_samples=len(datasets.train),
        val_samples=0 if datasets.val is None else len(datasets.val),
        test_samples=0 if datasets.test is None else len(datasets.test),
        parameters=sum(p.numel() for p in model.parameters()),
        frozen=sum(p.numel() for p in model.parameters() if not p.requires_grad),
        has_batchnorm=has_batchnorm(model),
        whole_batches=_gives_whole_batches(task, datasets.train),
        quick_samples=opens_files and has_quick_samples(datasets.train),
        lengths=lengths,
        loader=task.loader_facts if isinstance(task, ModuleTask) else None,
        optimizer_lr=lr,
        own_schedule=scheduled,
        monitor=_monitor_of(task),
        fingerprint=text + (f":{lengths}" if lengths else ""),
        unstable=unstable,
        read_file=next((key[1] for key, position in before.items() if after.get(key, position) != position), None),
        opens_files=opens_files,
        multiply_adds=multiply_adds(model, datasets.train),
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


def check_dataset(dataset: Any, split: str) -> None:
    if dataset is None and split != "train":
        return
    if isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")):
        raise UnsupportedError(
            f"the {split} data set is iterable",
            why="its samples have no index, so no rank can know which ones are its own, and a resume would repeat some",
            fix="give it __len__ and __getitem__ (a map-style data set), for example over an index of its records",
        )
    if not hasattr(dataset, "__len__") or not (hasattr(dataset, "__getitem__") or hasattr(dataset, "sample")):
        raise DataError(
            f"the {split} data set has no length or no items",
            why=f"{type(dataset).__name__} needs __len__ and __getitem__ (or sample)",
            fix="return map-style data sets from Task.datasets()",
        )
    if len(dataset) == 0:
        raise DataError(
            f"the {split} data set is empty", fix="check data.data_dir, or return None for a split that you lack"
        )


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
    with generators_kept():
        try:
            with torch.device("meta"):
                model = build_model(task)
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
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


def refuse_meta(model: nn.Module) -> None:
    """Raise :class:`TaskError` where a parameter has no memory, since nothing would be trained."""
    name = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if name is not None:
        raise TaskError(
            f"the parameter {name} of the task's model is on the meta device",
            why="model() returned what an earlier call had made to count parameters, or made it there",
            fix="make a new module in each call of model(), or keep it in an attribute of the task",
        )


def optimizer_facts(task: Task, model: nn.Module) -> tuple[float | None, bool]:
    """The learning rate of the task's own optimizer, of the first group that has one; whether it has a scheduler.

    ``None``: it makes no optimizer.

    Args:
        model: may be without its memory.

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
            model = build_model(task)
            optimizer = task.optimizer(bare(model))
        if optimizer is not None:
            check_optimizer(optimizer, model)
        made = optimizer or torch.optim.SGD(model.parameters(), lr=1.0)
        lr = None if optimizer is None else next((float(g["lr"]) for g in made.param_groups if g["lr"]), None)
        return lr, scheduler_of(task, made) is not None


def _monitor_of(task: Task) -> tuple[str, Mode]:
    name, mode = task.monitor
    if mode not in ("min", "max"):
        raise TaskError(
            f"the task's monitor has the mode {mode!r}",
            why="the best value of a metric is its lowest or its highest one",
            fix=f"monitor = ({name!r}, 'min') or ({name!r}, 'max')",
        )
    return name, "min" if mode == "min" else "max"


def _gives_whole_batches(task: Task, dataset: Any) -> bool:
    with generators_kept():
        return Reader(dataset, collate_of(task), 0).gives_whole_batches


def multiply_adds(model: nn.Module, dataset: Any) -> int:
    """Of a sample's forward pass, rather too many: as if each parameter were used at each position.

    A position is what the first layer reads at once: its input features or channels, or one token.
    """
    widths = (getattr(module, name, None) for module in model.modules() for name in ("in_features", "in_channels"))
    width = 1 if any(isinstance(m, nn.Embedding) for m in model.modules()) else next(filter(None, widths), 1)
    with generators_kept():
        positions = _largest(_read(dataset, 0)) / width
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
        _read(dataset, index)
        return time.perf_counter() - started

    with generators_kept():
        return statistics.median(seconds(int(i)) for i in np.linspace(0, len(dataset) - 1, 5)) < QUICK_S


def fingerprint(dataset: Any) -> str:
    return examined(dataset)[0]


def examined(dataset: Any) -> tuple[str, tuple[str, ...]]:
    """Length and a hash of up to 16 samples spread over the data set: shows a resume that the data changed.

    A data set with a ``fingerprint()`` of its own is asked instead. All is read twice, the second time backwards and
    for a second at most. What differs is left out of the hash, which then begins with ``~``, and is named.
    """
    samples = len(dataset)
    if hasattr(dataset, "fingerprint"):
        given = str(dataset.fingerprint())
        stable = given == str(dataset.fingerprint())
        return (f"{samples}:{given}", ()) if stable else (f"{samples}:~", ("the data set's fingerprint()",))
    digest = hashlib.sha256()
    fields: dict[int, dict[str, bytes]] = {}
    unstable: set[str] = set()
    with generators_kept():
        for index in sorted({int(i) for i in np.linspace(0, samples - 1, PROBES)}):
            sample = _probe(dataset, index)
            feed(digest, sample)
            fields[index] = _fields(sample)
        until = time.monotonic() + AGAIN_S
        for number, index in enumerate(reversed(fields)):
            if number > 1 and time.monotonic() > until:
                break
            again = _fields(_probe(dataset, index))
            unstable |= {name for name, _ in fields[index].items() ^ again.items()}
    if not unstable:
        return f"{samples}:{digest.hexdigest()[:16]}", ()
    kept = [(name, value) for of_sample in fields.values() for name, value in of_sample.items() if name not in unstable]
    rest = hashlib.sha256(repr(kept).encode()).hexdigest()[:16] if kept else ""
    return f"{samples}:~{rest}", tuple(sorted(unstable))


def same_data(saved: str, here: str) -> bool:
    """Whether two fingerprints may be of the same data; of one that leaves something out, the length must do."""
    if ("~" in saved) != ("~" in here):
        return saved.partition(":")[0] == here.partition(":")[0]
    return saved == here


def _fields(sample: Any) -> dict[str, bytes]:
    """A hash of each part of a sample, by its name."""
    if isinstance(sample, dict):
        return {f"the field {name!r}": _digest(value) for name, value in sample.items()}
    if isinstance(sample, (list, tuple)):
        return {f"item {place}": _digest(value) for place, value in enumerate(sample)}
    return {"the content": _digest(sample)}


def _probe(dataset: Any, index: int) -> Any:
    """Sample ``index`` with every generator seeded, so that augmentation looks the same each time."""
    random.seed(index)
    np.random.seed(index)
    torch.default_generator.manual_seed(index)
    return _read(dataset, index)


def _read(dataset: Any, index: int) -> Any:
    try:
        leaf, at = leaf_of(dataset, index)
        if hasattr(leaf, "sample"):
            return leaf.sample(at, np.random.Generator(np.random.Philox(index)))
        return dataset[index]
    except LockstepError:
        raise
    except Exception as error:
        raise sample_error(dataset, index, error) from error


def as_array(tensor: Tensor) -> NDArray[Any]:
    """The values on the host; of a type that NumPy lacks (bfloat16), their bits."""
    tensor = tensor.detach().cpu()
    try:
        return tensor.numpy()
    except TypeError:
        if tensor.layout != torch.strided:
            raise
        return tensor.view(_BITS[tensor.itemsize]).numpy()


def feed(digest: Any, value: Any, around: tuple[int, ...] = ()) -> None:
    """Add a sample, however nested, to a hash, which is the same in every process.

    ``around``: the identities of the objects that ``value`` is a part of.
    """
    if isinstance(value, Tensor):
        value = as_array(value if value.layout == torch.strided else value.to_dense())
    if isinstance(value, np.ndarray):
        digest.update(str((value.dtype, value.shape)).encode())
        if value.dtype.hasobject:  # its bytes are addresses
            feed(digest, value.tolist(), around)
        else:
            digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, dict):
        for key in value:
            digest.update(str(key).encode())
            feed(digest, value[key], around)
    elif isinstance(value, (list, tuple)):
        for item in value:
            feed(digest, item, around)
    elif isinstance(value, (set, frozenset)):
        digest.update(b"".join(sorted(map(_digest, value))))
    elif isinstance(value, (int, float, str, bytes, bool, type(None), np.generic)):
        digest.update(repr(value).encode())
    elif hasattr(value, "__qualname__"):  # a class or a function
        digest.update(f"{value.__module__}.{value.__qualname__}".encode())
    else:
        digest.update(repr(type(value)).encode())
        if id(value) not in around:
            feed(digest, _contents(value), (*around, id(value)))


def _contents(value: Any) -> Any:
    """What an object is pickled from. The bytes of a pickle depend on which equal parts are one object."""
    try:
        contents = value.__reduce_ex__(2)
    except Exception:  # whatever an object of the user's raises: then its type has to do
        return ()
    if not isinstance(contents, tuple):
        return contents
    return [list(part) if isinstance(part, Iterator) else part for part in contents]


def _digest(value: Any) -> bytes:
    own = hashlib.sha256()
    feed(own, value)
    return own.digest()
