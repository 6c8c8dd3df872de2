"""Records in files, read by their place: lines of JSON or CSV, samples of tar shards, tokens, files of folders."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.errors import DataError
from lockstep.readers.files import Files, FileSamples, Ints, OpenFile, class_folders, indexed, inside

_BLOCK = 2**24
#: How gzip, bzip2, xz and zstd files begin.
_COMPRESSED = re.compile(rb"\x1f\x8b|BZh\d1AY|\xfd7zXZ|\x28\xb5\x2f\xfd")


class _Records(FileSamples):
    """Records at known places of files: ``_index(path)`` has the start and the end of each."""

    _index: Callable[[Path], Ints]

    def __init__(self, files: Files, *, transform: Callable[[Any], Any] | None = None) -> None:
        self._indices: list[Ints] = []
        super().__init__(files, transform)

    def _sizes(self, number: int) -> list[int]:
        path = self.path(number)
        if _COMPRESSED.match(OpenFile(path).read(0, min(8, path.stat().st_size))):
            why = "one would have to read all of it for one record"
            raise DataError(f"{path} is compressed", why=why, fix="unpack it, with gunzip, unxz, bunzip2 or unzstd")
        self._indices.append(indexed(path, type(self).__name__, self._index))
        return [len(self._indices[-1]) // 2]

    def _open(self, number: int) -> Any:
        return OpenFile(self.path(number), self._indices[number])

    def _bytes(self, number: int, place: int) -> bytes:
        content: bytes = self._opened(number).record(place)
        return content


class JsonLines(_Records):
    """One JSON value a line; lines without one are left out.

    Args:
        files: a file, folder, pattern, fsspec URL, or several of them.
        transform: makes a sample of a value.
    """

    suffixes = (".jsonl", ".ndjson")

    def _index(self, path: Path) -> Ints:
        return _lines(path, quoted=False)

    def _record(self, part: int, place: int) -> Any:
        return json.loads(self._bytes(part, place))

    def _records(self, parts: list[int], places: list[int]) -> list[Any]:
        # As one text, with a character between records that no JSON value may have.
        opened = self._opened
        found = [opened(part).record(place) for part, place in zip(parts, places, strict=True)]
        text = b"\0".join([*found, b""]).decode()
        values, end = [], -1
        for _ in parts:
            value, end = _decode(text, end + 1)
            if text[end] != "\0":  # space, say
                raise ValueError(f"{text[end]!r} after a value")
            values.append(value)
        return values


_decode = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


class CsvFiles(_Records):
    """Rows of CSV files with a header, as dictionaries of texts; a quoted field may have line breaks.

    Raises:
        DataError: a file whose header differs from that of the first, or has a name twice.
    """

    suffixes = (".csv",)

    def _index(self, path: Path) -> Ints:
        return _lines(path, quoted=True)

    def _sizes(self, number: int) -> list[int]:
        (lines,) = super()._sizes(number)
        header = self._row(number, 0) if lines else []
        if not number:
            self.columns = header
            if len(set(header)) < len(header):
                twice = next(name for name in header if header.count(name) > 1)
                raise DataError(f"{self.files[0]} has two columns {twice!r}", fix="give each its own name in line 1")
        elif header != self.columns:
            why = f"{self.files[0]} has {', '.join(self.columns)}; {self.files[number]} has {', '.join(header)}"
            what = f"the columns of {self.files[number]} differ"
            raise DataError(what, why=why, fix="give files with the same columns")
        return [max(0, lines - 1)]

    def _row(self, number: int, line: int) -> list[str]:
        content = self._bytes(number, line)
        if len(content) > csv.field_size_limit():
            csv.field_size_limit(len(content))  # 128 KiB by default: less than a long text
        rows = list(csv.reader(io.StringIO(content.decode(), newline="")))
        if len(rows) > 1 or content.count(b'"') % 2:
            raise ValueError("a quote is not closed, or lines end in CR alone")
        return rows[0]

    def _record(self, part: int, place: int) -> Any:
        row = self._row(part, place + 1)
        if len(row) != len(self.columns):
            raise ValueError(f"{len(row)} fields, not {len(self.columns)}")
        return dict(zip(self.columns, row, strict=True))


def _lines(path: Path, *, quoted: bool) -> Ints:
    """Start and end of every line that is not empty, as one array.

    ``quoted``: a line break within quotes ends no line, and a line of spaces is one.
    """
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
    if not quoted and keep.any():
        first = content[np.minimum(starts, len(content) - 1)]
        for line in np.flatnonzero(keep & np.isin(first, (9, 13, 32))).tolist():
            keep[line] = bool(content[starts[line] : found[line]].tobytes().strip())
    return np.stack([starts[keep], found[keep]], axis=1).reshape(-1).astype(np.int64)


class TarShards(_Records):
    """Samples of tar files in WebDataset's layout: neighbouring members whose names differ in their extension only.

    A sample is a dictionary of bytes by extension, and ``__key__``. Texts, numbers (``.cls``) and JSON are decoded.
    Members without a stem or an extension belong to no sample.

    Raises:
        DataError: a shard that is damaged or cut short, or in which the members of a sample are not neighbours.
    """

    suffixes = (".tar",)

    def _index(self, path: Path) -> Ints:
        """For each sample, where its first member's header begins, and the end of its last member."""
        starts, ends, before, known = [], [], None, dict[str, set[str]]()
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                key, extension = _key(member.name)
                if not member.isfile() or not extension:
                    continue
                if member.issparse():
                    raise ValueError(f"{member.name} is a sparse file; make it with tar without --sparse")
                if key != before and extension not in known.get(key, ()) and key in known:
                    raise ValueError(f"the members of {key} are not neighbours; make it with tar --sort=name")
                if key == before and extension in known[key]:
                    raise ValueError(f"{member.name} is in it twice")
                if key != before:
                    starts.append(member.offset)
                    ends.append(0)
                    known[key] = set()
                known[key].add(extension)
                ends[-1], before = member.offset_data + -(-member.size // 512) * 512, key
        with path.open("rb") as file:  # tarfile takes anything for the end
            file.seek(tar.offset)
            rest = file.read(_BLOCK)
        if len(rest) < 512 or rest.strip(b"\0"):
            why = "cut short" if len(rest) < 512 else "damaged there, or several archives were joined"
            raise EOFError(f"byte {tar.offset} should be its end or another member: it is {why}")
        return np.stack([starts, ends], axis=1).reshape(-1).astype(np.int64)

    def _record(self, part: int, place: int) -> Any:
        sample: dict[str, Any] = {}
        for name, content in _members(self._bytes(part, place)):
            key, extension = _key(name)
            if extension:
                sample["__key__"], sample[extension] = key, _decoded(extension, content)
        return sample


def _members(data: bytes) -> list[tuple[str, bytes]]:
    """Names and contents of files in a piece of a tar file. Plain headers are read here: a third of tarfile's time."""
    found, at = list[tuple[str, bytes]](), 0
    while at < len(data):
        member = tarfile.TarInfo.frombuf(data[at : at + 512], "utf-8", "surrogateescape")
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):  # a folder, or a header of a long name
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:", ignore_zeros=True) as tar:
                files = ((member.name, tar.extractfile(member)) for member in tar)
                return [(name, file.read()) for name, file in files if file is not None]
        found.append((member.name, data[at + 512 : at + 512 + member.size]))
        at += 512 + -(-member.size // 512) * 512
    return found


def _key(name: str) -> tuple[str, str]:
    folder, _, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return (f"{folder}/{stem}" if folder else stem), extension.lower() if stem else ""


def _decoded(extension: str, content: bytes) -> Any:
    last = extension.rpartition(".")[2]
    if last in ("txt", "text"):
        return content.decode()
    if last in ("cls", "id", "index"):
        return int(content)
    return json.loads(content) if last in ("json", "jsn") else content


class TokenFile(FileSamples):
    """Flat files of token numbers: sample ``i`` of a file has the tokens from ``i·window`` on.

    Args:
        files: a file, folder (of ``.bin`` files), pattern, fsspec URL, or several of them.
        dtype: of a token in the files.
        window: tokens of a sample; ``targets`` adds one, so that input and target are ``[:-1]`` and ``[1:]``.

    Raises:
        DataError: a file that is missing, too small for one sample, or of other tokens.
    """

    suffixes = (".bin",)
    #: For :meth:`gathered`.
    is_plain = True

    def __init__(self, files: Files, window: int, *, dtype: str = "uint16", targets: bool = True) -> None:
        self.window, self._size, self._dtype = window, window + targets, np.dtype(dtype)
        if window < 1 or self._dtype.kind not in "iu":
            fix = "give a window from 1, and a type of integers, such as 'uint16' or 'uint32'"
            raise DataError(f"windows of {window} tokens of dtype {dtype!r}", fix=fix)
        super().__init__(files, None)

    def _sizes(self, number: int) -> list[int]:
        tokens, more = divmod(self.path(number).stat().st_size, self._dtype.itemsize)
        if more or OpenFile(self.path(number)).read(0, min(6, tokens)) == b"\x93NUMPY":
            why = f"it has {tokens} and a part of one" if more else "it is a NumPy file, with a header"
            fix = "give its dtype=; of a NumPy file, write the array with array.tofile()"
            raise DataError(f"{self.files[number]} does not have {self._dtype} tokens", why=why, fix=fix)
        if tokens < self._size:
            why = f"it has {tokens} tokens, a sample has {self._size}"
            raise DataError(f"{self.files[number]} is too small", why=why, fix="give a smaller window, or check dtype")
        return [(tokens - (self._size - self.window)) // self.window]

    def _open(self, number: int) -> Any:
        return OpenFile(self.path(number))

    def _bytes(self, part: int, place: int) -> bytes:
        width = self._dtype.itemsize
        content: bytes = self._opened(part).read(place * self.window * width, self._size * width)
        return content

    def _record(self, part: int, place: int) -> NDArray[np.int64]:
        return np.frombuffer(self._bytes(part, place), self._dtype).astype(np.int64)

    def gathered(self, indices: NDArray[np.int64]) -> Tensor:
        """The batch that ``default_collate`` makes of the samples ``indices``: int64, of shape ``(n, size)``."""
        parts = np.searchsorted(self._end_of, indices, side="right")
        content = b"".join(map(self._bytes, parts.tolist(), (indices - self._start_of[parts]).tolist()))
        tokens = np.frombuffer(content, self._dtype).astype(np.int64)
        return torch.from_numpy(tokens.reshape(len(indices), self._size))


class ClassFolders:
    """Files in one folder a class; sample ``i`` is what ``load`` makes of a path, and the number of its class.

    ``classes`` are the names of the folders, sorted, without hidden ones; ``targets`` the number of each file's.
    """

    def __init__(self, folder: str | Path, load: Callable[[Path], Any], *, suffix: str = "") -> None:
        root = Path(folder)
        self.classes = [path.name for path in class_folders(root)] if root.is_dir() else []
        self.load, self.paths, self.targets = load, list[Path](), list[int]()
        for number, name in enumerate(self.classes):
            files = sorted(map(Path, inside(str(root / name), (suffix,))))
            self.paths += files
            self.targets += [number] * len(files)
        if not self.paths:
            fix = "give the folder that has one folder for each class"
            raise DataError(f"{root} has no folders with files", fix=fix)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.load(self.paths[index]), self.targets[index]
