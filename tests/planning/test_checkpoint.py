"""Which form a checkpoint has, and the reason that people read."""

from __future__ import annotations

import pytest

from lockstep.config import OptimizerConfig
from lockstep.planning.checkpoint import SHARDED_FROM_BYTES, choose_form
from lockstep.strategies import find_strategy

#: Parameters whose weights and AdamW moments make the limit.
LIMIT = SHARDED_FROM_BYTES // 12 + 1


@pytest.mark.parametrize(
    ("setting", "strategy", "parameters", "optimizer", "in_shards", "words"),
    [
        ("auto", "fsdp", LIMIT, "adamw", True, "0.5 GB"),
        ("auto", "fsdp", LIMIT - 1, "adamw", False, "small enough to gather on rank 0"),
        ("auto", "fsdp", LIMIT, "sgd", False, "0.33 GB"),
        ("on", "fsdp", 1000, "adamw", True, "as configured; 0.012 MB"),
        ("off", "fsdp", 10 * LIMIT, "adamw", False, "as configured"),
        ("on", "ddp", 10 * LIMIT, "adamw", False, "checkpoint.sharded is for fsdp"),
        ("auto", "single", 10 * LIMIT, "adamw", False, "single"),
    ],
)
def test_form_and_reason(
    setting: str, strategy: str, parameters: int, optimizer: str, in_shards: bool, words: str
) -> None:
    config = OptimizerConfig(name=optimizer, momentum=0.9)  # type: ignore[arg-type]
    decision = choose_form(setting, find_strategy(strategy), parameters, config)
    assert decision.value is in_shards and words in decision.reason
