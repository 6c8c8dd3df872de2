"""Arithmetic that every part may use."""

from __future__ import annotations

__all__ = ["ceil_div"]


def ceil_div(dividend: int, divisor: int) -> int:
    """Return ``dividend / divisor``, rounded up."""
    return -(-dividend // divisor)
