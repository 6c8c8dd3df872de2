"""Files behind a data set: found by name, pattern or URL, and read through a copy that `datasets` keeps."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from lockstep.data.arrays import resolve_index
from lockstep.errors import DataError

Files = str | Path | Sequence[str | Path]
#: Files and folders that are looked at under a folder that is given as data.
MOST_ENTRIES = 1_000_000


def cache_folder() -> Path:
    """Return the folder of files that can be made again: ``LOCKSTEP_CACHE``, or ``lockstep`` in the user's cache.

    The user's cache folder is that of the XDG Base Directory Specification 0.8. It may not exist yet.
    """
    if folder := os.environ.get("LOCKSTEP_CACHE"):
        return Path(folder)
    user_cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (user_cache if user_cache.is_absolute() else Path.home() / ".cache") / "lockstep"


class FileSamples:
    """Samples of the rows of files, by number: numbers count through all files.

    A subclass has ``tables(number)``: the rows of a file as Arrow tables, and ``records(table)``: the values of rows.
    """

    #: Of the files in a folder; the first names the kind.
    suffixes: tuple[str, ...] = ("",)
    tables: Callable[[int], Iterator[Any]]
    records: Callable[[Any], list[Any]]

    def __new__(cls, *arguments: Any, streaming: bool = False, **settings: Any) -> Any:
        samples = super().__new__(cls)
        if not streaming:
            return samples
        samples.__init__(*arguments, streaming=True, **settings)  # type: ignore[misc]
        return FileStream(samples)

    def __init__(self, files: Files, transform: Callable[[Any], Any] | None, *, streaming: bool, key: str = "") -> None:
        self.files = find_files(files, self.suffixes)
        self.transform = transform
        self.is_stream = streaming
        digest = hashlib.sha256(f"{type(self).__name__} 2 {key}".encode())
        for name in self.files:
            digest.update(f"{name} {_version(name)}".encode())
        #: Of the copy: it follows from the files' names, sizes and times.
        self.folder = cache_folder() / "datasets" / digest.hexdigest()[:20]
        self.rows: Any = None if streaming else _copies().copied(self, self.folder)
        #: A note for the plan.
        self.remark = f"The rows of {len(self.files)} data files are read from a copy, {self.folder}."

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.samples(self.rows[resolve_index(index, len(self))])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return self.samples(self.rows[[*map(int, indices)]])

    def samples(self, table: Any) -> list[Any]:
        """Return the sample of each row of ``table``."""
        records = self.records(table)
        return records if self.transform is None else [*map(self.transform, records)]


class FileStream:
    """The samples of files in their order, read while they are iterated over; nothing is copied."""

    def __init__(self, source: FileSamples) -> None:
        self.source = source
        self._rows = _copies().streamed(source, source.folder)

    def __iter__(self) -> Iterator[Any]:
        # Not a generator: it could give no sample after one that cannot be read.
        return map(self._sample, self._rows)

    def _sample(self, table: Any) -> Any:
        return self.source.samples(table)[0]

    def state_dict(self) -> dict[str, Any]:
        return cast(dict[str, Any], self._rows.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows.load_state_dict(state)


def _copies() -> Any:
    try:
        from lockstep.readers import copies
    except ImportError as error:
        fix = "pip install 'lockstep-train[data]'"
        raise DataError("data files need the package datasets", why=str(error), fix=fix) from None
    return copies


def find_files(files: Files, suffixes: tuple[str, ...]) -> list[str]:
    """Return the files that are meant, sorted: of a folder those with one of ``suffixes``, of a pattern its matches.

    A URL (``s3://…``) is looked up by fsspec.

    Raises:
        DataError: there is none.
    """
    names: list[str] = []
    for name in map(str, _listed(files)):
        if "://" in name:
            system, path = file_system(name)
            path = f"{path.rstrip('/')}/**" if system.isdir(path) else path
            paths = sorted(system.glob(path)) if glob.has_magic(path) else [path]
            names += [system.unstrip_protocol(n) for n in paths if n.lower().endswith(suffixes) or n == path]
        elif Path(name).is_dir():
            names += inside(name, suffixes)
        elif glob.has_magic(name) and not Path(name).exists():
            names += sorted(glob.glob(name, recursive=True))  # noqa: PTH207, Path.glob takes no absolute pattern
        else:
            names.append(name)
    missing = [name for name in names if "://" not in name and not Path(name).is_file()]
    if missing or not names:
        raise DataError(
            f"{missing[0]} is missing" if missing else f"there is no {' or '.join(suffixes)} file in {files}",
            why=f"{len(names)} files were named",
            fix="check the path, or data.data_dir",
        )
    return names


def _listed(files: Files) -> Sequence[str | Path]:
    return [files] if isinstance(files, str | Path) else files


def class_folders(root: Path) -> list[Path]:
    """Return the folders in ``root``, sorted; without hidden ones and those that a Mac adds to an archive."""
    return sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".") and p.name != "__MACOSX")


def inside(folder: str, suffixes: tuple[str, ...]) -> list[str]:
    """Return the files in ``folder`` and the folders in it with one of ``suffixes``, in any case; without hidden ones.

    Raises:
        DataError: there are too many files, as where a linked folder leads back to one that it is in.
    """
    names = list[str]()
    looked_at = 0
    for folder_path, folders, files in os.walk(folder.rstrip("/") or "/", followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        names += [f"{folder_path}/{n}" for n in files if n.lower().endswith(suffixes) and not n.startswith(".")]
        looked_at += len(folders) + len(files)
        if looked_at > MOST_ENTRIES:
            raise DataError(
                f"{folder} has more than {MOST_ENTRIES:,} files",
                why="a folder is searched with all folders in it, linked ones included",
                fix=f"give a pattern, such as {folder}/*{suffixes[0]}",
            )
    return sorted(names)


def file_system(name: str) -> tuple[Any, str]:
    """Return fsspec's file system of a path or URL, and the path in it."""
    try:
        import fsspec
    except ImportError:
        raise DataError("URLs need fsspec", fix="pip install 'lockstep-train[data]'") from None
    return cast(tuple[Any, str], fsspec.core.url_to_fs(name))


def open_file(name: str) -> BinaryIO:
    """Open a path or URL for reading."""
    if "://" not in name:
        return Path(name).open("rb")
    system, path = file_system(name)
    return cast(BinaryIO, system.open(path, "rb"))


def _version(name: str) -> str:
    """Return a value that differs for another content of a file. No program can set the time of a status change."""
    try:
        if "://" not in name:
            status = Path(name).stat()
            return f"{Path(name).resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"
        system, path = file_system(name)
        return str(system.ukey(path))
    except OSError as error:
        raise DataError(f"{name} cannot be read", why=str(error), fix="check the URL, and the network") from error
