"""Scores of classified windows, from one confusion matrix: rows are true classes, columns predicted ones."""

from __future__ import annotations

import torch
from torch import Tensor


def count(predicted: Tensor, target: Tensor, classes: int) -> Tensor:
    """The confusion matrix (classes, classes) of ``predicted`` and ``target``, both (rows,) of classes."""
    return torch.bincount(target * classes + predicted, minlength=classes**2).reshape(classes, classes)


def scores(confusion: Tensor) -> dict[str, Tensor]:
    """Accuracy and macro F1 of a confusion matrix; not a number where it counts nothing.

    F1 is the mean over the classes that occur, in truth or prediction, as torchmetrics' macro average.
    """
    right, occurrences = confusion.diagonal(), confusion.sum(0) + confusion.sum(1)
    return {"accuracy": right.sum() / confusion.sum(), "f1": (2 * right / occurrences)[occurrences > 0].mean()}


class ClassScores:
    """Accuracy, macro F1 and confusion matrix of all rows, of ``classes`` classes."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self._confusion = torch.zeros(classes, classes, dtype=torch.int64)

    def update(self, predicted: Tensor, target: Tensor) -> None:
        """Take rows: ``predicted`` (rows,), ``target`` (rows,)."""
        self._confusion = self._confusion + count(predicted, target, self.classes)

    def compute(self) -> dict[str, Tensor]:
        """``accuracy``, ``f1``, and ``confusion`` (classes, classes)."""
        return {**scores(self._confusion), "confusion": self._confusion}


class WindowScores:
    """Scores of windows when each channel of a window was classified on its own (mode ``flatten``), and of channels.

    A window's class is the one with the largest mean probability over its channels. Rows may come in any order and in
    any batches; a window is counted when the last of its ``channels`` has arrived.
    """

    def __init__(self, classes: int, channels: int) -> None:
        self.classes, self.channels = classes, channels
        self._windows = self._channels = torch.zeros(classes, classes, dtype=torch.int64)
        #: Rows of the windows that are not complete yet: probabilities, target and window.
        self.waiting = torch.zeros(0, classes), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)

    def update(self, probabilities: Tensor, target: Tensor, window: Tensor) -> None:
        """Take rows: ``probabilities`` (rows, classes), ``target`` (rows,), ``window`` (rows,)."""
        self._channels = self._channels + count(probabilities.argmax(1), target, self.classes)
        came = probabilities.float(), target, window
        probabilities, target, window = map(torch.cat, zip(self.waiting, came, strict=True))
        _, place, rows = window.unique(return_inverse=True, return_counts=True)
        complete = (rows == self.channels)[place]
        self._windows = self._windows + self._of_windows(probabilities[complete], target[complete], window[complete])
        self.waiting = probabilities[~complete], target[~complete], window[~complete]

    def compute(self) -> dict[str, Tensor]:
        """``accuracy``, ``f1`` and ``confusion`` of windows, ``channel_accuracy`` and ``channel_f1``.

        Windows of which some channels never came count with those that did.
        """
        windows = self._windows + self._of_windows(*self.waiting)
        of_channels = {f"channel_{name}": value for name, value in scores(self._channels).items()}
        return {**scores(windows), "confusion": windows, **of_channels}

    def _of_windows(self, probabilities: Tensor, target: Tensor, window: Tensor) -> Tensor:
        ids, place = window.unique(return_inverse=True)
        sums = torch.zeros(len(ids), self.classes).index_add_(0, place, probabilities)
        truth = torch.zeros(len(ids), dtype=torch.int64).scatter_(0, place, target)
        return count(sums.argmax(1), truth, self.classes)
