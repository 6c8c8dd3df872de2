"""Private names of Hugging Face's ``datasets``."""

from __future__ import annotations

from typing import Any


def has_shuffle_buffer(dataset: Any) -> bool:
    """Whether it is Hugging Face's, and shuffled in a buffer."""
    part = getattr(dataset, "_ex_iterable", None)
    while part is not None and type(part).__name__ != "BufferShuffledExamplesIterable":
        part = getattr(part, "ex_iterable", None)
    return part is not None
