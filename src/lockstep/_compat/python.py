"""What Python does not say: how the script has ended, when :mod:`atexit` runs."""

from __future__ import annotations

import dis
import sys
from types import FrameType


def script_frame() -> FrameType | None:
    """The frame of the script's top level, below the caller's; ``None``: another module's code was started."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_name, frame.f_globals.get("__name__")) != ("<module>", "__main__"):
        frame = frame.f_back
    return frame


def has_returned(frame: FrameType | None) -> bool:
    """Whether ``frame``, which has ended, ran to its end: else an exception has left it."""
    return frame is None or dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")
