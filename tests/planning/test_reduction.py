"""When ddp reduces gradients in one message, and the reason that the plan shows."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.config import DistributedConfig
from lockstep.planning.reduction import FIRST_BUCKET_BYTES, resolve_reduction


@pytest.mark.parametrize(
    ("settings", "joint_bytes", "on_cpu", "joint", "words"),
    [
        ({}, FIRST_BUCKET_BYTES, True, True, "1 MB of gradients fit"),
        ({}, FIRST_BUCKET_BYTES + 4, True, False, "more than DDP's first bucket"),
        ({}, 0, True, False, "not all contiguous"),
        ({}, 100, False, False, "on GPUs"),
        ({"bucket_cap_mb": 1.0}, 100, True, False, "is set"),
        ({"find_unused_parameters": True}, 100, True, False, "is set"),
    ],
)
def test_message_or_buckets(settings: dict[str, Any], joint_bytes: int, on_cpu: bool, joint: bool, words: str) -> None:
    found = resolve_reduction(DistributedConfig(**settings), joint_bytes, on_cpu=on_cpu)
    assert found.value is joint
    assert words in found.reason
