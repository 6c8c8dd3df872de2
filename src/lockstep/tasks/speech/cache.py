"""Where on this machine things are kept that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``lockstep`` in the user's cache folder (XDG Base Directory Specification 0.8); it may not exist yet."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "lockstep"
