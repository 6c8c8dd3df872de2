"""By which metric an evaluation is the best, and in which direction."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.config import CheckpointConfig
from lockstep.planning.monitor import natural_mode, resolve_monitor


@pytest.mark.parametrize(
    "name",
    ["val_loss", "val/wer", "val_cer", "val_rmse", "val-nll", "val.mape", "val_perplexity", "val_cross_entropy",
     "val_MeanSquaredError", "val_top5_error", "val_ctcloss", "valLoss", "val_nrmse", "val_wmae", "val_errorrate",
     "testerrors"],
)  # fmt: skip
def test_losses_and_errors_are_better_the_lower_they_are(name: str) -> None:
    assert natural_mode(name) == "min"


@pytest.mark.parametrize(
    "name",
    ["val_cancer_auc", "val_answer_f1", "val_flower_accuracy", "val/acc", "val_BinaryAccuracy", "val_f1_per_class",
     "val_fiddle", "val_AUROC"],
)  # fmt: skip
def test_scores_are_better_the_higher_they_are(name: str) -> None:
    assert natural_mode(name) == "max"


@pytest.mark.parametrize(
    ("settings", "value", "reason"),
    [
        ({}, "val_bleu (max)", "the task's own"),
        ({"monitor": "val_bleu"}, "val_bleu (max)", "as configured"),
        ({"mode": "min"}, "val_bleu (min)", "as configured"),
        ({"monitor": "val_nll"}, "val_nll (min)", "by its name, lower is better"),
        ({"monitor": "val_cancer_auc"}, "val_cancer_auc (max)", "by its name, higher is better"),
        ({"monitor": "val_loss", "mode": "max"}, "val_loss (max)", "as configured"),
    ],
)
def test_the_plan_shows_metric_and_direction(settings: dict[str, Any], value: str, reason: str) -> None:
    monitor, mode, decision = resolve_monitor(CheckpointConfig(**settings), ("val_bleu", "max"), judged=True)
    assert decision.value == monitor
    assert decision.shown == f"{monitor} ({mode})" == value
    assert reason in decision.reason


def test_without_validation_nothing_is_the_best() -> None:
    decision = resolve_monitor(CheckpointConfig(), ("val_loss", "min"), judged=False)[2]
    assert (decision.value, decision.shown) == (None, "none")
