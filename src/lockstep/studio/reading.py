"""The end of a text file."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.telemetry.files import open_regular


def last_lines(file: Path, lines: int, *, max_bytes: int = 1 << 20, skip_bytes: int = 0) -> tuple[list[str], bool]:
    """The last lines of a text file, and whether there are more; none when it cannot be read.

    Args:
        skip_bytes: where to begin in the file.
    """
    try:
        with open_regular(file) as stream:
            start = max(skip_bytes, stream.seek(0, os.SEEK_END) - max_bytes)
            stream.seek(start)
            text = stream.read(max_bytes).decode("utf-8", "replace")
    except OSError:
        return [], False
    # A progress bar overwrites its line: what the terminal would still show is what follows the last return.
    found = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    if not found[-1]:
        found.pop()
    return found[-lines:], start > skip_bytes or len(found) > lines
