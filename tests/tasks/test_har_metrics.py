from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.functional.classification import (
    multiclass_accuracy,
    multiclass_confusion_matrix,
    multiclass_f1_score,
)

from lockstep.tasks.har.task import ClassScores, WindowScores

CLASSES = 4


@st.composite
def scored_windows(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Probabilities (windows, channels, classes), labels (windows,) and a size of batch."""
    windows, channels = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    # Multiples of 1/64 add up exactly in any order: no comparison hangs on rounding.
    probabilities = torch.from_numpy(rng.integers(0, 64, (windows, channels, CLASSES)) / 64.0).float()
    labels = torch.from_numpy(rng.integers(0, draw(st.integers(1, CLASSES)), windows))
    return probabilities, labels, draw(st.integers(1, 20))


def feed(
    metric: WindowScores, probabilities: torch.Tensor, labels: torch.Tensor, batch: int, order: torch.Tensor
) -> dict[str, torch.Tensor]:
    windows, channels, _ = probabilities.shape
    rows = probabilities.reshape(-1, CLASSES)
    targets, ids = labels.repeat_interleave(channels), torch.arange(windows).repeat_interleave(channels)
    for part in order.split(batch):
        metric.update(rows[part], targets[part], ids[part])
    return metric.compute()


def expected(predicted: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """What torchmetrics computes."""
    return {
        "accuracy": multiclass_accuracy(predicted, labels, CLASSES, average="micro"),
        "f1": multiclass_f1_score(predicted, labels, CLASSES, average="macro"),
        "confusion": multiclass_confusion_matrix(predicted, labels, CLASSES),
    }


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, CLASSES - 1), st.integers(0, CLASSES - 1)), min_size=1),
    batch=st.integers(1, 20),
)
def test_classes_are_scored_as_torchmetrics_does(rows: list[tuple[int, int]], batch: int) -> None:
    predicted, labels = torch.tensor(rows).unbind(1)
    metric = ClassScores(CLASSES)
    for part in torch.arange(len(rows)).split(batch):
        metric.update(predicted[part], labels[part])
    torch.testing.assert_close(metric.compute(), expected(predicted, labels))


@settings(max_examples=60, deadline=None)
@given(case=scored_windows(), shuffled=st.booleans())
def test_windows_are_scored_by_the_mean_of_their_channels(
    case: tuple[torch.Tensor, torch.Tensor, int], shuffled: bool
) -> None:
    probabilities, labels, batch = case
    rows = probabilities.shape[0] * probabilities.shape[1]
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1)) if shuffled else torch.arange(rows)
    found = feed(WindowScores(CLASSES, probabilities.shape[1]), probabilities, labels, batch, order)
    channels = expected(probabilities.flatten(0, 1).argmax(1), labels.repeat_interleave(probabilities.shape[1]))
    del channels["confusion"]
    wanted = expected(probabilities.sum(dim=1).argmax(dim=1), labels)
    torch.testing.assert_close(found, wanted | {f"channel_{name}": value for name, value in channels.items()})


def test_only_windows_that_are_not_complete_take_memory() -> None:
    metric = WindowScores(CLASSES, channels=3)
    for start in range(0, 3000, 8):
        rows = torch.arange(start, start + 8)
        metric.update(torch.rand(8, CLASSES), torch.zeros(8, dtype=torch.int64), rows // 3)
        assert all(len(rows) < 3 for rows in metric.waiting)


def test_windows_cut_short_count_with_the_channels_that_came() -> None:
    metric = WindowScores(CLASSES, channels=3)
    metric.update(torch.eye(CLASSES)[[2]], torch.tensor([2]), torch.tensor([0]))
    assert metric.compute()["confusion"][2, 2] == 1
    metric.update(torch.eye(CLASSES)[[1, 1]], torch.tensor([2, 2]), torch.tensor([0, 0]))
    assert metric.compute()["confusion"].nonzero().tolist() == [[2, 1]]


def test_it_works_on_rows_made_under_inference_mode() -> None:
    metric = WindowScores(CLASSES, channels=2)
    with torch.inference_mode():
        metric.update(torch.eye(CLASSES)[[1, 1, 3]], torch.tensor([1, 1, 2]), torch.tensor([0, 0, 1]))
    metric.update(torch.eye(CLASSES)[[3]], torch.tensor([2]), torch.tensor([1]))
    assert metric.compute()["accuracy"] == 0.5
