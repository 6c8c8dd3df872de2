"""Windows of sensor signals: what every source delivers, checks on it, and how it becomes samples.

Everything here is NumPy until the last step, so that it means the same under any default device of torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.data.arrays import ArrayDataset
from lockstep.errors import ConfigError, DataError

Mode = Literal["joint", "flatten", "average", "first"]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Windows:
    """``samples`` (windows, channels, time) float32 and ``labels`` (windows,) int64."""

    samples: Floats
    labels: Ints

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class HarData:
    """What a source delivers. ``split`` says in words how training, validation and test were kept apart."""

    train: Windows
    val: Windows
    test: Windows
    class_names: tuple[str, ...]
    split: str

    @property
    def shape(self) -> tuple[int, int]:
        """Channels and time steps of a window."""
        _, channels, length = self.train.samples.shape
        return channels, length


def checked(
    samples: npt.NDArray[Any], labels: npt.NDArray[Any], *, classes: int | None, where: str, first: int = 0
) -> Windows:
    """``samples`` and ``labels`` as :class:`Windows`, if they are fit for it.

    Args:
        classes: how many there are; ``None``: not known, any label from ``first`` on will do.
        first: the number of the first class in ``labels``; in the result it is 0.
        where: what to call the data in an error.

    Raises:
        DataError: a wrong shape or kind, no window, lengths that differ, values that are not finite, labels
            out of range.
    """
    if samples.ndim != 3 or 0 in samples.shape[1:]:
        raise DataError(
            f"{where}: the samples have shape {samples.shape}, not (windows, channels, time)",
            fix="save one window per row, for example (7352, 9, 128)",
        )
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(
            f"{where}: the labels have shape {labels.shape} and type {labels.dtype}",
            why="a window has one label, a whole number from 0",
            fix="save them as a vector of 64-bit integers",
        )
    if len(samples) != len(labels):
        raise DataError(
            f"{where}: {len(samples)} windows but {len(labels)} labels", fix="restore the files: some are cut"
        )
    if len(samples) == 0:
        raise DataError(f"{where}: there is no window in it", fix="check that the files are complete")
    with np.errstate(invalid="ignore", over="ignore"):
        samples = np.ascontiguousarray(samples, dtype=np.float32)
        # The sum is finite when all values are, and needs no array of flags as large as the data.
        total = samples.sum(dtype=np.float64)
    if not np.isfinite(total):
        bad = int(np.flatnonzero(~np.isfinite(samples).all(axis=(1, 2)))[0])
        raise DataError(f"{where}: window {bad} holds values that are not finite", fix="remove it, or fill its gaps")
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < first or (classes is not None and highest >= first + classes):
        known = f"{first} to {first + classes - 1}" if classes is not None else f"whole numbers from {first}"
        raise DataError(
            f"{where}: labels go from {lowest} to {highest}, out of range",
            why=f"the classes are {known}",
            fix="number the classes the same way in every split",
        )
    return Windows(samples, labels.astype(np.int64) - first)


def select(windows: Windows, subjects: npt.NDArray[Any], chosen: Sequence[int]) -> Windows:
    """The windows of some subjects; ``subjects`` names the subject of each window."""
    mask = np.isin(subjects, chosen)
    return Windows(windows.samples[mask], windows.labels[mask])


def check_subjects(here: Sequence[int], val: Sequence[int], test: Sequence[int]) -> tuple[int, ...]:
    """The subjects left for training.

    Raises:
        ConfigError: a subject that is not there or in two splits, or an empty split.
    """
    fix = f"choose among the subjects {', '.join(map(str, sorted(here)))}"
    unknown = sorted({*val, *test} - set(here))
    if unknown:
        raise ConfigError(f"there is no subject {', '.join(map(str, unknown))} to keep apart", fix=fix)
    twice = sorted(set(val) & set(test))
    if twice:
        raise ConfigError(
            f"subject {', '.join(map(str, twice))} is in task.val_subjects and task.test_subjects",
            why="a score on subjects that chose the model says nothing about new ones",
            fix=fix,
        )
    train = tuple(sorted(set(here) - {*val, *test}))
    if not train or not val:
        raise ConfigError(f"the split leaves no subject for {'validation' if train else 'training'}", fix=fix)
    return train


@dataclass(frozen=True)
class Standardiser:
    """Mean and standard deviation of each channel, of the training windows alone."""

    mean: Floats
    std: Floats

    @classmethod
    def fit(cls, windows: Windows) -> Standardiser:
        mean = windows.samples.mean(axis=(0, 2), dtype=np.float64)
        std = windows.samples.std(axis=(0, 2), dtype=np.float64)
        # A channel that never changes stays at 0 instead of becoming infinite.
        return cls(mean.astype(np.float32), np.where(std > 0, std, 1.0).astype(np.float32))

    def apply(self, samples: Floats) -> Floats:
        """Of shape (…, channels, time); the result has mean 0 and standard deviation 1 on the training windows."""
        result: Floats = (samples - self.mean[:, None]) / self.std[:, None]
        return result


def as_dataset(windows: Windows, mode: Mode) -> ArrayDataset:
    """Standardised windows as samples ``(channels', time)`` and labels.

    ``joint``: all channels are one sample. ``average``, ``first``: one channel is left. ``flatten``: each
    channel is a sample with the window's label; the third array says which window it is from.
    """
    samples, labels = torch.from_numpy(windows.samples), torch.from_numpy(windows.labels)
    if mode == "joint":
        return ArrayDataset(samples, labels)
    if mode == "average":
        return ArrayDataset(samples.mean(dim=1, keepdim=True), labels)
    if mode == "first":
        return ArrayDataset(samples[:, :1].contiguous(), labels)
    count, channels, length = samples.shape
    window = torch.from_numpy(np.arange(count)).repeat_interleave(channels)
    return ArrayDataset(samples.reshape(-1, 1, length), labels.repeat_interleave(channels), window)


class AugmentedWindows:
    """Training windows, turned and scaled a little in a new way each epoch, then standardised.

    A watch never sits twice at the same angle, and people move with different force: a random rotation of
    the sensor's axes (the same for every sensor) and a random gain of each channel stand for both. Every
    draw comes from the generator of (seed, epoch, sample), so the ranks and workers do not matter.

    Args:
        windows: in the sensors' own units, channels in xyz triples (needed for a rotation only).
        rotate_deg: standard deviation of the angle, about a random axis.
        gain: standard deviation of a channel's gain around 1.
    """

    def __init__(self, windows: Windows, standardiser: Standardiser, *, rotate_deg: float, gain: float) -> None:
        self._windows, self._standardiser = windows, standardiser
        self._angle, self._gain = math.radians(rotate_deg), gain
        self.labels = windows.labels  # for data.sampling=balanced

    def __len__(self) -> int:
        return len(self._windows)

    def sample(self, index: int, rng: np.random.Generator) -> tuple[Tensor, int]:
        """Window ``index`` of shape (channels, time), and its label."""
        window = self._windows.samples[index]
        channels, length = window.shape
        if self._angle:
            rotation = _rotation(rng.standard_normal(3), self._angle * rng.standard_normal())
            window = (rotation @ window.reshape(channels // 3, 3, length)).reshape(channels, length)
        if self._gain:
            window = window * (1.0 + self._gain * rng.standard_normal(channels)).astype(np.float32)[:, None]
        return torch.from_numpy(self._standardiser.apply(window)), int(self._windows.labels[index])


def _rotation(axis: npt.NDArray[np.float64], angle: float) -> Floats:
    """The matrix that turns by ``angle`` (radians) about ``axis`` (not normalised): Rodrigues' formula."""
    x, y, z = (axis / np.sqrt(axis @ axis)).tolist()
    s, c = math.sin(angle), math.cos(angle)
    t = 1.0 - c
    return np.array(
        [
            [c + t * x * x, t * x * y - s * z, t * x * z + s * y],
            [t * x * y + s * z, c + t * y * y, t * y * z - s * x],
            [t * x * z - s * y, t * y * z + s * x, c + t * z * z],
        ],
        dtype=np.float32,
    )
