"""UCI-HAR: six activities of thirty people with a phone at the waist, as the archive unpacks.

Anguita, Ghio, Oneto, Parra, Reyes-Ortiz, "A Public Domain Dataset for Human Activity Recognition Using
Smartphones", ESANN 2013; https://doi.org/10.24432/C54S4K, CC BY 4.0. Windows of 128 samples at 50 Hz.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.data.download import download, extract, put_unpacked
from lockstep.errors import DataError
from lockstep.tasks.har.windows import HarData, check_subjects, checked, select

FOLDER = "UCI HAR Dataset"
CLASSES = ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "laying")
CHANNELS = tuple(f"{sensor}_{axis}" for sensor in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
LENGTH = 128
#: Of the official training subjects, how many, of the highest numbers, are for validation.
VAL_SHARE = 5


#: A zip archive that holds ``UCI HAR Dataset.zip``.
URL = "https://archive.ics.uci.edu/static/public/240/human+activity+recognition+using+smartphones.zip"
#: The publisher gives no checksum; this is what several independent projects recorded for this address.
SHA256 = "c00b803081a5c797cd5e4b83700a9810b38d53d9d84e01917e090e1fdbc81031"


def find_uci(folder: Path) -> Path | None:
    """The data set's own folder: ``folder``, or the one in it, if it looks like UCI-HAR."""
    for place in (folder, folder / FOLDER):
        if any((place / name).is_dir() for name in ("train/Inertial Signals", "test/Inertial Signals")):
            return place
    return None


def fetch_uci(folder: Path, *, url: str = URL, sha256: str = SHA256) -> Path:
    """Download and unpack the data set into ``folder`` unless it is there; returns its own folder.

    Raises:
        DataError: it cannot be had, or is not what was expected.
    """
    found = find_uci(folder)
    if found is not None:
        return found
    outer = download(url, folder / "uci-har.zip", sha256)
    put_unpacked(outer, folder / FOLDER, partial(_unpack, outer))
    return folder / FOLDER


def _unpack(outer: Path, temporary: Path) -> Path:
    inner = extract(outer, temporary / "outer") / f"{FOLDER}.zip"
    return (extract(inner, temporary / "inner") if inner.exists() else temporary / "outer") / FOLDER


def load_uci(folder: Path, *, val_subjects: Sequence[int] | None) -> HarData:
    """The official split, with some training subjects kept apart for validation.

    Args:
        folder: the data set's own folder (see :func:`find_uci`).
        val_subjects: training subjects for validation; ``None``: the fifth of them with the highest numbers.

    Raises:
        DataError: a file that is missing, broken or does not fit the others. ConfigError: unknown subjects.
    """
    samples, labels, subjects = _read_split(folder, "train")
    windows = checked(samples, labels, classes=len(CLASSES), first=1, where=f"{folder}/train")
    here = sorted(set(subjects.tolist()))
    val = tuple(here[-max(1, len(here) // VAL_SHARE) :]) if val_subjects is None else tuple(val_subjects)
    train = check_subjects(here, val, ())
    samples, labels, _ = _read_split(folder, "test")
    return HarData(
        train=select(windows, subjects, train),
        val=select(windows, subjects, val),
        test=checked(samples, labels, classes=len(CLASSES), first=1, where=f"{folder}/test"),
        class_names=CLASSES,
        split=f"official; by subject: training {list(train)}, validation {list(val)}",
    )


def _read_split(folder: Path, part: str) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Samples (windows, 9, 128), labels from 1, and the subject of each window."""
    labels = _read_numbers(folder / part / f"y_{part}.txt", np.int64, columns=1)[:, 0]
    subjects = _read_numbers(folder / part / f"subject_{part}.txt", np.int64, columns=1)[:, 0]
    signals = []
    for channel in CHANNELS:
        file = folder / part / "Inertial Signals" / f"{channel}_{part}.txt"
        signals.append(_read_numbers(file, np.float32, columns=LENGTH))
        if len(signals[-1]) != len(labels):
            raise DataError(
                f"{file} has {len(signals[-1])} windows, y_{part}.txt has {len(labels)}",
                fix="restore the folder: one of the files is cut",
            )
    if len(subjects) != len(labels):
        raise DataError(
            f"{folder / part}: {len(subjects)} subjects but {len(labels)} labels",
            fix="restore the folder: a file is cut",
        )
    return np.stack(signals, axis=1), labels, subjects


def _read_numbers(file: Path, kind: type[np.generic], *, columns: int) -> npt.NDArray[Any]:
    """The rows of a text file of numbers; shape (rows, columns)."""
    fix = "unpack the archive again, or fetch it with --download into an empty --data-dir"
    try:
        if file.stat().st_size == 0:
            raise DataError(f"{file} is empty", fix=fix)
        numbers: npt.NDArray[Any] = np.loadtxt(file, dtype=kind, ndmin=2, encoding="ascii")
    except FileNotFoundError:
        raise DataError(f"{file} is missing", why="the folder of UCI-HAR is not complete", fix=fix) from None
    except (OSError, ValueError) as error:  # ValueError includes text that is not ASCII
        raise DataError(f"cannot read {file}", why=str(error)[:300], fix=fix) from None
    if numbers.shape[1] != columns:
        raise DataError(f"{file} has {numbers.shape[1]} numbers in a row, not {columns}", fix=fix)
    return numbers
