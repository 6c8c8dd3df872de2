"""Files behind a data set: found by name, pattern or URL, copied into a bounded cache, and indexed once."""

from __future__ import annotations

import glob
import hashlib
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import DataError

Ints = NDArray[np.int64]
#: Bytes of copied files that are kept, and of indices that do not fit beside the data.
CACHE_BYTES = 20 * 2**30


def cache_folder() -> Path:
    """``LOCKSTEP_CACHE``, or ``~/.cache/lockstep``."""
    return Path(os.environ.get("LOCKSTEP_CACHE") or Path.home() / ".cache" / "lockstep")


def found(files: str | Path | Sequence[str | Path], suffix: str) -> list[str]:
    """The files that are meant, sorted: of a folder those with ``suffix``, of a pattern those that match.

    A URL (``s3://…``) is looked up by fsspec.

    Raises:
        DataError: there is none.
    """
    names: list[str] = []
    for file in [files] if isinstance(files, str | Path) else files:
        name = str(file)
        if "://" in name:
            names += _remote(name, suffix)
        elif Path(name).is_dir():
            names += sorted(map(str, Path(name).rglob(f"*{suffix}")))
        elif glob.has_magic(name) and not Path(name).exists():
            names += sorted(glob.glob(name, recursive=True))  # noqa: PTH207, Path.glob takes no absolute pattern
        else:
            names.append(name)
    missing = [name for name in names if "://" not in name and not Path(name).is_file()]
    if missing or not names:
        what = f"{missing[0]} is missing" if missing else f"there is no {suffix} file in {files}"
        raise DataError(what, why=f"{len(names)} files were named", fix="check the path, or data.data_dir")
    return names


def _remote(url: str, suffix: str) -> list[str]:
    system, path = _fsspec().core.url_to_fs(url)
    if system.isdir(path):
        path = f"{path.rstrip('/')}/**"
    names = system.glob(path) if glob.has_magic(path) else [path]
    return [system.unstrip_protocol(name) for name in sorted(names) if name.endswith(suffix) or name == path]


def _fsspec() -> Any:
    try:
        import fsspec
    except ImportError:
        raise DataError("URLs need fsspec", fix="pip install 'lockstep-train[data]'") from None
    return fsspec


def local(name: str) -> Path:
    """A path to ``name``; of a URL, to a copy in the cache, whose oldest files make room.

    Raises:
        DataError: it cannot be copied.
    """
    if "://" not in name:
        return Path(name)
    system, path = _fsspec().core.url_to_fs(name)
    try:
        version = f"{name} {system.ukey(path)}"
        copy = cache_folder() / "files" / f"{hashlib.sha256(version.encode()).hexdigest()[:20]}-{Path(path).name}"
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            _make_room(copy.parent, int(system.size(path) or 0))
            part = copy.with_name(f".{os.getpid()}-{copy.name}")
            system.get_file(path, str(part))
            part.replace(copy)
        else:
            os.utime(copy)
    except OSError as error:
        raise DataError(
            f"{name} cannot be copied", why=str(error), fix="check the URL, the network and the disk"
        ) from error
    return copy


def _make_room(folder: Path, size: int) -> None:
    kept = sorted(
        (path for path in folder.iterdir() if not path.name.startswith(".")), key=lambda path: path.stat().st_mtime
    )
    total = size + sum(path.stat().st_size for path in kept)
    for path in kept:
        if total <= CACHE_BYTES:
            break
        total -= path.stat().st_size
        path.unlink(missing_ok=True)


def indexed(path: Path, kind: str, build: Callable[[Path], Ints]) -> Ints:
    """The index of a file, made once: a read-only memory map, kept beside the file or else in the cache folder.

    Its name has the file's size and time of change, so that another file gets another index.
    """
    about = path.stat()
    key = hashlib.sha256(f"{kind} {path.resolve()} {about.st_size} {about.st_mtime_ns}".encode()).hexdigest()[:16]
    beside, elsewhere = path.parent / ".lockstep", cache_folder() / "indices"
    for folder in (beside, elsewhere):
        if (folder / f"{key}.npy").exists():
            return np.asarray(np.load(folder / f"{key}.npy", mmap_mode="r"))
    index = build(path)
    for folder in (beside, elsewhere):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            part = folder / f".{os.getpid()}-{key}.npy"
            np.save(part, index)
            part.replace(folder / f"{key}.npy")
            break
        except OSError:  # a read-only disk
            continue
    return index


def shown(items: Sequence[Any], what: str) -> Any:
    """``items``, with a line of progress on a terminal where there are many."""
    for number, item in enumerate(items):
        if sys.stderr.isatty() and len(items) > 1:
            print(f"\r{what}: {number + 1} of {len(items)}", end="", file=sys.stderr, flush=True)
        yield item
    if sys.stderr.isatty() and len(items) > 1:
        print(file=sys.stderr)


class Kept:
    """The values of a function for its latest arguments: at most ``most`` of them."""

    def __init__(self, make: Callable[[int], Any], most: int) -> None:
        self._make, self._most, self._values = make, most, OrderedDict[int, Any]()

    def __call__(self, key: int) -> Any:
        if key in self._values:
            self._values.move_to_end(key)
        else:
            while len(self._values) >= self._most:
                self._values.popitem(last=False)
            self._values[key] = self._make(key)
        return self._values[key]

    def __reduce__(self) -> Any:
        return Kept, (self._make, self._most)
