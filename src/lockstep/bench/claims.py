"""What guides to multi-GPU training claim for two of the built-in tasks, to be laid beside what is measured.

They name no method, machine or spread. ``har``: "Performance Comparison" and "Memory Usage" of a guide to DataParallel
and DistributedDataParallel (20 epochs, batch size 32 per GPU). ``speech``: "Expected Speedup with Multiple GPUs" and
"Current Single GPU Performance" of a guide to multi-GPU training of an LMU recogniser (7.16 million parameters, 1.1 s
for a batch of 16).
"""

from __future__ import annotations

from typing import NamedTuple


class Claim(NamedTuple):
    """``memory_gb``: by GPU. ``None``: the guide does not say."""

    samples_per_s: float | None
    speed_up: float
    memory_gb: tuple[float, ...] | None = None


#: By task, strategy and number of GPUs.
CLAIMS: dict[tuple[str, str, int], Claim] = {
    ("har", "single", 1): Claim(150, 1.0, (5,)),
    ("har", "dp", 2): Claim(250, 1.7, (8, 5)),
    ("har", "dp", 4): Claim(450, 3.0, (11, 5, 5, 5)),
    ("har", "ddp", 2): Claim(300, 2.0, (5, 5)),
    ("har", "ddp", 4): Claim(600, 4.0, (5, 5, 5, 5)),
    ("har", "ddp", 8): Claim(1100, 7.3),
    ("speech", "single", 1): Claim(16 / 1.1, 1.0),
    ("speech", "ddp", 2): Claim(None, 1.8),
    ("speech", "ddp", 4): Claim(None, 3.5),
    ("speech", "ddp", 8): Claim(None, 6.5),
}
#: Parameters of the model that a guide's figures are of.
PARAMETERS = {"har": 86_200_000, "speech": 7_160_000}


def claims_note(task: str, parameters: int) -> str | None:
    """What keeps claims and measured figures from being comparable."""
    claimed = PARAMETERS.get(task)
    if claimed is None:
        return f"nothing is claimed for {task}: the guides speak of {' and '.join(PARAMETERS)}"
    if 0.9 < parameters / claimed < 1.1:
        return None
    return (
        f"the claims are of a model of {claimed:,} parameters, the measured figures of one of {parameters:,}: "
        "their rates, speed-ups and memory are not comparable"
    )


def claim_of(task: str, strategy: str, devices: int) -> dict[str, object]:
    """Columns of a row: what is claimed for it; nothing where nothing is."""
    claim = CLAIMS.get((task, strategy, devices))
    if claim is None:
        return {}
    return {
        "claimed_samples_per_s": claim.samples_per_s,
        "claimed_speed_up": claim.speed_up,
        "claimed_memory_gb": None if claim.memory_gb is None else list(claim.memory_gb),
    }
