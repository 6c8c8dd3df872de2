"""A task's pictures: what is one, and PNG files that others can read."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lockstep.errors import TaskError
from lockstep.telemetry.sinks import check_picture, encode_png


@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (4, 2, 3)])
def test_a_png_has_every_pixel(shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    check_picture("drawn", pixels)
    with Image.open(io.BytesIO(encode_png(pixels))) as picture:
        assert picture.mode == ("L" if len(shape) == 2 else "RGB")
        np.testing.assert_array_equal(np.asarray(picture), pixels)


@pytest.mark.parametrize(
    ("name", "pixels"),
    [
        ("drawn", np.zeros((3, 5))),
        ("drawn", np.zeros((3, 0), dtype=np.uint8)),
        ("drawn", np.zeros((3, 5, 4), dtype=np.uint8)),
        ("drawn", [[1, 2]]),
        ("../drawn", np.zeros((3, 5), dtype=np.uint8)),
    ],
)
def test_what_is_no_picture_is_refused(name: str, pixels: Any) -> None:
    with pytest.raises(TaskError, match="cannot be written"):
        check_picture(name, pixels)
