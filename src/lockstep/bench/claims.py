"""What a guide to multi-GPU training claims for its HAR task, to be laid beside what is measured.

Its tables name no method, machine or spread ("Performance Comparison" and "Memory Usage" of a guide to DataParallel
and DistributedDataParallel, HAR, 20 epochs, batch size 32 per GPU).
"""

from __future__ import annotations

from typing import NamedTuple


class Claim(NamedTuple):
    """``memory_gb``: by GPU, where the guide says it."""

    samples_per_s: float
    minutes: float
    speed_up: float
    memory_gb: tuple[float, ...] | None


#: By strategy and number of GPUs.
CLAIMS: dict[tuple[str, int], Claim] = {
    ("single", 1): Claim(150, 45, 1.0, (5,)),
    ("dp", 2): Claim(250, 27, 1.7, (8, 5)),
    ("dp", 4): Claim(450, 15, 3.0, (11, 5, 5, 5)),
    ("ddp", 2): Claim(300, 22, 2.0, (5, 5)),
    ("ddp", 4): Claim(600, 11, 4.0, (5, 5, 5, 5)),
    ("ddp", 8): Claim(1100, 6, 7.3, None),
}


def claim_of(strategy: str, devices: int) -> dict[str, object]:
    """Columns of a row: what is claimed for it; nothing where nothing is."""
    claim = CLAIMS.get((strategy, devices))
    if claim is None:
        return {}
    return {
        "claimed_samples_per_s": claim.samples_per_s,
        "claimed_speed_up": claim.speed_up,
        "claimed_memory_gb": None if claim.memory_gb is None else list(claim.memory_gb),
    }
