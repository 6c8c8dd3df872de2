"""Checks of a data set: that Lockstep can index it, and a fingerprint by which a resume recognises its data."""

from __future__ import annotations

import contextlib
import hashlib
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset

from lockstep.data.arrays import draws_keyed, leaf_of, leaves
from lockstep.data.reader import TRIED, sample_error
from lockstep.engine.process.runtime import generators_kept
from lockstep.errors import DataError, LockstepError, UnsupportedError

#: Samples that a fingerprint reads.
PROBES = 16
#: Time limit for reading them a second time, in seconds.
AGAIN_S = 1.0
#: Types of the same size, for values whose type NumPy lacks, by size in bytes.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def check_dataset(dataset: Any, split: str) -> None:
    if dataset is None and split != "train":
        return
    if isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")):
        raise UnsupportedError(
            f"the {split} data set is iterable",
            why="its samples have no index, so no rank can know which are its own; only training data may be a stream",
            fix="give it __len__ and __getitem__ (a map-style data set), for example list(dataset)",
        )
    if not hasattr(dataset, "__len__") or not (hasattr(dataset, "__getitem__") or draws_keyed(dataset)):
        raise DataError(
            f"the {split} data set has no length or no items",
            why=f"{type(dataset).__name__} needs __len__ and __getitem__ (or sample)",
            fix="return map-style data sets from Task.datasets()",
        )
    if len(dataset) == 0:
        raise DataError(
            f"the {split} data set is empty", fix="check data.data_dir, or return None for a split that you lack"
        )


def remarks_of(dataset: Any) -> tuple[str, ...]:
    """What the plan should say of the data sets behind ``dataset``: their ``remark``."""
    found = (getattr(leaf, "remark", None) for leaf in leaves(dataset))
    return tuple(remark for remark in found if isinstance(remark, str))


def examined(dataset: Any, *, skips: bool = False) -> tuple[str, tuple[str, ...]]:
    """Length and a hash of up to 16 samples spread over the data set: shows a resume that the data changed.

    The data set's own ``fingerprint()`` is used where it has one. All is read twice, the second time backwards and
    for a second at most. What differs is left out of the hash, which then begins with ``~``, and is named. ``skips``:
    a sample that cannot be read is not an error.
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
            sample = _probe(dataset, index, skips)
            feed(digest, sample)
            fields[index] = _fields(sample)
        until = time.monotonic() + AGAIN_S
        for number, index in enumerate(reversed(fields)):
            if number > 1 and time.monotonic() > until:
                break
            again = _fields(_probe(dataset, index, skips))
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


def _probe(dataset: Any, index: int, skips: bool) -> Any:
    """Sample ``index`` with every generator seeded, so that augmentation looks the same each time."""
    random.seed(index)
    np.random.seed(index)
    torch.default_generator.manual_seed(index)
    try:
        return read_sample(dataset, index)
    except LockstepError:
        if not skips:
            raise
        return "unreadable"


def read_sample(dataset: Any, index: int) -> Any:
    try:
        leaf, at = leaf_of(dataset, index)
        if draws_keyed(leaf):
            return leaf.sample(at, np.random.Generator(np.random.Philox(index)))
        return dataset[index]
    except LockstepError:
        raise
    except Exception as error:
        raise sample_error(dataset, index, error) from error


def readable_sample(dataset: Any) -> Any:
    """The first sample that can be read (``data.on_bad_row=skip``)."""
    for index in range(min(TRIED, len(dataset))):
        with contextlib.suppress(LockstepError):
            return read_sample(dataset, index)
    return read_sample(dataset, 0)


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
