"""Files behind a data set: found by name, pattern or URL, copied into a bounded cache, indexed, and read by number."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import re
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import DataError

Ints = NDArray[np.int64]
Files = str | Path | Sequence[str | Path]
#: Files that a data set has open at a time.
OPEN_FILES = 64
#: Bytes of copied files that are kept.
CACHE_BYTES = 20 * 2**30
#: Files and folders that are looked at under a folder that is given as data.
MOST_ENTRIES = 1_000_000


def cache_folder() -> Path:
    """Where things are kept that can be made again: ``LOCKSTEP_CACHE``, or ``lockstep`` in the user's cache folder.

    The latter is that of the XDG Base Directory Specification 0.8. It may not exist yet.
    """
    own, given = os.environ.get("LOCKSTEP_CACHE"), Path(os.environ.get("XDG_CACHE_HOME", ""))
    return Path(own) if own else (given if given.is_absolute() else Path.home() / ".cache") / "lockstep"


def place_of(index: int, samples: int) -> int:
    """``index`` counted from 0: as in a sequence, -1 is the last one. Raises :class:`IndexError`."""
    place = index + samples if index < 0 else index
    if not 0 <= place < samples:
        raise IndexError(f"sample {index} of {samples}")
    return place


class FileSamples:
    """Samples that lie in files, by number. A file has one part or several: numbers count through all parts.

    A subclass has ``suffixes`` (of files in a folder; the first names the kind), ``_sizes(number)``: samples of each
    part of a file, ``_open(number)``: a file, ready to be read, and ``_record(part, place)``.
    """

    suffixes: tuple[str, ...] = ("",)
    _sizes: Callable[[int], list[int]]
    _open: Callable[[int], Any]
    _record: Callable[[int, int], Any]

    def __init__(self, files: Files, transform: Callable[[Any], Any] | None) -> None:
        self.files, self.transform = found(files, self.suffixes), transform
        #: Their names, below the folder that was given, if one was.
        self.below = _below(files, self.files)
        deeper = [name for name, below in zip(self.files, self.below, strict=True) if below != name and "/" in below]
        what = f"{len(deeper)} of {len(self.files)} data files lie in folders within the one that was given, as"
        #: For the plan.
        self.remark = f"{what} {deeper[0]}." if deeper else None
        self._paths: dict[int, Path] = {}
        sizes = self._indexed_sizes()
        #: The file of each part.
        self._file_of = np.repeat(np.arange(len(sizes)), [len(parts) for parts in sizes]).tolist()
        of_parts = np.array([size for parts in sizes for size in parts], np.int64)
        self._end_of = np.cumsum(of_parts)
        self._start_of, self._ends = self._end_of - of_parts, self._end_of.tolist()
        if not len(self):
            what = f"the {len(self.files)} files have no sample"
            raise DataError(what, why=self.files[0], fix="check what wrote them")

    def _indexed_sizes(self) -> list[list[int]]:
        from rich.console import Console
        from rich.progress import track

        sizes, quiet = [], len(self.files) < 2 or not sys.stderr.isatty()
        for number, name in enumerate(track(self.files, "indexing", console=Console(stderr=True), disable=quiet)):
            try:
                sizes.append(self._sizes(number))
            except DataError:
                raise
            except Exception as error:  # each library has its own
                what = f"{name} cannot be read as {self.suffixes[0]}"
                raise DataError(what, why=str(error), fix="write it again, or leave it out") from error
        return sizes

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_opened"}

    @cached_property
    def _opened(self) -> Callable[[int], Any]:
        return lru_cache(OPEN_FILES)(self._open)

    def path(self, number: int) -> Path:
        """Of a file; the copy of a URL may have been removed from the cache, and is then made again."""
        if number not in self._paths or not self._paths[number].exists():
            self._paths[number] = local(self.files[number])
        return self._paths[number]

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._ends else 0

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._ends[-1]:
            index = place_of(index, len(self))
        part = bisect_right(self._ends, index)  # on a list: a tenth of the time of NumPy's
        place = index - self._ends[part - 1] if part else index
        try:
            record = self._record(part, place)
        except DataError:
            raise
        except Exception as error:  # of json, csv, or a decoder
            what = f"record {place + 1} of {self.files[self._file_of[part]]} cannot be read"
            why = f"{type(error).__name__}: {error}"
            raise DataError(what, why=why, fix="repair that record or the file") from error
        return record if self.transform is None else self.transform(record)

    def _records(self, parts: list[int], places: list[int]) -> list[Any]:
        return list(map(self._record, parts, places))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        where = np.asarray(indices)
        parts = np.searchsorted(self._end_of, where, "right")
        places = where - self._start_of[parts]
        try:
            records = self._records(parts.tolist(), places.tolist())
        except Exception:  # one by one, they show which of them it is
            return [self[index] for index in indices]
        return records if self.transform is None else list(map(self.transform, records))


def found(files: Files, suffixes: tuple[str, ...]) -> list[str]:
    """The files that are meant, sorted: of a folder those with one of ``suffixes``, of a pattern those that match.

    A URL (``s3://…``) is looked up by fsspec.

    Raises:
        DataError: there is none.
    """
    names: list[str] = []
    for name in chain.from_iterable(map(_expanded, _listed(files))):
        if "://" in name:
            system, path = _fsspec().core.url_to_fs(name)
            path = f"{path.rstrip('/')}/**" if system.isdir(path) else path
            there = sorted(system.glob(path)) if glob.has_magic(path) else [path]
            names += [system.unstrip_protocol(n) for n in there if n.lower().endswith(suffixes) or n == path]
        elif Path(name).is_dir():
            names += inside(name, suffixes)
        elif glob.has_magic(name) and not Path(name).exists():
            names += sorted(glob.glob(name, recursive=True))  # noqa: PTH207, Path.glob takes no absolute pattern
        else:
            names.append(name)
    missing = [name for name in names if "://" not in name and not Path(name).is_file()]
    if missing or not names:
        what = f"{missing[0]} is missing" if missing else f"there is no {' or '.join(suffixes)} file in {files}"
        raise DataError(what, why=f"{len(names)} files were named", fix="check the path, or data.data_dir")
    return names


def _listed(files: Files) -> Sequence[str | Path]:
    return [files] if isinstance(files, str | Path) else files


def _expanded(file: str | Path) -> list[str]:
    """What a shell makes of ``{00..19}``, as WebDataset's users write it."""
    name = str(file)
    numbers = re.search(r"\{(\d+)\.\.(\d+)\}", name)
    if numbers is None or Path(name).exists():
        return [name]
    (first, last), (start, end) = numbers.groups(), numbers.span()
    each = (f"{name[:start]}{number:0{len(first)}}{name[end:]}" for number in range(int(first), int(last) + 1))
    return list(chain.from_iterable(map(_expanded, each)))


def class_folders(root: Path) -> list[Path]:
    """The folders in ``root``, sorted; without hidden ones, and without what a Mac adds to an archive."""
    return sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".") and p.name != "__MACOSX")


def inside(folder: str, suffixes: tuple[str, ...]) -> list[str]:
    """The files in ``folder`` and the folders in it with one of ``suffixes``, in any case; without what is hidden."""
    names, looked_at = list[str](), 0
    for place, folders, files in os.walk(folder.rstrip("/") or "/"):
        folders[:] = [name for name in folders if not name.startswith(".")]
        names += [f"{place}/{n}" for n in files if n.lower().endswith(suffixes) and not n.startswith(".")]
        looked_at += len(folders) + len(files)
        if looked_at > MOST_ENTRIES:
            what, why = f"{folder} has more than {MOST_ENTRIES:,} files", "a folder is searched with all folders in it"
            raise DataError(what, why=why, fix=f"give a pattern, such as {folder}/*{suffixes[0]}")
    return sorted(names)


def _below(given: Files, names: Sequence[str]) -> list[str]:
    folders = [f"{name}".rstrip("/") + "/" for name in _listed(given) if Path(name).is_dir()]
    return [next((name[len(start) :] for start in folders if name.startswith(start)), name) for name in names]


def _fsspec() -> Any:
    try:
        import fsspec
    except ImportError:
        raise DataError("URLs need fsspec", fix="pip install 'lockstep-train[data]'") from None
    return fsspec


def local(name: str) -> Path:
    """A path to ``name``; of a URL, to a copy in the cache, where those that were not used for longest make room.

    The name of a copy has the version of the file, and so its time of change is always the same. When it was used last
    is its time of access.

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
        os.utime(copy, (time.time(), 0))
    except OSError as error:
        what = f"{name} cannot be copied"
        raise DataError(what, why=str(error), fix="check the URL, the network and the disk") from error
    return copy


def _make_room(folder: Path, size: int) -> None:
    kept = [(path, path.stat()) for path in folder.iterdir() if not path.name.startswith(".")]
    total = size + sum(about.st_size for _, about in kept)
    for path, about in sorted(kept, key=lambda each: each[1].st_atime):
        if total > CACHE_BYTES:
            total -= about.st_size
            path.unlink(missing_ok=True)


def indexed(path: Path, kind: str, build: Callable[[Path], Ints]) -> Ints:
    """The index of a file, made once: a read-only memory map, kept beside the file or else in the cache folder.

    Its name has the file's size and time of change, and a number for how indices are made, so that another file gets
    another index.
    """
    about = path.stat()
    key = hashlib.sha256(f"{kind} 2 {path.resolve()} {about.st_size} {about.st_mtime_ns}".encode()).hexdigest()[:16]
    folders = (path.parent / ".lockstep", cache_folder() / "indices")
    for folder in folders:
        with contextlib.suppress(OSError, ValueError):  # there is none, or it is damaged
            return np.asarray(np.load(folder / f"{key}.npy", mmap_mode="r"))
    index = build(path)
    for folder in folders:
        with contextlib.suppress(OSError):  # a read-only disk
            folder.mkdir(parents=True, exist_ok=True)
            part = folder / f".{os.getpid()}-{key}.npy"
            np.save(part, index)
            part.replace(folder / f"{key}.npy")
            break
    return index


class OpenFile:
    """A file to read from any place. Not a memory map: a file that is cut short meanwhile would end the process.

    ``spans``: start and end of each record.
    """

    def __init__(self, path: Path, spans: Ints | None = None) -> None:
        self._number = os.open(path, os.O_RDONLY)
        self._spans: Any = () if spans is None else spans.data  # a fifth of the time of the array itself

    def record(self, place: int) -> bytes:
        start, end = self._spans[2 * place], self._spans[2 * place + 1]
        content = os.pread(self._number, end - start, start)
        return content if len(content) == end - start else self.read(start, end - start)

    def read(self, start: int, size: int) -> bytes:
        """``size`` bytes from ``start`` on; ``EOFError``: the file has become shorter."""
        content = os.pread(self._number, size, start)
        if len(content) < size:
            raise EOFError(f"the file was changed while in use: it has {os.fstat(self._number).st_size} bytes now")
        return content

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "_number"):
            close(self._number)
