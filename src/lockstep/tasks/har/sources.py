"""Windows from the package, from tensors on disk, and made up."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.data.arrays import ArrayDataset
from lockstep.errors import DataError
from lockstep.tasks.har.windows import Floats, HarData, Windows, check_subjects, checked, select

# The data in the package: seven shoulder exercises of ten subjects with a smart watch (see ``watch.txt``).

WINDOW_S = 2.0
#: Subjects in the order of their numbers: the first six train, the next two validate, the last two test.
VAL_SUBJECTS = (7, 8)
TEST_SUBJECTS = (9, 10)
#: What a reflection at the body's plane of symmetry reverses: an arrow's x (ax); for a rotation, which is a
#: pseudovector, everything but x (wy, wz).
MIRRORED = ("ax", "wy", "wz")


def load_watch(*, val_subjects: Sequence[int] | None, test_subjects: Sequence[int] | None, mirror: bool) -> HarData:
    """Windows of two seconds at half overlap, split by subject.

    Args:
        mirror: reflect the recordings of the left arm, so that both arms look like a right one.

    Raises:
        ConfigError: subjects that are not there, or in two splits.
    """
    val = VAL_SUBJECTS if val_subjects is None else tuple(val_subjects)
    test = TEST_SUBJECTS if test_subjects is None else tuple(test_subjects)
    with files("lockstep.tasks.har").joinpath("watch.npz").open("rb") as file, np.load(file) as content:
        arrays = {name: content[name] for name in content.files}
    train = check_subjects(sorted(set(arrays["subject"].tolist())), val, test)
    signals = arrays["signals"] * arrays["scale"].astype(np.float32)[:, None]
    length = round(WINDOW_S * int(arrays["rate_hz"]))
    flip = np.array([[-1.0 if name in MIRRORED else 1.0] for name in arrays["channel_names"]], dtype=np.float32)
    samples, labels, subjects = [], [], []
    stops = np.cumsum(arrays["lengths"])
    for place, (start, stop) in enumerate(zip(stops - arrays["lengths"], stops, strict=True)):
        is_left = arrays["side"][place] == 0
        recording = signals[:, start:stop] * flip if mirror and is_left else signals[:, start:stop]
        cut = cut_windows(recording, length, length // 2)
        samples.append(cut)
        labels += [arrays["label"][place]] * len(cut)
        subjects += [arrays["subject"][place]] * len(cut)
    names = tuple(arrays["class_names"].tolist())
    windows = checked(np.concatenate(samples), np.array(labels), classes=len(names), where="watch.npz")
    of = np.array(subjects)
    return HarData(
        train=select(windows, of, train),
        val=select(windows, of, val),
        test=select(windows, of, test),
        class_names=names,
        split=f"by subject: training {list(train)}, validation {list(val)}, test {list(test)}",
    )


def cut_windows(recording: Floats, length: int, hop: int) -> Floats:
    """``(channels, time)`` → ``(windows, channels, length)``; a rest shorter than a window is left out."""
    if recording.shape[1] < length:
        return np.empty((0, len(recording), length), dtype=np.float32)
    views = np.lib.stride_tricks.sliding_window_view(recording, length, axis=1)[:, ::hop]
    return np.ascontiguousarray(views.transpose(1, 0, 2), dtype=np.float32)


# Windows saved with ``torch.save``: ``train.pt``, ``val.pt`` and ``test.pt``.

PARTS = ("train", "val", "test")
FORM = '{"samples": tensor (windows, channels, time), "labels": tensor (windows)}'


def has_tensors(folder: Path) -> bool:
    """Whether ``folder`` holds any of the three files."""
    return any((folder / f"{part}.pt").exists() for part in PARTS)


def load_tensors(folder: Path) -> HarData:
    """The three files; the classes are those of the training labels, numbered from 0.

    Raises:
        DataError: a file that is missing, broken, of another form, or does not fit the others.
    """
    train = _load(folder / "train.pt", classes=None)
    classes = int(train.labels.max()) + 1
    if classes > len(train):
        raise DataError(
            f"{folder / 'train.pt'}: label {classes - 1} is out of range",
            why=f"{len(train)} windows cannot have {classes} classes",
            fix="number the classes from 0 without gaps",
        )
    val, test = (_load(folder / f"{part}.pt", classes=classes) for part in PARTS[1:])
    for part, windows in zip(PARTS[1:], (val, test), strict=True):
        if windows.samples.shape[1:] != train.samples.shape[1:]:
            raise DataError(
                f"{part}.pt has windows of shape {windows.samples.shape[1:]}, train.pt of {train.samples.shape[1:]}",
                fix="save the same channels and length in all three files",
            )
    names = tuple(f"class {number}" for number in range(classes))
    return HarData(train, val, test, names, split="as the files give it")


def _load(file: Path, *, classes: int | None) -> Windows:
    try:
        # weights_only: a file from elsewhere must not run code. On the CPU, whatever torch's default device is.
        content = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise DataError(f"{file} is missing", fix=f"save it as {FORM}") from None
    except Exception as error:  # torch.load has many error types for a broken file
        reason = str(error).partition("\n")[0][:300]
        raise DataError(
            f"cannot read {file}", why=f"{type(error).__name__}: {reason}", fix=f"save it again as {FORM}"
        ) from None
    samples, labels = (content.get(key) for key in ("samples", "labels")) if isinstance(content, dict) else (None, None)
    if not isinstance(samples, Tensor) or not isinstance(labels, Tensor):
        raise DataError(f"{file} does not hold samples and labels", fix=f"save it as {FORM}")
    if samples.is_complex() or samples.dtype == torch.bool:
        raise DataError(f"{file}: the samples are of type {samples.dtype}", fix="save them as 32-bit floats")
    return checked(samples.float().numpy(), labels.numpy(), classes=classes, where=str(file))


# Made-up windows of any number, shape and class count, for benchmarks and tests.

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
