"""Windows of sensor signals: in the package, of UCI-HAR, from tensors on disk, or made up; and how they become samples.

Everything is NumPy until the last step, so that it means the same under any default device of torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.data.arrays import ArrayDataset
from lockstep.data.download import download, extract, put_unpacked
from lockstep.errors import ConfigError, DataError, many

Mode = Literal["joint", "flatten", "average", "first"]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Windows:
    """``samples`` (windows, channels, time) float32 and ``labels`` (windows,) int64."""

    samples: Floats
    labels: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class HarData:
    """Windows of the three splits of a source, and the names of its classes."""

    train: Windows
    val: Windows
    test: Windows
    class_names: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, int]:
        _, channels, length = self.train.samples.shape
        return channels, length


def checked(
    samples: npt.NDArray[Any], labels: npt.NDArray[Any], *, classes: int | None, name: str, first: int = 0
) -> Windows:
    """Return ``samples`` and ``labels`` as :class:`Windows`, with labels from 0 instead of ``first``.

    ``name``: of the data, in errors. ``classes``: their number; ``None``: any label from ``first`` on.
    """
    if samples.ndim != 3 or 0 in samples.shape[1:]:
        raise _data_error(f"{name}: the samples have shape {samples.shape}, not (windows, channels, time)")
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise _data_error(
            f"{name}: the labels have shape {labels.shape} and type {labels.dtype}, not one integer per window"
        )
    if len(samples) != len(labels):
        raise _data_error(f"{name}: {len(samples)} windows but {len(labels)} labels")
    if len(samples) == 0:
        raise _data_error(f"{name}: there is no window in it")
    with np.errstate(invalid="ignore", over="ignore"):
        samples = np.ascontiguousarray(samples, dtype=np.float32)
        # The sum is finite when all values are, and needs no array of flags as large as the data.
        is_finite = np.isfinite(samples.sum(dtype=np.float64))
    if not is_finite:
        bad = int(np.flatnonzero(~np.isfinite(samples).all(axis=(1, 2)))[0])
        raise _data_error(f"{name}: window {bad} holds values that are not finite", fix="remove it, or fill its gaps")
    lowest = int(labels.min())
    highest = int(labels.max())
    if lowest < first or (classes is not None and highest >= first + classes):
        valid_labels = f"{first} to {first + classes - 1}" if classes is not None else f"whole numbers from {first}"
        raise _data_error(f"{name}: labels go from {lowest} to {highest}, out of range; the classes are {valid_labels}")
    return Windows(samples, labels.astype(np.int64) - first)


def _data_error(
    problem: str, fix: str = "restore the files, or save them again in the form that docs/har.md describes"
) -> DataError:
    return DataError(problem, fix=fix)


def by_subject(
    windows: Windows, subjects: npt.NDArray[Any], val: Sequence[int], test: Sequence[int]
) -> tuple[Windows, ...]:
    """Divide windows into training, validation and test by the subject of each."""
    all_subjects = set(subjects.tolist())
    train = all_subjects - {*val, *test}
    twice = {*val} & {*test}
    unknown = {*val, *test} - all_subjects
    problem = ""
    if unknown:
        problem = f"there is no subject {', '.join(map(str, sorted(unknown)))} to keep apart"
    elif twice:
        problem = f"subject {', '.join(map(str, sorted(twice)))} is in task.val_subjects and task.test_subjects"
    elif not train or not val:
        problem = f"the split leaves no subject for {'validation' if train else 'training'}"
    if problem:
        raise ConfigError(problem, fix=f"choose among the subjects {', '.join(map(str, sorted(all_subjects)))}")
    masks = [np.isin(subjects, list(chosen)) for chosen in (train, val, test)]
    return tuple(Windows(windows.samples[mask], windows.labels[mask]) for mask in masks)


# The data in the package: seven shoulder exercises of ten subjects with a smart watch (see ``watch.txt``).

WINDOW_S = 2.0
#: The first six of the ten subjects train.
VAL_SUBJECTS = (7, 8)
TEST_SUBJECTS = (9, 10)
#: Channels that a reflection at the body's plane of symmetry reverses: an arrow's x (ax); for a rotation, which is a
#: pseudovector, everything but x (wy, wz).
MIRRORED = ("ax", "wy", "wz")


def load_watch(*, val_subjects: Sequence[int] | None, test_subjects: Sequence[int] | None, mirror: bool) -> HarData:
    """Load windows of two seconds at half overlap, split by subject.

    Args:
        mirror: reflect the recordings of the left arm, so that both arms look like a right one.

    Raises:
        ConfigError: subjects that are not there, or in two splits.
    """
    val = VAL_SUBJECTS if val_subjects is None else tuple(val_subjects)
    test = TEST_SUBJECTS if test_subjects is None else tuple(test_subjects)
    with files("lockstep.tasks.har").joinpath("watch.npz").open("rb") as file, np.load(file) as content:
        arrays = {name: content[name] for name in content.files}
    signals = arrays["signals"] * arrays["scale"].astype(np.float32)[:, None]
    length = round(WINDOW_S * int(arrays["rate_hz"]))
    flip = np.array([[-1.0 if name in MIRRORED else 1.0] for name in arrays["channel_names"]], dtype=np.float32)
    recordings = np.split(signals, np.cumsum(arrays["lengths"])[:-1], axis=1)
    cut = [
        cut_windows(recording * flip if mirror and side == 0 else recording, length, length // 2)
        for recording, side in zip(recordings, arrays["side"], strict=True)
    ]
    counts = [len(part) for part in cut]
    names = tuple(arrays["class_names"].tolist())
    labels = np.repeat(arrays["label"], counts)
    subjects = np.repeat(arrays["subject"], counts)
    windows = checked(np.concatenate(cut), labels, classes=len(names), name="watch.npz")
    train, validation, held_out = by_subject(windows, subjects, val, test)
    return HarData(train, validation, held_out, names)


def cut_windows(recording: Floats, length: int, hop: int) -> Floats:
    """Cut ``(channels, time)`` → ``(windows, channels, length)``; a rest shorter than a window is left out."""
    if recording.shape[1] < length:
        return np.empty((0, len(recording), length), dtype=np.float32)
    views = np.lib.stride_tricks.sliding_window_view(recording, length, axis=1)[:, ::hop]
    return np.ascontiguousarray(views.transpose(1, 0, 2), dtype=np.float32)


# UCI-HAR: six activities of thirty people with a phone at the waist, as the archive unpacks.
# Anguita, Ghio, Oneto, Parra, Reyes-Ortiz, "A Public Domain Dataset for Human Activity Recognition Using Smartphones",
# ESANN 2013; https://doi.org/10.24432/C54S4K, CC BY 4.0. Windows of 128 samples at 50 Hz.

FOLDER = "UCI HAR Dataset"
CLASSES = ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "laying")
CHANNELS = tuple(f"{sensor}_{axis}" for sensor in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
LENGTH = 128
#: Of the official training subjects, one in this number is for validation: those of the highest numbers.
VAL_SHARE = 5
#: A zip archive that holds ``UCI HAR Dataset.zip``.
URL = "https://archive.ics.uci.edu/static/public/240/human+activity+recognition+using+smartphones.zip"
#: The publisher gives no checksum; this is what several independent projects recorded for this address.
SHA256 = "c00b803081a5c797cd5e4b83700a9810b38d53d9d84e01917e090e1fdbc81031"


def find_uci(folder: Path) -> Path | None:
    """Return the folder of the data set, if there is one: ``folder``, or ``UCI HAR Dataset`` in it."""
    for candidate in (folder, folder / FOLDER):
        if any((candidate / name).is_dir() for name in ("train/Inertial Signals", "test/Inertial Signals")):
            return candidate
    return None


def fetch_uci(folder: Path, *, url: str = URL, sha256: str = SHA256) -> Path:
    """Download and unpack the data set into ``folder`` unless it is there; return its folder."""
    unpacked = find_uci(folder)
    if unpacked is not None:
        return unpacked
    outer = download(url, folder / "uci-har.zip", sha256)
    put_unpacked(outer, folder / FOLDER, partial(_unpack, outer))
    return folder / FOLDER


def _unpack(outer: Path, temporary: Path) -> Path:
    inner = extract(outer, temporary / "outer") / f"{FOLDER}.zip"
    return (extract(inner, temporary / "inner") if inner.exists() else temporary / "outer") / FOLDER


def load_uci(folder: Path, *, val_subjects: Sequence[int] | None) -> HarData:
    """Load the official split, with some training subjects kept apart for validation."""
    windows, subjects = _read_split(folder, "train")
    all_subjects = sorted(set(subjects.tolist()))
    val = all_subjects[-max(1, len(all_subjects) // VAL_SHARE) :] if val_subjects is None else list(val_subjects)
    train, held_out, _ = by_subject(windows, subjects, val, ())
    return HarData(train, held_out, _read_split(folder, "test")[0], CLASSES)


def _read_split(folder: Path, part: str) -> tuple[Windows, npt.NDArray[np.int64]]:
    """Read windows, and the subject of each."""
    labels = _read_numbers(folder / part / f"y_{part}.txt", np.int64, columns=1)[:, 0]
    subjects = _read_numbers(folder / part / f"subject_{part}.txt", np.int64, columns=1)[:, 0]
    signals = []
    for channel in CHANNELS:
        file = folder / part / "Inertial Signals" / f"{channel}_{part}.txt"
        signals.append(_read_numbers(file, np.float32, columns=LENGTH))
        if len(signals[-1]) != len(labels):
            raise _data_error(f"{file} has {len(signals[-1])} windows, y_{part}.txt has {len(labels)}")
    if len(subjects) != len(labels):
        raise _data_error(f"{folder / part}: {len(subjects)} subjects but {len(labels)} labels")
    windows = checked(np.stack(signals, axis=1), labels, classes=len(CLASSES), first=1, name=f"{folder}/{part}")
    return windows, subjects


def _read_numbers(file: Path, kind: type[np.generic], *, columns: int) -> npt.NDArray[Any]:
    """Read the rows of a text file of numbers; shape (rows, columns)."""
    fix = "unpack the archive again, or fetch it with --download into an empty --data-dir"
    try:
        if file.stat().st_size == 0:
            raise DataError(f"{file} is empty", fix=fix)
        numbers: npt.NDArray[Any] = np.loadtxt(file, dtype=kind, ndmin=2, encoding="ascii")
    except FileNotFoundError:
        raise DataError(f"{file} is missing", fix=fix) from None
    except (OSError, ValueError) as error:  # ValueError includes text that is not ASCII
        raise DataError(f"cannot read {file}", why=str(error)[:300], fix=fix) from None
    if numbers.shape[1] != columns:
        raise DataError(f"{file} has {numbers.shape[1]} numbers in a row, not {columns}", fix=fix)
    return numbers


# Windows saved with ``torch.save``: ``train.pt``, ``val.pt`` and ``test.pt``.

PARTS = ("train", "val", "test")


def load_tensors(folder: Path) -> HarData:
    """Load the three files; the classes are those of the training labels, numbered from 0."""
    train = _load(folder / "train.pt", classes=None)
    classes = int(train.labels.max()) + 1
    if classes > len(train):
        raise _data_error(
            f"{folder / 'train.pt'} has {many(len(train), 'window')} and the label {classes - 1}, "
            "so more classes than windows",
            fix="number the classes from 0 without gaps",
        )
    val, test = (_load(folder / f"{part}.pt", classes=classes) for part in PARTS[1:])
    for part, windows in zip(PARTS[1:], (val, test), strict=True):
        shape = windows.samples.shape[1:]
        train_shape = train.samples.shape[1:]
        if shape != train_shape:
            raise _data_error(f"{part}.pt has windows of shape {shape}, train.pt of {train_shape}")
    return HarData(train, val, test, _numbered(classes))


def _numbered(classes: int) -> tuple[str, ...]:
    return tuple(f"class {number}" for number in range(classes))


def _load(file: Path, *, classes: int | None) -> Windows:
    fix = 'save it as {"samples": tensor (windows, channels, time), "labels": tensor (windows)}'
    try:
        # weights_only: a file from elsewhere must not run code. On the CPU, whatever torch's default device is.
        content = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise DataError(f"{file} is missing", fix=fix) from None
    except Exception as error:  # torch.load has many error types for a broken file
        reason = str(error).partition("\n")[0][:300]
        raise DataError(f"cannot read {file}", why=f"{type(error).__name__}: {reason}", fix=fix) from None
    samples, labels = (content.get(key) for key in ("samples", "labels")) if isinstance(content, dict) else (None, None)
    if not isinstance(samples, Tensor) or not isinstance(labels, Tensor):
        raise DataError(f"{file} does not hold samples and labels", fix=fix)
    if samples.is_complex() or samples.dtype == torch.bool:
        raise DataError(f"{file}: the samples are of type {samples.dtype}", fix="save them as 32-bit floats")
    return checked(samples.float().numpy(), labels.numpy(), classes=classes, name=str(file))


# Made-up windows of any number, shape and class count, for benchmarks and tests.


def make_synthetic(samples: int, shape: tuple[int, int], classes: int, *, seed: int) -> HarData:
    """Make waves in noise, of another frequency and phases for each class; a tenth as many validate, and test.

    Args:
        samples: training windows.
        shape: channels and time steps.
    """
    phases = np.random.default_rng([seed, 0]).uniform(0, 2 * np.pi, (classes, shape[0], 1))
    held_out = max(1, samples // 10)
    train, val, test = (
        _waves(count, shape, phases, np.random.default_rng([seed, part]))
        for part, count in enumerate((samples, held_out, held_out), start=1)
    )
    return HarData(train, val, test, _numbered(classes))


def _waves(count: int, shape: tuple[int, int], phases: npt.NDArray[Any], rng: np.random.Generator) -> Windows:
    labels = rng.integers(len(phases), size=count)
    time = np.linspace(0, 2 * np.pi, shape[1], endpoint=False)
    waves = np.sin((np.arange(len(phases))[:, None, None] + 1) * time + phases).astype(np.float32)
    samples = rng.standard_normal((count, *shape), dtype=np.float32)
    for label, wave in enumerate(waves):
        samples[labels == label] += wave
    return Windows(samples, labels.astype(np.int64))


# How windows become samples.


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
        """Standardise samples (…, channels, time): mean 0 and standard deviation 1 on the training windows."""
        result: Floats = (samples - self.mean[:, None]) / self.std[:, None]
        return result


def as_dataset(windows: Windows, mode: Mode) -> ArrayDataset:
    """Make a data set of standardised windows: samples ``(channels', time)`` and labels.

    ``joint``: all channels are one sample. ``average``, ``first``: one channel is left. ``flatten``: each
    channel is a sample with the window's label; the third array says which window it is from.
    """
    samples = torch.from_numpy(windows.samples)
    labels = torch.from_numpy(windows.labels)
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

    A watch never sits twice at the same angle, and people move with different force: a random rotation of the sensor's
    axes (the same for every sensor) and a random gain of each channel stand for both.

    Args:
        windows: in the sensors' units, channels in xyz triples (needed for a rotation only).
        rotate_deg: standard deviation of the angle, about a random axis.
        gain: standard deviation of a channel's gain around 1.
    """

    def __init__(self, windows: Windows, standardiser: Standardiser, *, rotate_deg: float, gain: float) -> None:
        self._windows = windows
        self._standardiser = standardiser
        self._angle = math.radians(rotate_deg)
        self._gain = gain
        self.labels = windows.labels  # for data.sampling=balanced

    def __len__(self) -> int:
        return len(self._windows)

    def sample(self, index: int, rng: np.random.Generator) -> tuple[Tensor, int]:
        """Return window ``index`` of shape (channels, time), and its label."""
        window = self._windows.samples[index]
        channels, length = window.shape
        if self._angle:
            rotation = _rotation(rng.standard_normal(3), self._angle * rng.standard_normal())
            window = (rotation @ window.reshape(channels // 3, 3, length)).reshape(channels, length)
        if self._gain:
            window = window * (1.0 + self._gain * rng.standard_normal(channels)).astype(np.float32)[:, None]
        return torch.from_numpy(self._standardiser.apply(window)), int(self._windows.labels[index])


def _rotation(axis: npt.NDArray[np.float64], angle: float) -> Floats:
    """Return the matrix that turns by ``angle`` (radians) about ``axis`` (not normalised): Rodrigues' formula."""
    x, y, z = (axis / np.sqrt(axis @ axis)).tolist()
    s = math.sin(angle)
    c = math.cos(angle)
    t = 1.0 - c
    rows = [
        [c + t * x * x, t * x * y - s * z, t * x * z + s * y],
        [t * x * y + s * z, c + t * y * y, t * y * z - s * x],
        [t * x * z - s * y, t * y * z + s * x, c + t * z * z],
    ]
    return np.array(rows, dtype=np.float32)
