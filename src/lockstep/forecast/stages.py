"""The memory of each device of a pipeline, counted stage by stage without the devices.

Each stage runs forward and backward alone, on what the stage before it returned, as in training
(:mod:`lockstep.engine.strategies.pipeline`), for one micro-batch; the schedule says how many of them a device holds
at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep._compat.fake_tensors import FakeTensorMode
from lockstep._compat.torch import tree_leaves
from lockstep.config import RunConfig
from lockstep.engine.optim.optimizers import build_optimizer
from lockstep.engine.optim.precision import Precision
from lockstep.engine.strategies.stages import Answer, Inputs, as_inputs, ask, inputs_of, stages_of
from lockstep.engine.task import Task
from lockstep.forecast.allocation_tracker import Kind, Ledger
from lockstep.forecast.footprint import counted, model_of
from lockstep.forecast.memory import Estimate, on_device

_STATE: tuple[Kind, ...] = ("parameters", "buffers", "gradients", "optimizer")


class StageCount(NamedTuple):
    """Bytes of one stage with one micro-batch.

    ``state``: by kind, what stays from step to step. ``received``, ``sent``: its inputs and outputs. ``held``:
    activations that wait for the backward; ``most``: activations at their fullest, those included. ``cost``: the
    floating-point operations of all its operators, and the bytes that they move.
    """

    state: Mapping[str, int]
    received: int
    sent: int
    held: int
    most: int
    cost: float


def count_stages(
    task: Task, config: RunConfig, batch: Any, batch_size: int, *, devices: int, block: int = 1
) -> list[StageCount]:
    """Count each stage of ``task`` on a micro-batch.

    Args:
        devices: the least number of stages.
        block: as for :class:`~lockstep.forecast.allocation_tracker.Ledger`.

    Raises:
        TaskError, ConfigError, UnsupportedError: the model cannot be cut so, or a step cannot be counted.
    """
    return counted(
        *(task, config, batch, batch_size), lambda shapes, fake: _stages(task, config, shapes, devices, block, fake)
    )


def _stages(
    task: Task, config: RunConfig, batch: Any, devices: int, block: int, fake: FakeTensorMode | None
) -> list[StageCount]:
    model = model_of(task, fake)
    stages = stages_of(task, model, devices)
    optimizer = task.optimizer(model) or build_optimizer(config.optimizer, model, config.optimizer.lr)
    precision = Precision(config.hardware.precision, torch.device("cpu"), 1.0)
    inputs, found = inputs_of(task.loss, batch), list[StageCount]()
    for number, stage in enumerate(stages):
        trained = [parameter for parameter in stage.parameters() if parameter.requires_grad]
        leaves = tuple(t.detach().requires_grad_(number > 0 and t.requires_grad) for t in inputs)
        ledger = Ledger(block)
        with ledger:
            ledger.add(list(stage.parameters()), "parameters")
            ledger.add(list(stage.buffers()), "buffers")
            ledger.add(leaves, "batch")
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
                ledger.add(parameter.grad, "gradients")
            ledger.reset()
            with precision.autocast():
                output = stage(*leaves)
                inputs = ends = as_inputs(output)
                if number == len(stages) - 1:
                    ends = (ask(task.loss, Answer(lambda: output, training=True), batch).total.float(),)  # noqa: B023
            held = ledger.live["activations"]
            wanted = [tensor for tensor in ends if tensor.requires_grad]
            if wanted:
                torch.autograd.backward(wanted, [torch.ones_like(tensor) for tensor in wanted])
            most, work = ledger.peak["activations"], ledger.work
            with ledger.counting("optimizer"):
                optimizer.step()
        state = {str(kind): ledger.live[kind] for kind in _STATE}
        cost = sum(operator.flops + operator.moved for operator in work)
        found.append(StageCount(state, _bytes(leaves), _bytes(inputs), held, most, cost))
        for parameter in trained:  # else the next stage's step would step it again
            parameter.grad = None
    return found


def _bytes(tensors: Inputs) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def pipeline_memory(
    stages: Sequence[StageCount],
    bounds: Sequence[int],
    batch_size: int,
    *,
    batch: Any,
    schedule: str,
    micro_batches: int,
    on_gpu: bool,
) -> list[Estimate]:
    """The memory of each device of a pipeline.

    A device holds the activations of ``micro_batches`` at once (``gpipe``), or of at most as many as there are devices
    from it on (``1f1b``). What it sends, outputs to the next device and gradients to the one before, is kept until the
    end of the step. The first device and the last one have the micro-batch itself, too.

    Args:
        bounds: the first stage of each device, and behind the last one the number of stages.
        batch: a micro-batch.
    """
    devices, found = len(bounds) - 1, []
    whole = sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    for place, (start, stop) in enumerate(pairwise(bounds)):
        own = stages[start:stop]
        at_once = micro_batches if schedule == "gpipe" else min(micro_batches, devices - place)
        kinds: dict[str, float] = {kind: sum(stage.state[kind] for stage in own) for kind in _STATE}
        is_first, is_last = place == 0, place == devices - 1
        kinds["batch"] = whole if is_first or is_last else 0.0
        held, passing = sum(stage.held for stage in own), max(stage.most - stage.held for stage in own)
        kinds["activations"] = at_once * held + passing
        received = 0 if is_first else (at_once + micro_batches) * own[0].received  # and as large a gradient each
        sent = 0 if is_last else (micro_batches - at_once) * own[-1].sent
        kinds["messages"] = received + sent
        found.append(on_device("pipeline", devices, batch_size, kinds, on_gpu=on_gpu))
    return found
