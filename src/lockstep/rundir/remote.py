"""Files at a URL of fsspec: reading, writing and listing them, and errors for users."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError, LockstepError, RunFolderError
from lockstep.rundir.files import TEMPORARY, make_folders, temporary_name
from lockstep.rundir.folder import RunRecord, parse_record

MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"
POINTERS = ("best", "last")
#: The name of a checkpoint's folder.
CHECKPOINT = re.compile(r"step-\d{8,15}")
#: Never copied: the lock of the local folder.
_LOCAL = {".claim"}


def is_url(text: str) -> bool:
    return "://" in text


class Remote:
    """The files below a URL. Not to be used after a fork: make a new one, which connects again.

    Raises :class:`ConfigError` for an unknown protocol or a missing package; methods raise fsspec's errors.
    """

    def __init__(self, url: str) -> None:
        import fsspec
        from fsspec.implementations.local import LocalFileSystem

        self.url = url.rstrip("/")
        try:
            self._files, root = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        except ImportError as error:
            extra = "pip install 'lockstep-train[s3]'" if url.startswith(("s3:", "s3a:")) else "install that package"
            raise ConfigError(f"{url} needs a package that is not installed", why=str(error)[:300], fix=extra) from None
        except ValueError as error:
            fix = "give a URL that fsspec knows, such as s3://bucket/run or file:///disk/run"
            raise ConfigError(f"{url} cannot be used", why=str(error)[:300], fix=fix) from None
        self._root = root.rstrip("/")
        #: Object stores have no folders, and replace a file at once; other places may need both.
        self._has_folders = not self._files.async_impl
        self.is_local = isinstance(self._files, LocalFileSystem)

    def path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def read(self, name: str) -> bytes:
        return bytes(self._files.cat_file(self.path(name)))

    def read_if_there(self, name: str) -> bytes | None:
        """Return the content of a file; ``None``: there is none."""
        try:
            return self.read(name)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, name: str, content: bytes, *, mode: str = "overwrite") -> None:
        """Write a file; ``mode="create"`` raises :class:`FileExistsError` if it exists."""
        self._put(name, lambda path: self._files.pipe_file(path, content, mode=mode), is_new=mode == "create")

    def put(self, source: Path, name: str) -> None:
        self._put(name, lambda path: self._files.put_file(str(source), path))

    def copy(self, source: str, name: str) -> None:
        self._put(name, lambda path: self._files.cp_file(self.path(source), path))

    def _put(self, name: str, send: Callable[[str], None], *, is_new: bool = False) -> None:
        path = self.path(name)
        if self._has_folders:
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        if self.is_local and not is_new:
            temporary = f"{path}{TEMPORARY}{secrets.token_hex(4)}"
            send(temporary)
            Path(temporary).replace(path)
        else:
            send(path)

    def get(self, name: str, target: Path) -> None:
        """Copy a file here; ``target`` is replaced at once."""
        make_folders(target.parent)
        temporary = target.with_name(temporary_name(target.name))
        try:
            self._files.get_file(self.path(name), str(temporary))
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self.path(name))

    def remove_checkpoint(self, checkpoint: str) -> None:
        """Remove a checkpoint, its manifest first: a rest without a manifest is not read."""
        folder = f"{CHECKPOINTS}/{checkpoint}"
        self.remove(f"{folder}/{MANIFEST}")
        for name in self.names(folder):
            self.remove(name)
        if self._has_folders:
            with contextlib.suppress(OSError):
                self._files.rmdir(self.path(folder))

    def names(self, folder: str = "") -> dict[str, Any]:
        """Return the files below ``folder``, each with a value that changes with its content.

        Leaves out names that would lead out of the folder, and files that are never copied.
        """
        try:
            listing = self._files.find(self.path(folder).rstrip("/"), detail=True)
        except FileNotFoundError:
            return {}
        files = {}
        for path, info in listing.items():
            name = path.removeprefix(f"{self._root}/")
            parts = name.split("/")
            if name == path or {"", ".", ".."} & {*parts} or "\0" in name or is_local_only(parts[-1]):
                continue
            marks = [info.get(key) for key in ("size", "ETag", "mtime", "created", "LastModified", "etag", "updated")]
            files[name] = marks if any(marks[1:]) else object()
        return files

    def record(self) -> RunRecord | None:
        """Return the run that is mirrored here; ``None``: there is none. Raises :class:`RunFolderError`."""
        content = self.read_if_there("run.json")
        if content is None:
            return None
        try:
            return parse_record(json.loads(content), Path(self.url) / "run.json")
        except ValueError as error:
            raise RunFolderError(f"run.json of {self.url} is damaged", why=str(error)[:300]) from None


def is_local_only(name: str) -> bool:
    return name in _LOCAL or TEMPORARY in name


@contextlib.contextmanager
def reaching(url: str, doing: str = "read") -> Iterator[None]:
    """Turn whatever a storage's library raises in the block into one :class:`RunFolderError`."""
    try:
        yield
    except LockstepError:
        raise
    except Exception as error:
        fix = "check the address, the network, and the credentials that the storage's library finds on this machine"
        raise RunFolderError(f"{url} cannot be {doing}", why=in_words(error), fix=fix) from None


def in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def is_of_checkpoint(name: str) -> bool:
    """Return whether a file of a run belongs to a checkpoint, or is ``last`` or ``best``."""
    folder, _, rest = name.partition("/")
    return folder == CHECKPOINTS and (rest in POINTERS or CHECKPOINT.match(rest) is not None)


def is_weights(name: str) -> bool:
    """Return whether a file of a run is the large part of a checkpoint: not its manifest."""
    return is_of_checkpoint(name) and name.count("/") == 2 and not name.endswith(f"/{MANIFEST}")
