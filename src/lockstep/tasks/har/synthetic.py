"""Made-up windows of any number, shape and class count, for benchmarks and tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from lockstep.data.arrays import ArrayDataset
from lockstep.tasks.har.windows import HarData, Windows

#: Above it, samples repeat: a data set of any size then takes no more memory than this.
POOL_BYTES = 256 * 1024**2


def make_synthetic(samples: int, shape: tuple[int, int], classes: int, *, seed: int) -> HarData:
    """Each class is a wave with a separate frequency and phases in noise; a tenth as many windows validate, and test.

    Args:
        samples: distinct training windows wanted; fewer are made when they would take more than ``POOL_BYTES``.
        shape: channels and time steps.
    """
    distinct = max(1, min(samples, POOL_BYTES // (4 * shape[0] * shape[1])))
    phases = np.random.default_rng([seed, 0]).uniform(0, 2 * np.pi, (classes, shape[0], 1))
    held_out = max(1, distinct // 10)
    train, val, test = (
        _waves(count, shape, phases, np.random.default_rng([seed, part]))
        for part, count in enumerate((distinct, held_out, held_out), start=1)
    )
    return HarData(train, val, test, tuple(f"class {number}" for number in range(classes)), "made up")


def _waves(count: int, shape: tuple[int, int], phases: np.ndarray[Any, Any], rng: np.random.Generator) -> Windows:
    labels = rng.integers(len(phases), size=count)
    time = np.linspace(0, 2 * np.pi, shape[1], endpoint=False)
    waves = np.sin((np.arange(len(phases))[:, None, None] + 1) * time + phases).astype(np.float32)
    samples = rng.standard_normal((count, *shape), dtype=np.float32)
    for label, wave in enumerate(waves):
        samples[labels == label] += wave
    return Windows(samples, labels.astype(np.int64))


class Repeated:
    """``length`` samples out of fewer: sample ``i`` is ``dataset[i % len(dataset)]``."""

    def __init__(self, dataset: ArrayDataset, length: int) -> None:
        self._dataset, self._length = dataset, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self._dataset[index % len(self._dataset)]

    def __getitems__(self, indices: Any) -> tuple[Tensor, ...]:
        return self._dataset.__getitems__(np.asarray(indices) % len(self._dataset))
