"""Private names of Hugging Face's ``datasets``."""

from __future__ import annotations

from typing import Any


def node_of(dataset: Any) -> tuple[int, int] | None:
    """Return rank and number of ranks of Hugging Face's ``split_dataset_by_node``, if it has divided ``dataset``."""
    node = getattr(dataset, "_distributed", None)
    return None if node is None or not hasattr(node, "world_size") else (node.rank, node.world_size)


def has_shuffle_buffer(dataset: Any) -> bool:
    """Return whether it is Hugging Face's, and shuffled in a buffer."""
    part = getattr(dataset, "_ex_iterable", None)
    while part is not None and type(part).__name__ != "BufferShuffledExamplesIterable":
        part = getattr(part, "ex_iterable", None)
    return part is not None
