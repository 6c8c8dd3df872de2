"""Which GPUs a process sees, and in which order: ``CUDA_VISIBLE_DEVICES`` read as the driver reads it.

Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
"""

from __future__ import annotations

import re
from collections.abc import Sequence


def visible_gpus(variable: str | None, uuids: Sequence[str]) -> list[int] | None:
    """Positions in ``uuids`` (bus order) of the visible GPUs, in the order of their indices.

    Args:
        variable: the value of ``CUDA_VISIBLE_DEVICES``; ``None`` when it is not set.
        uuids: every GPU's ``GPU-…`` identifier.

    Returns:
        ``None`` for MIG slices, which only the CUDA runtime itself can number. As with the driver, the first
        entry that names no GPU ends the list, and an entry named twice empties it.
    """
    if variable is None:
        return list(range(len(uuids)))
    entries = [entry.strip() for entry in variable.split(",")]
    if entries[0].startswith("MIG-"):
        return None
    by_uuid = entries[0].startswith("GPU-")
    found: list[int] = []
    for entry in entries:
        position = _by_uuid(entry, uuids) if by_uuid else _by_number(entry, len(uuids))
        if position is None:
            break
        if position in found:
            return []
        found.append(position)
    return found


def _by_uuid(entry: str, uuids: Sequence[str]) -> int | None:
    """A UUID, or a beginning of one that fits only one GPU."""
    matches = [position for position, uuid in enumerate(uuids) if uuid.startswith(entry)]
    return matches[0] if entry.startswith("GPU-") and len(matches) == 1 else None


def _by_number(entry: str, count: int) -> int | None:
    # Like C's strtoul, the driver reads "1gpu" as 1.
    number = re.match(r"\+?\d+", entry)
    return int(number[0]) if number and int(number[0]) < count else None
