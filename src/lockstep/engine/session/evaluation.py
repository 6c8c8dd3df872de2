"""Evaluation in a loop of the user's: each sample once, in index order, with the rows of all ranks on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lockstep.data.reader import Collate
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.distributed.staging import to_host
from lockstep.engine.evaluate import Evaluator, check_rows
from lockstep.engine.optim.precision import Precision
from lockstep.planning import LoaderPlan, Plan
from lockstep.rundir.heartbeat import Activity, pulse

_UNPLANNED = LoaderPlan(num_workers=0, prefetch_factor=2, pin_memory=False)


def predicted_rows(
    model: nn.Module,
    data: tuple[Any, Collate],
    predict: Callable[[Any], Any],
    precision: str,
    plan: Plan | None,
    collectives: Collectives,
    device: torch.device,
    **place: Any,
) -> Iterator[tuple[Any, ...]]:
    """What ``predict(batch)`` returns for each batch of ``data``, in index order, on every rank. Collective.

    The batches are the same for any number of ranks. Modules are in evaluation mode, and random generators, gradients
    and modes are afterwards as they were. ``plan``: ``None`` before the first loop over batches; ``place``: of
    :class:`Evaluator`.
    """
    how = Precision(precision, device, 1.0), _UNPLANNED if plan is None else plan.loader
    evaluator = Evaluator(collectives, device, *how, ghosts=plan is not None and plan.sharded, **place)
    with evaluator.walk(model, *data) as batches:
        for request, batch in batches:
            found = None
            if request.size:
                with torch.no_grad(), evaluator.precision.autocast():
                    rows = predict(batch)
                rows = rows if isinstance(rows, (tuple, list)) else (rows,)
                check_rows(rows, request.size, "predict(batch)")
                found = None if request.ghost else tuple(to_host(rows))
            for rows in collectives.all_gather(found):
                if rows is not None:
                    pulse.at(Activity.EVALUATING)
                    yield rows
