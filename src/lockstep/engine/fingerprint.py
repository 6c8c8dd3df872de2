"""Fingerprints of data sets from samples that are read, and whether ranks and attempts have the same data."""

from __future__ import annotations

import contextlib
import hashlib
import math
import random
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.data.arrays import draws_keyed, leaf_of
from lockstep.data.reader import TRIED, sample_error
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.generators import generators_kept
from lockstep.engine.task import Datasets
from lockstep.errors import DataError, LockstepError

#: Samples that a fingerprint reads, and the time limit for reading them a second time, in seconds.
PROBES = 16
AGAIN_S = 1.0
#: Types of the same size, for values whose type NumPy lacks, by size in bytes.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def examined(dataset: Any, *, skips: bool = False) -> tuple[str, tuple[str, ...]]:
    """Hash up to 16 samples spread over the data set, and its length: shows a resume that the data changed.

    A ``fingerprint()`` method of the data set replaces this. All is read twice, the second time backwards and for a
    second at most. Parts that differ are left out of the hash, which then begins with ``~``, and are named. ``skips``:
    a sample that cannot be read is not an error.
    """
    samples = len(dataset)
    if hasattr(dataset, "fingerprint"):
        fingerprint = str(dataset.fingerprint())
        is_stable = fingerprint == str(dataset.fingerprint())
        return (f"{samples}:{fingerprint}", ()) if is_stable else (f"{samples}:~", ("the data set's fingerprint()",))
    digest = hashlib.sha256()
    fields, unstable = _read_probes(dataset, digest, skips=skips)
    if not unstable:
        return f"{samples}:{digest.hexdigest()[:16]}", ()
    hashes = chain.from_iterable(of_sample.items() for of_sample in fields.values())
    stable = [(name, value) for name, value in hashes if name not in unstable]
    rest = hashlib.sha256(repr(stable).encode()).hexdigest()[:16] if stable else ""
    return f"{samples}:~{rest}", tuple(sorted(unstable))


def _read_probes(
    dataset: Any, digest: Any, *, skips: bool, limit_s: float = math.inf
) -> tuple[dict[int, dict[str, bytes]], set[str]]:
    """Return hashes of the parts of up to 16 samples, by index, and the parts that differ when they are read again.

    ``digest`` takes in the samples; none is begun after ``limit_s`` seconds.
    """
    fields = dict[int, dict[str, bytes]]()
    unstable = set[str]()
    last = len(dataset) - 1
    until = time.monotonic() + limit_s
    with generators_kept():
        for index in sorted({int(i) for i in np.linspace(0, last, PROBES)}) if last >= 0 else ():
            if fields and time.monotonic() > until:
                break
            sample = _probe(dataset, index, skips)
            feed(digest, sample)
            fields[index] = _fields(sample)
        until = time.monotonic() + AGAIN_S
        for number, index in enumerate(reversed(fields)):
            if number > 1 and time.monotonic() > until:
                break
            again = _fields(_probe(dataset, index, skips))
            unstable |= {name for name, _ in fields[index].items() ^ again.items()}
    return fields, unstable


class _Split(NamedTuple):
    """What ranks compare of a split; ``fields``: hashes of the parts of some samples, by index."""

    samples: int
    fingerprint: str
    fields: dict[int, dict[str, bytes]]
    unstable: set[str]

    def is_like(self, other: _Split) -> bool:
        """Return whether both may be of the same data: the samples that both ranks read, without what varies."""
        ignored = self.unstable | other.unstable
        common = self.fields.keys() & other.fields.keys()
        differing = {name for index in common for name, _ in self.fields[index].items() ^ other.fields[index].items()}
        return self[:2] == other[:2] and differing <= ignored


def check_same_data(datasets: Datasets, collectives: Collectives) -> None:
    """Raise :class:`DataError` where a rank has opened other data than rank 0. Collective."""
    named = {f"val {name}": part for name, part in datasets.named.items()} or {"val": datasets.val}
    splits = {"train": datasets.train, **named, "test": datasets.test}
    local_splits = {name: _split_of(dataset) for name, dataset in splits.items() if dataset is not None}
    first, *other_ranks = collectives.all_gather(local_splits)
    for rank, other in enumerate(other_ranks, 1):
        for name in {**first, **other}:
            expected = first.get(name)
            actual = other.get(name)
            if expected is None or actual is None or not expected.is_like(actual):
                counts = [0 if split is None else split.samples for split in (expected, actual)]
                others_text = f"{counts[1]} samples, rank 0 has {counts[0]}"
                if counts[0] == counts[1]:
                    others_text = f"the samples of rank 0 in another order, or others, {counts[0]} as well"
                raise DataError(
                    f"rank {rank} has other {name} data than rank 0",
                    why=f"it has {others_text}; each rank takes its part of the same data",
                    fix="make the same samples in the same order on every rank: sort the names of files, iterate over "
                    "no set, and check that every machine has all files",
                )


def _split_of(dataset: Any) -> _Split:
    if hasattr(dataset, "fingerprint"):
        fingerprint = str(dataset.fingerprint())
        return _Split(len(dataset), fingerprint if fingerprint == str(dataset.fingerprint()) else "", {}, set())
    return _Split(len(dataset), "", *_read_probes(dataset, hashlib.sha256(), skips=True, limit_s=AGAIN_S))


def same_data(saved: str, present: str) -> bool:
    """Return whether two fingerprints may be of the same data; of one that leaves something out, the length must do."""
    if ("~" in saved) != ("~" in present):
        return saved.partition(":")[0] == present.partition(":")[0]
    return saved == present


def _fields(sample: Any) -> dict[str, bytes]:
    """Return a hash of each part of a sample, by its name."""
    if isinstance(sample, dict):
        return {f"the field {name!r}": _digest(value) for name, value in sample.items()}
    if isinstance(sample, (list, tuple)):
        return {f"item {number}": _digest(value) for number, value in enumerate(sample)}
    return {"the content": _digest(sample)}


def _probe(dataset: Any, index: int, skips: bool) -> Any:
    """Read sample ``index`` with every generator seeded, so that augmentation looks the same each time."""
    random.seed(index)
    np.random.seed(index % 2**32)
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
    """Return the first sample that can be read (``data.on_bad_row=skip``)."""
    for index in range(min(TRIED, len(dataset))):
        with contextlib.suppress(LockstepError):
            return read_sample(dataset, index)
    return read_sample(dataset, 0)


def as_array(tensor: Tensor) -> NDArray[Any]:
    """Return the values on the host; of a type that NumPy lacks (bfloat16), their bits."""
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
    """Return the pickled parts of an object. The bytes of a pickle depend on which equal parts are one object."""
    try:
        contents = value.__reduce_ex__(2)
    except Exception:  # whatever an object of the user's raises: then its type has to do
        return ()
    if not isinstance(contents, tuple):
        return contents
    return [list(part) if isinstance(part, Iterator) else part for part in contents]


def _digest(value: Any) -> bytes:
    digest = hashlib.sha256()
    feed(digest, value)
    return digest.digest()
