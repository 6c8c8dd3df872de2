"""Make a folder atomically."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

from lockstep.errors import StorageError
from lockstep.telemetry.files import fsync_folder, is_folder, storing, temporary_name

#: What renaming onto an empty folder gives when it is a mount point, or its parent is read-only.
_NOT_REPLACEABLE = {errno.EBUSY, errno.EXDEV, errno.EACCES, errno.EPERM, errno.EROFS}


def make_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Make ``path``, a missing or an empty folder, with what ``fill`` writes into a folder given to it.

    The folder is built beside ``path`` and renamed. An existing empty folder that cannot be replaced
    (a mounted volume, say) is filled in place, and emptied again when that fails.

    Raises:
        StorageError: it cannot be made; nothing is left behind, save missing parents that were made.
    """
    existed = is_folder(path)
    building = path.with_name(temporary_name(path.name))
    with storing(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            building.mkdir()
            fill(building)
            building.rename(path)
            fsync_folder(path.parent)
        except OSError as error:
            if not existed or error.errno not in _NOT_REPLACEABLE:
                raise
            _fill_in_place(path, fill)
        except ValueError as error:  # a null character in the path
            what = f"{str(path)!r} is not a valid path"
            raise StorageError(what, why=str(error), fix="choose another --save-dir") from None
        finally:
            shutil.rmtree(building, ignore_errors=True)


def _fill_in_place(path: Path, fill: Callable[[Path], None]) -> None:
    try:
        fill(path)
    except BaseException:
        for entry in path.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
        raise
