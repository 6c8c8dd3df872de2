"""Which form a checkpoint has, and the reason that people read."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.config import CheckpointConfig, DistributedConfig, OptimizerConfig
from lockstep.errors import ConfigError
from lockstep.planning.resolve import (
    FIRST_BUCKET_BYTES,
    SHARDED_FROM_BYTES,
    choose_form,
    natural_mode,
    resolve_monitor,
    resolve_reduction,
)
from lockstep.strategies import find_strategy

#: Parameters whose weights and AdamW moments make the limit.
LIMIT = SHARDED_FROM_BYTES // 12 + 1


@pytest.mark.parametrize(
    ("setting", "strategy", "parameters", "optimizer", "in_shards", "words"),
    [
        ("auto", "fsdp", LIMIT, "adamw", True, "0.5 GB"),
        ("auto", "fsdp", LIMIT - 1, "adamw", False, "small enough to gather on rank 0"),
        ("auto", "fsdp", LIMIT, "sgd", False, "0.33 GB"),
        ("on", "fsdp", 1000, "adamw", True, "0.012 MB"),
        ("off", "fsdp", 10 * LIMIT, "adamw", False, "as configured"),
        ("on", "ddp", 10 * LIMIT, "adamw", False, "checkpoint.sharded "),
        ("auto", "single", 10 * LIMIT, "adamw", False, "single"),
    ],
)
def test_form_and_reason(
    setting: str, strategy: str, parameters: int, optimizer: str, in_shards: bool, words: str
) -> None:
    config = OptimizerConfig(name=optimizer, momentum=0.9)  # type: ignore[arg-type]
    decision = choose_form(setting, find_strategy(strategy), parameters, config)
    assert decision.value is in_shards and words in decision.reason


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
     "val_AUROC", "val_miou", "val_score"],
)  # fmt: skip
def test_scores_are_better_the_higher_they_are(name: str) -> None:
    assert natural_mode(name) == "max"


@pytest.mark.parametrize(
    ("settings", "value", "reason"),
    [
        ({}, "val_bleu (max)", "the task's metric"),
        ({"monitor": "val_bleu"}, "val_bleu (max)", "as configured"),
        ({"mode": "min"}, "val_bleu (min)", "as configured"),
        ({"monitor": "val_nll"}, "val_nll (min)", "by its name, lower is better"),
        ({"monitor": "val_cancer_auc"}, "val_cancer_auc (max)", "by its name, higher is better"),
        ({"monitor": "val_loss", "mode": "max"}, "val_loss (max)", "as configured"),
        ({"monitor": "val_preserved"}, "val_preserved (min)", "higher_is_better, lower"),
        ({"monitor": "val_clean_distance"}, "val_clean_distance (max)", "higher_is_better, higher"),
        ({"monitor": "val_fiddle", "mode": "max"}, "val_fiddle (max)", "as configured"),
    ],
)
def test_the_plan_shows_metric_and_direction(settings: dict[str, Any], value: str, reason: str) -> None:
    modes: dict[str, Any] = {"preserved": "min", "distance": "max", "accuracy": "min"}
    monitor, mode, decision = resolve_monitor(CheckpointConfig(**settings), ("val_bleu", "max"), modes, judged=True)
    assert decision.value == monitor
    assert decision.shown == f"{monitor} ({mode})" == value
    assert reason in decision.reason


def test_without_validation_nothing_is_the_best() -> None:
    decision = resolve_monitor(CheckpointConfig(), ("val_loss", "min"), {}, judged=False)[2]
    assert (decision.value, decision.shown) == (None, "none")


def test_a_metric_whose_direction_nothing_states_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_monitor(CheckpointConfig(monitor="val_fiddle"), ("val_loss", "min"), {}, judged=True)
    assert "checkpoint.mode" in caught.value.fix


@pytest.mark.parametrize(
    ("settings", "joint_bytes", "on_cpu", "joint", "words"),
    [
        ({}, FIRST_BUCKET_BYTES, True, True, "1 MB "),
        ({}, FIRST_BUCKET_BYTES + 4, True, False, "more than DDP's first bucket"),
        ({}, 0, True, False, "contiguous"),
        ({}, 100, False, False, "on GPUs"),
        ({"bucket_cap_mb": 1.0}, 100, True, False, "is set"),
        ({"find_unused_parameters": True}, 100, True, False, "is set"),
    ],
)
def test_message_or_buckets(settings: dict[str, Any], joint_bytes: int, on_cpu: bool, joint: bool, words: str) -> None:
    found = resolve_reduction(DistributedConfig(**settings), joint_bytes, on_cpu=on_cpu)
    assert found.value is joint
    assert words in found.reason
