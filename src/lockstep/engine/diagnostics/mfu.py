"""Model FLOP/s utilisation: which share of its GPUs' peak arithmetic a run uses (Chowdhery et al. 2022, PaLM)."""

from __future__ import annotations

import torch

from lockstep.data.requests import BatchRequest, Source
from lockstep.data.stream import Stream
from lockstep.engine.blueprint import on_meta, trial_of
from lockstep.engine.distributed.staging import to_device
from lockstep.engine.generators import generators_kept
from lockstep.engine.loss import check_loss
from lockstep.engine.task import Task
from lockstep.engine.trained import bare
from lockstep.hardware.peaks import peak_flops
from lockstep.planning import Plan

#: Samples whose operations are counted.
_COUNTED = 8


def peak_share(task: Task, source: Source, plan: Plan) -> tuple[float | None, str]:
    """Return the share of the peak that one sample a second is, and its source; or ``None``, and the reason."""
    placement = plan.placement
    tf32 = plan.value("matmul_precision") == "high"
    peak, origin = peak_flops(placement.get("gpu", ""), placement["precision"], tf32=tf32)
    flops, counted = (None, origin) if peak is None else flops_of_sample(task, source, plan)
    if peak is None or flops is None:
        return None, f"MFU is not shown: {counted}."
    devices = len(set(placement["devices"])) * placement["nodes"]
    text = f"MFU: {flops / 1e9:.4g} GFLOP a sample, {peak / 1e12:.4g} TFLOP/s a GPU ({origin})."
    return flops / (peak * devices), text


def flops_of_sample(task: Task, source: Source, plan: Plan) -> tuple[float | None, str]:
    """Count operations of forward and backward by torch's counter on tensors without memory; ``None``, and why."""
    from torch.utils.flop_counter import FlopCounterMode

    if plan.task.lengths is not None or isinstance(source.dataset, Stream):
        return None, "samples differ in length, or are read once"
    size = min(_COUNTED, plan.batch.batch_size)
    counter = FlopCounterMode(display=False)
    try:
        with generators_kept():
            trial = trial_of(task)
            model = on_meta(trial).train()
            batch = source.batch(BatchRequest(0, 0, 0, size, window=(0, plan.batch.global_batch)))
            with counter:
                check_loss(trial.loss(bare(model), to_device(batch, torch.device("meta")))).total.backward()
    except Exception as error:  # the task may need values
        return None, f"operations cannot be counted without values ({type(error).__name__})"
    total = counter.get_total_flops()
    return (total / size, "") if total else (None, "torch counts none of the model's operators")
