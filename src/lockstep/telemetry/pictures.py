"""Pictures as PNG files (those of a task, also for the loggers, and matplotlib's figures), recordings as WAV files."""

from __future__ import annotations

import io
import struct
import wave
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import TaskError
from lockstep.telemetry.files import write_bytes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from matplotlib.figure import Figure


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


def encode_wav(samples: npt.NDArray[np.float32], rate_hz: int) -> bytes:
    """Samples from -1 to 1, shape [samples], as WAV of 16 bits, one channel; what is beyond is clipped."""
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate_hz)
        file.writeframes((samples.clip(-1, 1) * 32767).round().astype("<i2").tobytes())
    return content.getvalue()


def save_figure(figure: Figure, file: Path, *, dpi: int = 120) -> Path:
    """Write a matplotlib figure to ``file`` as a PNG. Raises :class:`~lockstep.errors.StorageError`."""
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=dpi)
    write_bytes(file, png.getvalue())
    return file
