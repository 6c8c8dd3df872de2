"""Records in files: lines of JSON or CSV, samples of tar shards, tokens, files of folders."""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import json
import tarfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic_core import from_json
from torch import Tensor

from lockstep.data.arrays import resolve_index
from lockstep.data.collation import (
    FLOAT,
    Kind,
    MixedKindsError,
    as_kind,
    joined_kind,
    kind_of,
    kind_of_batch,
    refused_in,
)
from lockstep.errors import DataError
from lockstep.readers.files import (
    Files,
    FileSamples,
    cache_folder,
    class_folders,
    file_system,
    find_files,
    inside,
    open_file,
)

#: Bytes of records that are copied at once.
_BLOCK = 2**23
#: Records whose kinds are compared at once, by columns.
_KINDS_AT_ONCE = 1024
#: Between the columns of files that are called CSV, beside the comma.
_DELIMITERS = ";\t|"


class _Records(FileSamples):
    """Records that are copied as they are in the files, and decoded when they are read.

    A subclass has ``type``: of a record, for pyarrow, ``contents(number, file)``: the records of a file with their
    sizes in bytes, and ``decode(content)``: the value of a record.
    """

    #: Whether values may be of several types. The copy then has, as JSON, the common kind of the records so far in each
    #: record that changes it; at the first record without a kind in common with those before, its kind alone.
    has_kinds = True
    _copied_kind: Kind = None
    _is_mixed = False
    contents: Callable[[int, BinaryIO], Iterator[tuple[Any, int]]]
    decode: Callable[[Any], Any]

    def __init__(
        self,
        files: Files,
        *,
        transform: Callable[[Any], Any] | None = None,
        streaming: bool = False,
    ) -> None:
        super().__init__(files, transform, streaming=streaming)

    @staticmethod
    def type() -> Any:
        import pyarrow

        return pyarrow.binary()

    def tables(self, number: int) -> Iterator[Any]:
        with open_file(self.files[number]) as file:
            contents = list[Any]()
            size = 0
            rows = 0
            for content, content_size in self.contents(number, file):
                contents.append(content)
                size += content_size
                if size >= _BLOCK:
                    yield self._table(number, rows, contents)
                    rows += len(contents)
                    contents = []
                    size = 0
            if contents:
                yield self._table(number, rows, contents)

    def _table(self, number: int, rows: int, contents: list[Any]) -> Any:
        import pyarrow

        columns = {
            "content": pyarrow.array(contents, self.type()),
            "file": np.full(len(contents), number),
            "row": np.arange(rows + 1, rows + len(contents) + 1),
        }
        if self.has_kinds and not self.is_stream:
            groups = (contents[start : start + _KINDS_AT_ONCE] for start in range(0, len(contents), _KINDS_AT_ONCE))
            kinds = chain.from_iterable(map(self._changed_kinds, groups))
            columns["kind"] = pyarrow.array([*kinds], pyarrow.string())
        return pyarrow.table(columns)

    def values(self, contents: list[Any]) -> list[Any]:
        """Return the values of records, for their kinds alone. Raises an error where a record is not valid."""
        return [*map(self.decode, contents)]

    def _changed_kinds(self, contents: list[Any]) -> list[str | None]:
        """Return the content of the column of kinds: record by record only where some of them change the kind."""
        if self._is_mixed:
            return [None] * len(contents)
        with contextlib.suppress(Exception):  # found again by record
            kind = kind_of_batch(self.values(contents), converts=True)
            if self._copied_kind is not None:
                kind = joined_kind(self._copied_kind, kind, converts=True)
            if kind == self._copied_kind:
                return [None] * len(contents)
        return [*map(self._changed_kind, contents)]

    def _changed_kind(self, content: Any) -> str | None:
        if self._is_mixed:
            return None
        try:
            kind = kind_of(self.decode(content))
        except Exception:  # raised again by the reader of that record
            return None
        before = self._copied_kind
        try:
            kind = kind if before is None else joined_kind(before, kind, converts=True)
        except MixedKindsError:
            self._is_mixed = True
        self._copied_kind = kind
        return None if kind == before else json.dumps(kind)

    @cached_property
    def _kinds(self) -> list[str]:
        """The kinds that the copy has; the last one is that of all records, if they have one in common."""
        if not self.has_kinds or self.is_stream or self.transform is not None:
            return []
        return cast(list[str], self.rows.data.column("kind").unique().drop_null().to_pylist())

    @cached_property
    def _problem(self) -> tuple[str, str] | None:
        """The first kind that cannot be in a batch with those before it, and the reason; ``None``: there is none."""
        joined: Kind = None
        for text in self._kinds:
            kind = json.loads(text)
            try:
                joined = kind if joined is None else joined_kind(joined, kind, converts=True)
            except MixedKindsError as error:
                return text, str(error)
            if refused := refused_in(kind):
                return text, refused
        return None

    @cached_property
    def _float_kind(self) -> Kind:
        """The kind of all records, if they have one and a field of it floats; else ``None``."""
        is_float = bool(self._kinds) and FLOAT in self._kinds[-1] and self._problem is None
        return json.loads(self._kinds[-1]) if is_float else None

    def check_collatable(self) -> None:
        """Raise :class:`DataError` where records have no common dtype, other keys than others, or a missing value."""
        if self._problem is not None:
            kind, reason = self._problem
            row = self.rows.data.column("kind").index(kind).as_py()
            record = self.rows.data.column("row")[row].as_py()
            raise DataError(
                f"{reason}: record {record} of {self.files[self.rows.data.column('file')[row].as_py()]}",
                why="a batch has one dtype for each field, and no missing value",
                fix="make a sample of each record with transform=…, or write Task.collate (or pass collate=)",
            )

    def records(self, table: Any) -> list[Any]:
        records = []
        for row, content in enumerate(table.column("content").to_pylist()):
            try:
                records.append(self.decode(content))
            except Exception as error:
                file = table.column("file")[row].as_py()
                record = table.column("row")[row].as_py()
                raise DataError(
                    f"record {record} of {self.files[file]} cannot be read",
                    why=f"{type(error).__name__}: {error}",
                    fix="repair that record or the file",
                ) from error
        return records if self._float_kind is None else [as_kind(record, self._float_kind) for record in records]


class JsonLines(_Records):
    """One JSON value a line; lines without one are left out.

    Args:
        files: a file, folder, pattern, fsspec URL, or several of them.
        transform: makes a sample of a value. Without it, whole numbers of a field that has others in any line are
            floats, if all lines have fields of one type.
        streaming: give a stream of the values in their order, without a copy.

    Raises:
        DataError: a file that is one JSON array.
    """

    suffixes = (".jsonl", ".ndjson")

    def contents(self, number: int, file: BinaryIO) -> Iterator[tuple[bytes, int]]:
        lines = 0
        first = b""
        for line in file:
            text = (line.removeprefix(codecs.BOM_UTF8) if not lines else line).strip()
            if not text:
                continue
            lines = lines + 1
            first = first or text
            if lines == 2:
                self._refuse_array(number, first, is_whole=False)
            yield text, len(text)
        self._refuse_array(number, first, is_whole=lines == 1)

    def _refuse_array(self, number: int, first: bytes, *, is_whole: bool) -> None:
        """Refuse a file that begins with a part of an array, or has one line with an array of objects."""
        if not first.startswith(b"["):
            return
        try:
            values = json.loads(first)
        except ValueError:
            is_array = True
        else:
            is_array = is_whole and bool(values) and all(isinstance(value, dict) for value in values)
        if is_array:
            fix = f"write one value on each line, for example with jq -c '.[]' {self.files[number]}"
            raise DataError(f"{self.files[number]} is one JSON array", why="each line is one sample", fix=fix)

    def decode(self, content: bytes) -> Any:
        return json.loads(content)

    def values(self, contents: list[bytes]) -> list[Any]:
        values: list[Any] = from_json(b"[" + b",".join(contents) + b"]")  # five times as fast as one by one
        if len(values) != len(contents):
            raise ValueError("a line is not one value")
        return values


class CsvFiles(_Records):
    """Rows of CSV files with a header, as dictionaries of texts; a quoted field may have line breaks.

    Args:
        files: a file, folder, pattern, fsspec URL, or several of them.
        transform: makes a sample of a row.
        delimiter: the character between two columns.
        streaming: give a stream of the rows in their order, without a copy.

    Raises:
        DataError: a file whose header differs from that of the first, or has a name twice; a quote that is not closed.
    """

    suffixes = (".csv",)
    has_kinds = False  # all are texts

    def __init__(
        self,
        files: Files,
        *,
        transform: Callable[[Any], Any] | None = None,
        delimiter: str = ",",
        streaming: bool = False,
    ) -> None:
        self.delimiter = delimiter
        # Of 128 KiB by default: less than a long text.
        csv.field_size_limit(max(csv.field_size_limit(), 2**31 - 1))
        FileSamples.__init__(self, files, transform, streaming=streaming, key=delimiter)
        with open_file(self.files[0]) as file:
            self.columns = next(self._rows(file), [])

    @staticmethod
    def type() -> Any:
        import pyarrow

        return pyarrow.list_(pyarrow.string())

    def contents(self, number: int, file: BinaryIO) -> Iterator[tuple[list[str], int]]:
        name = self.files[number]
        rows = self._rows(file)
        header = next(rows, [])
        with open_file(self.files[0]) as first:
            expected = next(self._rows(first), [])
        if header != expected:
            raise DataError(
                f"the columns of {name} differ",
                why=f"{self.files[0]} has {', '.join(expected)}; {name} has {', '.join(header)}",
                fix="give files with the same columns",
            )
        if len(set(header)) < len(header):
            twice = next(column for column in header if header.count(column) > 1)
            raise DataError(f"{name} has two columns {twice!r}", fix="give each column another name in line 1")
        other = next((mark for mark in _DELIMITERS if mark in header[0]), None) if len(header) == 1 else None
        if other is not None:
            raise DataError(
                f"{name} has one column, {header[0]!r}",
                why=f"its delimiter seems to be {other!r}, not a comma",
                fix=f"give CsvFiles(…, delimiter={other!r}); decimal commas stay in texts",
            )
        for row in rows:
            yield row, sum(map(len, row))

    def _rows(self, file: BinaryIO) -> Iterator[list[str]]:
        """Yield the rows of a file, the header among them."""
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        end = "\0end of the file"

        def lines() -> Iterator[str]:
            yield from text
            yield end

        try:
            for number, row in enumerate(filter(None, csv.reader(lines(), delimiter=self.delimiter))):
                if row == [end]:
                    return
                if row[-1].endswith(end):
                    raise ValueError(f"record {number}: a quote is not closed until the end of the file")
                yield row
        finally:
            with contextlib.suppress(ValueError):  # the file is closed
                text.detach()

    def decode(self, content: list[str]) -> dict[str, str]:
        if len(content) != len(self.columns):
            raise ValueError(f"{len(content)} fields, not {len(self.columns)}")
        return dict(zip(self.columns, content, strict=True))


class TarShards(_Records):
    """Samples of tar files in WebDataset's layout: neighbouring members whose names differ in their extension only.

    A sample is a dictionary of bytes by extension, and ``__key__``. Texts, numbers (``.cls``) and JSON are decoded.
    Members without a stem or an extension belong to no sample. A link has the content of the member that it names.

    Raises:
        DataError: a shard that is damaged or cut short, or in which the members of a sample are not neighbours.
    """

    suffixes = (".tar",)

    @staticmethod
    def type() -> Any:
        import pyarrow

        return pyarrow.list_(pyarrow.struct({"name": pyarrow.string(), "content": pyarrow.binary()}))

    def contents(self, number: int, file: BinaryIO) -> Iterator[tuple[list[dict[str, Any]], int]]:
        members = list[dict[str, Any]]()
        extensions = dict[str, set[str]]()
        before = None
        size = 0
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                key, extension = _key(member.name)
                if not (member.isreg() or member.islnk() or member.issym()) or not extension:
                    continue
                if key != before and extension not in extensions.get(key, ()) and key in extensions:
                    raise ValueError(f"the members of {key} are not neighbours; make it with tar --sort=name")
                if key == before and extension in extensions[key]:
                    raise ValueError(f"{member.name} is in it twice")
                if key != before:
                    if members:
                        yield members, size
                    # Names may be no UTF-8, which bytes can have and Arrow's texts cannot.
                    members = [{"name": "__key__", "content": key.encode("utf-8", "surrogateescape")}]
                    before = key
                    size = 0
                    extensions[key] = set()
                extensions[key].add(extension)
                content = _content(tar, member)
                members.append({"name": extension, "content": content})
                size += len(content)
            file.seek(tar.offset)  # tarfile takes anything for the end
            rest = file.read(_BLOCK)
        if len(rest) < 512 or rest.strip(b"\0"):
            damage = "cut short" if len(rest) < 512 else "damaged there, or several archives were joined"
            raise EOFError(f"byte {tar.offset} should be its end or another member: it is {damage}")
        if members:
            yield members, size

    def decode(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        key, *members = content
        sample = {"__key__": key["content"].decode("utf-8", "surrogateescape")}
        return {**sample, **{each["name"]: _decoded(each["name"], each["content"]) for each in members}}


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    try:
        file = tar.extractfile(member)
    except KeyError:
        raise ValueError(f"{member.name} is a link to {member.linkname}, which is not in the file") from None
    assert file is not None, "a file or a link"
    return file.read()


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


class TokenFile:
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
        self.window = window
        self._size = window + targets
        self._dtype = np.dtype(dtype)
        if window < 1 or self._dtype.kind not in "iu":
            fix = "give a window from 1, and a type of integers, such as 'uint16' or 'uint32'"
            raise DataError(f"windows of {window} tokens of dtype {dtype!r}", fix=fix)
        self.files = find_files(files, self.suffixes)
        self._paths = [*map(_local, self.files)]
        self._ends = np.cumsum([self._samples_of(number) for number in range(len(self.files))]).tolist()

    @cached_property
    def _maps(self) -> list[NDArray[Any]]:
        return [np.memmap(path, self._dtype, "r") for path in self._paths]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_maps"}  # which would be read whole

    def _samples_of(self, number: int) -> int:
        path = self._paths[number]
        tokens, more = divmod(path.stat().st_size, self._dtype.itemsize)
        with path.open("rb") as file:
            is_numpy = file.read(6) == b"\x93NUMPY"
        if more or is_numpy:
            raise DataError(
                f"{self.files[number]} does not have {self._dtype} tokens",
                why=f"it has {tokens} and a part of one" if more else "it is a NumPy file, with a header",
                fix="give its dtype=; of a NumPy file, write the array with array.tofile()",
            )
        if tokens < self._size:
            raise DataError(
                f"{self.files[number]} is too small",
                why=f"it has {tokens} tokens, a sample has {self._size}",
                fix="give a smaller window, or check dtype",
            )
        return (tokens - (self._size - self.window)) // self.window

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        return self._tokens(resolve_index(index, len(self)))

    def __getitems__(self, indices: Sequence[int]) -> list[NDArray[np.int64]]:
        return [*map(self._tokens, indices)]

    def _tokens(self, index: int) -> NDArray[np.int64]:
        number = bisect_right(self._ends, index)
        sample = index - self._ends[number - 1] if number else index
        start = sample * self.window
        return self._maps[number][start : start + self._size].astype(np.int64)

    def gathered(self, indices: NDArray[np.int64]) -> Tensor:
        """Return the batch that ``default_collate`` makes of the samples ``indices``: int64, of shape ``(n, size)``."""
        return torch.from_numpy(np.stack([*map(self._tokens, indices.tolist())]))


def _local(name: str) -> Path:
    """Return a path to a file; of a URL, to a copy in the cache, which is made again when the file has changed."""
    if "://" not in name:
        return Path(name)
    file_system(name)
    import fsspec

    settings = {"cache_storage": str(cache_folder() / "files"), "check_files": True}
    try:
        return Path(fsspec.open_local(f"filecache::{name}", filecache=settings))
    except OSError as error:
        raise DataError(
            f"{name} cannot be copied", why=str(error), fix="check the URL, the network and the disk"
        ) from error


class ClassFolders:
    """Files in one folder a class; sample ``i`` is what ``load`` makes of a path, and the number of its class.

    ``classes`` are the names of the folders, sorted, without hidden ones; ``targets`` the number of each file's.
    """

    def __init__(self, folder: str | Path, load: Callable[[Path], Any], *, suffix: str = "") -> None:
        root = Path(folder)
        self.classes = [path.name for path in class_folders(root)] if root.is_dir() else []
        self.load = load
        self.paths = list[Path]()
        self.targets = list[int]()
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
