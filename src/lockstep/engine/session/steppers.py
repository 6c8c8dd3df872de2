"""The steppers of a session: one for each prepared optimizer, with its scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lockstep.engine.distributed.buffers import Buffers
from lockstep.engine.optim.optimizers import check_sparse
from lockstep.engine.rank_context import RankContext
from lockstep.engine.session.buckets import BUCKET_BYTES
from lockstep.engine.session.prepared import Prepared
from lockstep.engine.session.stepper import SharedPrecision, Stepper
from lockstep.engine.strategies.base import Flags
from lockstep.engine.strategies.exact import LaneSums
from lockstep.engine.task import Scheduler
from lockstep.errors import TaskError


def lane_sums(rank: RankContext, parameters: Sequence[nn.Parameter], buffers: Buffers | None) -> LaneSums:
    """The sums over lanes of ``reproducibility: exact``: of loss, count and flags besides."""
    place: dict[str, Any] = {"device": rank.device, "rank": rank.world.rank, "world_size": rank.world.size}
    return LaneSums(parameters, buffers, 2 + len(Flags._fields), **place)


def build_steppers(
    rank: RankContext, prepared: Prepared, module: nn.Module, precision: SharedPrecision, left: Callable[[], None]
) -> dict[str, Stepper]:
    """By the names of the optimizers. Collective.

    Raises:
        TaskError: a scheduler that steps by a metric. UnsupportedError: sparse gradients on several ranks.
    """
    config, several, exact = rank.config, rank.collectives.size > 1, rank.plan.reproducibility == "exact"
    check_sparse(module, reduced=several or exact)
    group = dist.new_group(backend=rank.plan.placement["backend"]) if several and not exact else None
    cap = config.distributed.bucket_cap_mb
    schedulers: dict[int, Scheduler] = {}
    for name, scheduler in prepared.schedulers.items():
        if isinstance(scheduler, ReduceLROnPlateau):
            raise TaskError(
                f"{name} is a ReduceLROnPlateau, which steps by a metric",
                fix="step it in the loop, and give it to session.checkpoint(scheduler=...) instead of prepare()",
            )
        schedulers[id(scheduler.optimizer)] = Scheduler(scheduler, "step")
    return {
        name: Stepper(
            name,
            module,
            optimizer,
            precision,
            rank.collectives,
            group,
            device=rank.device,
            max_norm=config.training.max_grad_norm,
            cap_bytes=0 if rank.plan.one_message else int(cap * 2**20) if cap else BUCKET_BYTES,
            left=left,
            lanes=partial(lane_sums, rank, buffers=None) if exact else None,
            scheduler=schedulers.get(id(optimizer)),
        )
        for name, optimizer in prepared.optimizers.items()
    }
