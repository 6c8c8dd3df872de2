"""How ``ddp`` reduces gradients: in one message after the backward, or in buckets during it."""

from __future__ import annotations

from lockstep.config import DistributedConfig
from lockstep.planning.decision import Decision

#: DistributedDataParallel's first bucket (torch's ``_DEFAULT_FIRST_BUCKET_BYTES``).
FIRST_BUCKET_BYTES = 2**20


def resolve_reduction(config: DistributedConfig, joint_bytes: int, *, on_cpu: bool) -> Decision:
    """Whether gradients are reduced in one message.

    Args:
        joint_bytes: of the gradients that one message can carry; 0 where it cannot.
    """
    size, joint = f"{joint_bytes / 1e6:.2g} MB of gradients", False
    if config.bucket_cap_mb is not None or config.find_unused_parameters:
        reason = "distributed.bucket_cap_mb or find_unused_parameters is set, which are settings of buckets"
    elif not on_cpu:
        reason = "on GPUs the buckets are reduced while the backward runs"
    elif not joint_bytes:
        reason = "the parameters are not all contiguous and of one type, float32 or float64"
    elif joint_bytes > FIRST_BUCKET_BYTES:
        reason = f"{size} fill more than DDP's first bucket (1 MiB): the others are reduced during the backward"
    else:
        joint, reason = True, f"{size} fit in DDP's first bucket (1 MiB): nothing to overlap with the backward"
    return Decision("one_message", "gradients", joint, reason, "one message" if joint else "buckets")
