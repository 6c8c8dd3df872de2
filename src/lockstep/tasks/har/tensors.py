"""Windows saved with ``torch.save``: ``train.pt``, ``val.pt`` and ``test.pt``, each ``{"samples", "labels"}``."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lockstep.errors import DataError
from lockstep.tasks.har.windows import HarData, Windows, checked

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
