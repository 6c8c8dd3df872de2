"""Python's, NumPy's and torch's global random generators: seeding them, and putting their states back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the generators of Python, NumPy and torch after the body."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let the body draw from generators that start at ``seed``; the caller's are restored afterwards."""
    with generators_kept():
        seed_everything(seed)
        yield


def seed_everything(seed: int) -> None:
    """Seed every rank alike: parameters start equal. Order, augmentation and dropout have separate keys."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
