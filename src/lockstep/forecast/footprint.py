"""What one device holds and computes in a training step, counted without the device.

The task's own model, loss and optimizer run for two steps on tensors without memory (torch's FakeTensorMode); a model
that asks for a value on the way runs on real ones. The second step is counted: then the optimizer has its state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from lockstep._compat.fake_tensors import FakeTensorMode, replace_tensors, unset_fake_temporarily
from lockstep._compat.torch import BatchNorm, tree_leaves, tree_map
from lockstep.config import RunConfig
from lockstep.engine.inspection import blueprint
from lockstep.engine.optim.optimizers import build_optimizer
from lockstep.engine.optim.precision import Precision, cast
from lockstep.engine.process.runtime import seeded
from lockstep.engine.strategies.partition import blocks_of, checkpoint_activations
from lockstep.engine.strategies.stages import Answer, as_inputs, ask, inputs_of, stages_of
from lockstep.engine.task import Task
from lockstep.engine.trained import bare, build_model
from lockstep.errors import LockstepError, TaskError, UnsupportedError, many
from lockstep.forecast.allocation_tracker import Kind, Ledger, Work
from lockstep.hardware.host import usable_memory

Result = TypeVar("Result")

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Footprint:
    """Bytes of one device at its fullest, by kind, with a batch of ``batch_size`` samples.

    Attributes:
        kinds: parameters, buffers, gradients, optimizer, batch, activations (what operators made in between).
        gradients: bytes of each gradient, in the order in which the backward finishes them.
        blocks: bytes of the parameters of each part that fsdp would shard separately; last, the rest (may be 0).
        outputs: bytes of what the model returns to the loss.
        forward, backward, optimizer: the work of each part of the step.
        ready: of each gradient, how many operators of ``backward`` came before it was there.
        on: ``fake`` or ``real`` tensors.
    """

    batch_size: int
    kinds: dict[str, int]
    gradients: tuple[int, ...]
    blocks: tuple[int, ...]
    outputs: int
    on: str
    forward: Sequence[Work] = field(default=(), repr=False)
    backward: Sequence[Work] = field(default=(), repr=False)
    optimizer: Sequence[Work] = field(default=(), repr=False)
    ready: Sequence[int] = field(default=(), repr=False)


def count_step(
    task: Task,
    config: RunConfig,
    batch: Any,
    batch_size: int,
    *,
    keep_gradients: bool,
    block: int = 1,
    recompute: bool = False,
) -> Footprint:
    """Count a training step of ``task`` on ``batch``.

    Args:
        keep_gradients: gradients have a place of their own during the whole step, as in DDP's buckets and between
            micro-batches; without it they come into being as activations go.
        block: as for :class:`~lockstep.forecast.allocation_tracker.Ledger`.
        recompute: what is inside of fsdp's blocks is computed again in the backward pass.

    Raises:
        TaskError: the task cannot make a step. UnsupportedError: the step reads values, and is too large for real ones.
    """

    def count(batch: Any, fake: FakeTensorMode | None) -> Footprint:
        ledger = Ledger(block)
        arrived: list[tuple[Tensor, int]] = []
        outputs: list[int] = []

        def keep_gradient(parameter: Tensor) -> None:
            ledger.add(parameter.grad, "gradients")
            arrived.append((parameter, len(ledger.work)))

        with ledger:
            model = cast(model_of(task, fake), config.hardware.precision)
            ledger.add(list(model.parameters()), "parameters")
            ledger.add(list(model.buffers()), "buffers")
            ledger.add(batch, "batch")
            if recompute:
                checkpoint_activations(model, blocks_of(task, bare(model)))
            with ledger.counting("optimizer"):
                optimizer = task.optimizer(bare(model)) or build_optimizer(config.optimizer, model, config.optimizer.lr)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(keep_gradient)
            model.register_forward_hook(lambda _, __, output: outputs.append(bytes_of(output)))
            precision = Precision(config.hardware.precision, _CPU, 1.0)
            for _ in range(2):
                arrived.clear()
                outputs.clear()
                forward, backward, update = _step(ledger, task, model, optimizer, precision, batch, keep_gradients)
        return Footprint(
            batch_size,
            {str(kind): size for kind, size in ledger.peak.items()},
            tuple(parameter.nbytes for parameter, _ in arrived),
            tuple(_blocks(task, model)),
            sum(outputs),
            "real" if fake is None else "fake",
            forward,
            backward,
            update,
            tuple(place - len(forward) for _, place in arrived),
        )

    return counted(task, config, batch, batch_size, count)


def bytes_of(tree: Any) -> int:
    """Of the tensors in ``tree``."""
    return sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def counted(
    task: Task, config: RunConfig, batch: Any, batch_size: int, count: Callable[[Any, FakeTensorMode | None], Result]
) -> Result:
    """What ``count`` finds on tensors without memory like those of ``batch``, or where that fails on ``batch`` itself.

    Args:
        count: called with the batch and the mode of tensors without memory, if they are such.

    Raises:
        TaskError, UnsupportedError: as :func:`count_step`.
    """
    try:
        with seeded(config.training.seed), FakeTensorMode() as fake:
            shapes = tree_map(lambda leaf: fake.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, batch)
            return count(shapes, fake)
    except LockstepError:
        raise
    except Exception as error:  # a shape rule that torch lacks, a value that the model reads: whatever the task met
        _check_room(task, error)
    try:
        with seeded(config.training.seed):
            return count(batch, None)
    except LockstepError:
        raise
    except Exception as error:
        raise TaskError(
            f"the task {type(task).__name__} cannot make a step on {many(batch_size, 'sample')}",
            why=f"{type(error).__name__}: {error}",
            fix="see that it trains: `lockstep train … --fast-dev-run`",
        ) from error


def _check_room(task: Task, met: Exception) -> None:
    """Refuse a model whose parameters, gradients and two moments this machine has no memory for."""
    state = 4 * sum(p.nbytes for p in blueprint(task).parameters())
    _, free = usable_memory()
    if state > free:
        raise UnsupportedError(
            f"the step cannot be counted without memory, and needs {state / 1e9:.1f} GB for the model's state alone",
            why=f"{free / 1e9:.1f} GB are free here; on tensors without memory: {type(met).__name__}: {met}",
            fix="keep what reads values (.item(), .tolist(), branches on them) out of the loss and the model",
        )


def model_of(task: Task, fake: FakeTensorMode | None) -> nn.Module:
    """The model in training mode; with ``fake`` its tensors have shapes alone."""
    if fake is None:
        return build_model(task).train()
    with unset_fake_temporarily():
        model = blueprint(task)
    replace_tensors(model, lambda tensor: torch.empty_like(fake.from_tensor(tensor), device="cpu"))
    return model.train()


def _step(
    ledger: Ledger,
    task: Task,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    precision: Precision,
    batch: Any,
    keep_gradients: bool,
) -> tuple[Sequence[Work], Sequence[Work], Sequence[Work]]:
    """One step; the work of forward, backward and optimizer."""
    for parameter in model.parameters():
        if not keep_gradients:
            parameter.grad = None
        elif parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
            ledger.add(parameter.grad, "gradients")
    ledger.reset()
    with precision.autocast():
        total = task.loss(bare(model), batch).total.float()
    forward = len(ledger.work)
    total.backward()
    del total
    backward = len(ledger.work)
    with ledger.counting("optimizer"):
        optimizer.step()
    work = ledger.work
    return work[:forward], work[forward:backward], work[backward:]


STATE: tuple[Kind, ...] = ("parameters", "buffers", "gradients", "optimizer")


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
    """Count each stage of ``task`` on a micro-batch, alone, on what the stage before it returned.

    As in training (:mod:`lockstep.engine.strategies.pipeline`), for one micro-batch.

    Args:
        devices: the least number of stages.
        block: as for :class:`~lockstep.forecast.allocation_tracker.Ledger`.

    Raises:
        TaskError, ConfigError, UnsupportedError: the model cannot be cut so, or a step cannot be counted.
    """

    def count(batch: Any, fake: FakeTensorMode | None) -> list[StageCount]:
        model = model_of(task, fake)
        stages = stages_of(task, model, devices)
        optimizer = task.optimizer(model) or build_optimizer(config.optimizer, model, config.optimizer.lr)
        precision = Precision(config.hardware.precision, _CPU, 1.0)
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
            state = {str(kind): ledger.live[kind] for kind in STATE}
            cost = sum(operator.flops + operator.moved for operator in work)
            found.append(StageCount(state, bytes_of(leaves), bytes_of(inputs), held, most, cost))
            for parameter in trained:  # else the next stage's step would step it again
                parameter.grad = None
        return found

    return counted(task, config, batch, batch_size, count)


def _blocks(task: Task, model: nn.Module) -> list[int]:
    """Bytes of the blocks that fsdp gathers one by one; last, of the rest. What two share counts once."""
    seen: set[nn.Parameter] = set()
    sizes = []
    for part in (*blocks_of(task, bare(model)), model):
        fresh = set(part.parameters()) - seen
        sizes.append(sum(parameter.nbytes for parameter in fresh))
        seen |= fresh
    return sizes


def blocking_messages(task: Task, config: RunConfig) -> int:
    """Messages in a forward and backward that wait for all ranks: two for each BatchNorm that is synchronised."""
    if config.distributed.sync_batchnorm == "off":
        return 0
    return 2 * sum(isinstance(module, BatchNorm) for module in blueprint(task).modules())
