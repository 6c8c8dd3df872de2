"""Records in files, read by their place: lines of JSON or CSV, samples of tar shards, tokens, files of folders."""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
import tarfile
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.data.files import Ints, found, indexed, local, shown
from lockstep.errors import DataError

Files = str | Path | Sequence[str | Path]
#: Files that a data set has open at a time.
OPEN_FILES = 64
_BLOCK = 2**24


class _Records:
    """Records at known places of files. An index has the start of each, and the file's end."""

    suffix = ""

    def __init__(self, files: Files, transform: Callable[[Any], Any] | None) -> None:
        self.files, self.transform = found(files, self.suffix), transform
        self._indices = [
            indexed(local(name), type(self).__name__, self._build) for name in shown(self.files, "indexing")
        ]
        self._ends = np.cumsum([self._count(index) for index in self._indices]).tolist()
        self._open: dict[int, int] = {}
        self._process = 0
        if not len(self):
            raise DataError(
                f"the {len(self.files)} files have no record", why=self.files[0], fix="check what wrote them"
            )

    def _count(self, index: Ints) -> int:
        return len(index) - 1

    def _build(self, path: Path) -> Ints:
        raise NotImplementedError

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self._ends, index)  # on a list: a tenth of the time of NumPy's
        place = index - (self._ends[number - 1] if number else 0)
        try:
            record = self._record(number, place)
        except DataError:
            raise
        except Exception as error:  # of json, csv, or a decoder
            what = f"record {place + 1} of {self.files[number]} cannot be read"
            raise DataError(
                what, why=f"{type(error).__name__}: {error}", fix="repair that record or the file"
            ) from error
        return record if self.transform is None else self.transform(record)

    def _record(self, number: int, place: int) -> Any:
        raise NotImplementedError

    def _bytes(self, number: int, start: int, stop: int) -> bytes:
        """Read without a position, so that threads and processes may share the file."""
        if self._process != os.getpid():  # a worker process opens its own
            self._open, self._process = {}, os.getpid()
        if number not in self._open:
            if len(self._open) >= OPEN_FILES:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[number] = os.open(local(self.files[number]), os.O_RDONLY)
        found = os.pread(self._open[number], stop - start, start)
        if len(found) != stop - start:
            raise EOFError(f"the file ends at byte {start + len(found)}")
        return found

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_open": {}, "_process": 0}

    def __del__(self) -> None:
        if getattr(self, "_process", 0) == os.getpid():
            for descriptor in self._open.values():
                os.close(descriptor)


class JsonLines(_Records):
    """One JSON value a line; empty lines are left out.

    Args:
        files: a file, folder, pattern, fsspec URL, or several of them.
        transform: makes a sample of a value.
    """

    suffix = ".jsonl"

    def __init__(self, files: Files, *, transform: Callable[[Any], Any] | None = None) -> None:
        super().__init__(files, transform)

    def _build(self, path: Path) -> Ints:
        return _lines(path, quoted=False)

    def _count(self, index: Ints) -> int:
        return len(index) // 2

    def _record(self, number: int, place: int) -> Any:
        return json.loads(self._bytes(number, *self._indices[number][2 * place : 2 * place + 2].tolist()).decode())


class CsvFiles(JsonLines):
    """Rows of CSV files with a header, as dictionaries of texts; a quoted field may have line breaks.

    Raises:
        DataError: a file whose header differs from that of the first.
    """

    suffix = ".csv"

    def __init__(self, files: Files, *, transform: Callable[[Any], Any] | None = None) -> None:
        super().__init__(files, transform=transform)
        headers = [self._row(number, 0) for number in range(len(self.files))]
        for name, header in zip(self.files, headers, strict=True):
            if header != headers[0]:
                why = f"{self.files[0]} has {', '.join(headers[0])}; {name} has {', '.join(header)}"
                raise DataError(f"the columns of {name} differ", why=why, fix="give files with the same columns")
        self.columns = headers[0]

    def _build(self, path: Path) -> Ints:
        return _lines(path, quoted=True)

    def _count(self, index: Ints) -> int:
        return max(0, len(index) // 2 - 1)

    def _row(self, number: int, line: int) -> list[str]:
        start, stop = self._indices[number][2 * line : 2 * line + 2].tolist()
        rows = list(csv.reader(io.StringIO(self._bytes(number, start, stop).decode(), newline="")))
        if len(rows) > 1:
            raise ValueError("a quote is not closed")
        return rows[0]

    def _record(self, number: int, place: int) -> Any:
        row = self._row(number, place + 1)
        if len(row) != len(self.columns):
            raise ValueError(f"{len(row)} fields, not {len(self.columns)}")
        return dict(zip(self.columns, row, strict=True))


def _lines(path: Path, *, quoted: bool) -> Ints:
    """Start and end of every line that is not empty, as one array; a line break within quotes ends no line."""
    ends: list[Ints] = []
    offset, odd = 0, 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            data = np.frombuffer(block, np.uint8)
            breaks = np.flatnonzero(data == 10)
            if quoted:
                quotes = np.flatnonzero(data == 34)
                breaks = breaks[(np.searchsorted(quotes, breaks) + odd) % 2 == 0]
                odd = (odd + len(quotes)) % 2
            ends.append(breaks + offset)
            offset += len(block)
    found = np.concatenate([*ends, [offset]]) if ends else np.empty(0, np.int64)
    starts = np.concatenate([[0], found[:-1] + 1]) if len(found) else found
    if len(starts):
        content = np.memmap(path, np.uint8, "r")
        if content[:3].tobytes() == codecs.BOM_UTF8:
            starts[0] = 3
        found -= (found > starts) & (content[np.maximum(found - 1, 0)] == 13)  # of a line that ends in CR LF
    keep = found - starts > 0
    return np.stack([starts[keep], found[keep]], axis=1).reshape(-1).astype(np.int64)


class TarShards(_Records):
    """Samples of tar files in WebDataset's layout: neighbouring members whose names differ in their extension only.

    A sample is a dictionary of bytes by extension, and ``__key__``. Texts, numbers (``.cls``) and JSON are decoded.
    """

    suffix = ".tar"

    def __init__(self, files: Files, *, transform: Callable[[Any], Any] | None = None) -> None:
        super().__init__(files, transform)

    def _build(self, path: Path) -> Ints:
        """For each sample, where its first member's header begins, and the end of its last member."""
        starts, ends, before = [], [], None
        try:
            with tarfile.open(path, "r:") as tar:
                for member in tar:
                    if not member.isfile():
                        continue
                    key = _key(member.name)[0]
                    if key != before:
                        starts.append(member.offset)
                        ends.append(0)
                    ends[-1], before = member.offset_data + -(-member.size // 512) * 512, key
        except (tarfile.TarError, EOFError) as error:
            raise DataError(f"{path} is not a whole tar file", why=str(error), fix="replace the shard") from error
        if ends and ends[-1] > path.stat().st_size:
            raise DataError(f"{path} is cut short", why="its last member is not whole", fix="replace the shard")
        return np.stack([starts, ends], axis=1).reshape(-1).astype(np.int64)

    def _count(self, index: Ints) -> int:
        return len(index) // 2

    def _record(self, number: int, place: int) -> Any:
        start, stop = self._indices[number][2 * place : 2 * place + 2].tolist()
        sample: dict[str, Any] = {}
        with tarfile.open(fileobj=io.BytesIO(self._bytes(number, start, stop)), mode="r:", ignore_zeros=True) as tar:
            for member in tar:
                content = tar.extractfile(member)
                if content is not None:
                    sample["__key__"], extension = _key(member.name)
                    sample[extension] = _decoded(extension, content.read())
        return sample


def _key(name: str) -> tuple[str, str]:
    folder, _, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return (f"{folder}/{stem}" if folder else stem), extension.lower()


def _decoded(extension: str, content: bytes) -> Any:
    last = extension.rpartition(".")[2]
    if last in ("txt", "text"):
        return content.decode()
    if last in ("cls", "id", "index"):
        return int(content)
    return json.loads(content) if last in ("json", "jsn") else content


class TokenFile:
    """A flat file of token numbers, memory-mapped: sample ``i`` has the tokens from ``i·window`` on.

    Args:
        dtype: of a token in the file.
        window: tokens of a sample; ``targets`` adds one, so that input and target are ``[:-1]`` and ``[1:]``.

    Raises:
        DataError: a file that is missing, or too small for one sample.
    """

    def __init__(self, file: str | Path, window: int, *, dtype: str = "uint16", targets: bool = True) -> None:
        (name,) = found(file, "")
        self.window, self._size = window, window + targets
        path = local(name)
        self._tokens: NDArray[Any] = np.empty(0)
        if path.stat().st_size:  # an empty file cannot be mapped
            self._tokens = np.memmap(path, dtype=dtype, mode="r")
        if not len(self):
            why = f"it has {len(self._tokens)} tokens, a sample has {self._size}"
            raise DataError(f"{name} is too small", why=why, fix="give a smaller window, or check dtype")

    def __len__(self) -> int:
        return max(0, len(self._tokens) - (self._size - self.window)) // self.window

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        start = index * self.window
        return self._tokens[start : start + self._size].astype(np.int64)


class ClassFolders:
    """Files in one folder a class; sample ``i`` is what ``load`` makes of a path, and the number of its class.

    ``classes`` are the names of the folders, sorted; ``targets`` the number of each file's.
    """

    def __init__(self, folder: str | Path, load: Callable[[Path], Any], *, suffix: str = "") -> None:
        root = Path(folder)
        self.classes = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
        self.load, self.paths, self.targets = load, list[Path](), list[int]()
        for number, name in enumerate(self.classes):
            files = sorted(path for path in (root / name).rglob(f"*{suffix}") if path.is_file())
            self.paths += files
            self.targets += [number] * len(files)
        if not self.paths:
            raise DataError(
                f"{root} has no folders with files", fix="give the folder that has one folder for each class"
            )

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.load(self.paths[index]), self.targets[index]
