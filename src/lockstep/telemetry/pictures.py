"""Pictures that a task draws: as PNG files of the run, and for the loggers."""

from __future__ import annotations

import importlib.util
import struct
import zlib
from typing import TYPE_CHECKING, Any

from lockstep.errors import TaskError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def check_picture(name: str, pixels: Any) -> None:
    """Raises :class:`TaskError` when ``pixels`` are no picture, or ``name`` cannot be that of a file."""
    kind, shape = str(getattr(pixels, "dtype", type(pixels).__name__)), tuple(getattr(pixels, "shape", ()))
    has_shape = 0 not in shape and (len(shape) == 2 or (len(shape) == 3 and shape[2] == 3))
    if kind != "uint8" or not has_shape or not name.isidentifier():
        raise TaskError(
            f"the task's picture {name!r} cannot be written",
            why=f"it is {kind} of shape {shape}",
            fix="return {'a_name': array} from pictures(): uint8, of shape (height, width) or (height, width, 3)",
        )


def encode_png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Pixels, grey (height, width) or red, green and blue (height, width, 3), as PNG (W3C, third edition)."""
    import numpy as np

    height, width = pixels.shape[:2]
    colour_type = 0 if pixels.ndim == 2 else 2
    lines = np.insert(pixels.reshape(height, -1), 0, 0, axis=1)  # each begins with the type of its filter: none
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 8, colour_type, 0, 0, 0),
        b"IDAT": zlib.compress(lines.tobytes()),
        b"IEND": b"",
    }
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks.items()
    )


def loggers_take_pictures() -> bool:
    """Whether Pillow is installed, with which TensorBoard, W&B and MLflow encode them."""
    return importlib.util.find_spec("PIL") is not None
