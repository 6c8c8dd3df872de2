"""The samples behind each cell of a confusion matrix: which samples of a class were taken for another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

#: Samples that are kept of a cell, and of all cells.
SAMPLES_OF_CELL = 50
MAX_SAMPLES = 20_000

Classes = npt.NDArray[np.int64]


class ConfusedSamples:
    """Collects the true and the predicted class of each sample from the rows of an evaluation, in index order."""

    def __init__(self) -> None:
        self._targets: list[Classes] = []
        self._predictions: list[Classes] = []

    def add(self, rows: Iterable[Any]) -> None:
        """Add a chunk. Rows that are not (scores or classes, targets) are left out: :meth:`cells` is then empty."""
        columns = [row for row in rows if isinstance(row, Tensor)][:2]
        predictions = _classes_of(columns[0]) if len(columns) == 2 else None
        if predictions is not None and columns[1].ndim == 1 and not columns[1].is_floating_point():
            self._predictions.append(predictions)
            self._targets.append(columns[1].numpy().astype(np.int64))

    def cells(self, tables: Mapping[str, Any], names: Sequence[str] | None) -> dict[str, list[list[Any]]]:
        """Return ``[index, name]`` of the first samples of each cell, by ``"target,prediction"``.

        Empty unless the classes, counted, are one of ``tables``: a metric may count by another rule.

        Args:
            names: a name for each sample, such as its file.
        """
        if not self._targets:
            return {}
        targets = np.concatenate(self._targets)
        predictions = np.concatenate(self._predictions)
        if not any(_is_count(table, targets, predictions) for table in tables.values()):
            return {}
        is_right = targets == predictions
        counted = targets >= 0  # a negative class is one that the metric ignores
        cells: dict[str, list[list[Any]]] = {}
        left = MAX_SAMPLES
        for index in [*np.flatnonzero(counted & ~is_right), *np.flatnonzero(counted & is_right)]:
            cell = cells.setdefault(f"{targets[index]},{predictions[index]}", [])
            if len(cell) < SAMPLES_OF_CELL and left:
                cell.append([int(index), None if names is None else str(names[index])])
                left -= 1
        return cells


def _classes_of(scores: Tensor) -> Classes | None:
    """Return the predicted classes: of (samples, classes) scores, one probability or logit a sample, or classes."""
    if scores.ndim == 2 and scores.is_floating_point():
        return scores.argmax(1).numpy()
    if scores.ndim != 1:
        return None
    if scores.is_floating_point():
        are_probabilities = bool(((scores >= 0) & (scores <= 1)).all())
        scores = scores > (0.5 if are_probabilities else 0.0)
    return scores.numpy().astype(np.int64)


def _is_count(table: Any, targets: Classes, predictions: Classes) -> bool:
    """Return whether ``table`` counts samples by target (row) and prediction; some may be ignored by their target."""
    if not isinstance(table, list) or not all(isinstance(row, list) and len(row) == len(table) for row in table):
        return False
    classes = len(table)
    counted = (targets >= 0) & (targets < classes)
    cells = targets[counted] * classes + predictions[counted]
    if ((predictions < 0) | (predictions >= classes))[counted].any():
        return False
    return np.bincount(cells, minlength=classes**2).reshape(classes, classes).tolist() == table
