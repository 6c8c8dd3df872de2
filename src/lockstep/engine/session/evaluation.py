"""Evaluation in a loop of the user's: each sample once, in index order, with the rows of all ranks on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lockstep.data.reader import Collate
from lockstep.data.requests import InOrder, Source
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.distributed.staging import to_host
from lockstep.engine.evaluate import Evaluator, check_rows, evaluating
from lockstep.engine.optim.precision import Precision
from lockstep.engine.process.runtime import generators_kept
from lockstep.planning import LoaderPlan
from lockstep.telemetry.progress_board import Activity, pulse


def evaluated_rows(
    dataset: Any,
    predict: Callable[[Any], Any],
    model: nn.Module,
    collectives: Collectives,
    *,
    collate: Collate,
    batch_size: int,
    device: torch.device,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]],
    loader: LoaderPlan | None,
    seed: int,
    step: int,
    ghosts: bool,
) -> Iterator[tuple[Any, ...]]:
    """What ``predict(batch)`` returns for each batch of ``dataset``, in index order, on every rank. Collective.

    The batches are the same for any number of ranks. Modules are in evaluation mode, and random generators, gradients
    and modes are afterwards as they were.
    """
    loader = loader or LoaderPlan(num_workers=0, prefetch_factor=2, persistent_workers=False, pin_memory=False)
    full = Precision("32", device, 1.0)
    evaluator = Evaluator(collectives, device, full, loader, batch_size, seed, step, ghosts)
    batches = evaluator.batches(evaluator.chunks(len(dataset)), Source(dataset, collate, seed, InOrder()))
    with generators_kept(), evaluating(model), pulse.during(Activity.EVALUATING), contextlib.closing(batches):
        for request, batch in batches:
            found = None
            if request.size:
                with torch.no_grad(), autocast():
                    rows = predict(batch)
                rows = rows if isinstance(rows, (tuple, list)) else (rows,)
                check_rows(rows, request.size, "predict(batch)")
                found = None if request.ghost else tuple(to_host(rows))
            for rows in collectives.all_gather(found):
                if rows is not None:
                    pulse.at(Activity.EVALUATING)
                    yield rows
