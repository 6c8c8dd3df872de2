"""Scores of windows when each channel of a window was classified on its own (mode ``flatten``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class WindowConfusion(Metric):
    """Confusion matrix over windows: rows are true classes, columns predicted ones.

    A window's class is the one with the largest mean probability over its channels. Rows may come in any
    order and in any batches; a window is counted when its last channel has come, so only windows that
    are not complete take memory.

    Args:
        classes: number of classes.
        channels: rows that make a window; 1 scores every row on its own.
    """

    full_state_update = False
    confusion: Tensor
    scores: Tensor
    targets: Tensor
    windows: Tensor

    def __init__(self, classes: int, channels: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.classes, self.channels = classes, channels
        self.add_state("confusion", torch.zeros(classes, classes, dtype=torch.int64), dist_reduce_fx="sum")
        # One row per channel of the windows that are not complete yet.
        self.add_state("scores", torch.zeros(0, classes), dist_reduce_fx="cat")
        self.add_state("targets", torch.zeros(0, dtype=torch.int64), dist_reduce_fx="cat")
        self.add_state("windows", torch.zeros(0, dtype=torch.int64), dist_reduce_fx="cat")

    def update(self, probabilities: Tensor, target: Tensor, window: Tensor) -> None:
        """Take rows: ``probabilities`` (rows, classes), ``target`` (rows,), ``window`` (rows,)."""
        if self.channels == 1:
            self.confusion = self.confusion + self._count(probabilities.argmax(1), target)
            return
        scores = torch.cat([self.scores, probabilities.float()])
        targets = torch.cat([self.targets, target])
        windows = torch.cat([self.windows, window])
        _, place, rows = windows.unique(return_inverse=True, return_counts=True)
        complete = (rows == self.channels)[place]
        self.confusion = self.confusion + self._of_windows(scores[complete], targets[complete], windows[complete])
        self.scores, self.targets, self.windows = scores[~complete], targets[~complete], windows[~complete]

    def compute(self) -> Tensor:
        """Shape (classes, classes). Windows of which some channels never came count with those that did."""
        return self.confusion + self._of_windows(self.scores, self.targets, self.windows)

    def _of_windows(self, scores: Tensor, targets: Tensor, windows: Tensor) -> Tensor:
        ids, place = windows.unique(return_inverse=True)
        sums = torch.zeros(len(ids), self.classes).index_add_(0, place, scores)
        truth = torch.zeros(len(ids), dtype=torch.int64).scatter_(0, place, targets)
        return self._count(sums.argmax(1), truth)

    def _count(self, predicted: Tensor, truth: Tensor) -> Tensor:
        pairs = torch.bincount(truth * self.classes + predicted, minlength=self.classes**2)
        return pairs.reshape(self.classes, self.classes)


class WindowAccuracy(WindowConfusion):
    """The share of windows that are classified rightly."""

    def compute(self) -> Tensor:
        matrix = super().compute()
        return matrix.diagonal().sum() / matrix.sum()


class WindowF1(WindowConfusion):
    """Mean F1 over the classes that occur, in truth or prediction (as torchmetrics' macro average)."""

    def compute(self) -> Tensor:
        matrix = super().compute()
        both = matrix.sum(0) + matrix.sum(1)
        scores = 2 * matrix.diagonal() / both
        return scores[both > 0].mean()
