"""What one device holds and computes in a training step, counted without the device.

The task's own model, loss and optimizer run for two steps on tensors without memory (torch's FakeTensorMode); a model
that asks for a value on the way runs on real ones. The second step is counted: then the optimizer has its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lockstep._compat.fake_tensors import FakeTensorMode, replace_tensors, unset_fake_temporarily
from lockstep._compat.torch import BatchNorm, tree_leaves, tree_map
from lockstep.config import RunConfig
from lockstep.engine.inspection import blueprint
from lockstep.engine.optim.optimizers import build_optimizer
from lockstep.engine.optim.precision import Precision
from lockstep.engine.process.runtime import seeded
from lockstep.engine.strategies.partition import blocks_of, checkpoint_activations
from lockstep.engine.task import Task
from lockstep.engine.trained import bare, build_model
from lockstep.errors import LockstepError, TaskError, UnsupportedError
from lockstep.forecast.allocation_tracker import Ledger
from lockstep.forecast.roofline import Work, gpu_machine, seconds
from lockstep.forecast.scaling import Step
from lockstep.hardware.host import usable_memory

Result = TypeVar("Result")

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Footprint:
    """Bytes of one device at its fullest, by kind, with a batch of ``batch_size`` samples.

    Attributes:
        peak: their sum.
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

    @property
    def peak(self) -> int:
        return sum(self.kinds.values())


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
    how = (batch_size, keep_gradients, block, recompute)
    return counted(task, config, batch, batch_size, lambda shapes, fake: _count(task, config, shapes, *how, fake))


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
            f"the task {type(task).__name__} cannot make a step on {batch_size} sample(s)",
            why=f"{type(error).__name__}: {error}",
            fix="see that it trains: `lockstep train … --fast-dev-run`",
        ) from error


def _check_room(task: Task, met: Exception) -> None:
    """Refuse a model whose parameters, gradients and two moments this machine has no memory for."""
    state = 4 * sum(p.numel() * p.element_size() for p in blueprint(task).parameters())
    _, free = usable_memory()
    if state > free:
        raise UnsupportedError(
            f"the step cannot be counted without memory, and needs {state / 1e9:.1f} GB for the model's state alone",
            why=f"{free / 1e9:.1f} GB are free here; on tensors without memory: {type(met).__name__}: {met}",
            fix="keep what reads values (.item(), .tolist(), branches on them) out of the loss and the model",
        )


def _count(
    task: Task,
    config: RunConfig,
    batch: Any,
    batch_size: int,
    keep_gradients: bool,
    block: int,
    recompute: bool,
    fake: FakeTensorMode | None,
) -> Footprint:
    ledger = Ledger(block)
    with ledger:
        model = model_of(task, fake)
        ledger.add(list(model.parameters()), "parameters")
        ledger.add(list(model.buffers()), "buffers")
        ledger.add(batch, "batch")
        ledger.watch_gradients(model)
        if recompute:
            checkpoint_activations(model, blocks_of(task, bare(model)))
        with ledger.counting("optimizer"):
            optimizer = task.optimizer(bare(model)) or build_optimizer(config.optimizer, model, config.optimizer.lr)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        order: list[nn.Parameter] = []
        ready: list[int] = []

        def finished(parameter: nn.Parameter) -> None:
            order.append(parameter)
            ready.append(len(ledger.work))

        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(finished)
        outputs = [0]

        def returned(_: nn.Module, __: Any, output: Any) -> None:
            outputs[0] += sum(leaf.nbytes for leaf in tree_leaves(output) if isinstance(leaf, Tensor))

        model.register_forward_hook(returned)
        precision = Precision(config.hardware.precision, _CPU, 1.0)
        parts: list[Sequence[Work]] = []
        for _ in range(2):
            order.clear()
            ready.clear()
            outputs[0] = 0
            parts = list(_step(ledger, task, model, optimizer, precision, batch, trained, keep_gradients))
    sizes = [parameter.numel() * parameter.element_size() for parameter in order]
    return Footprint(
        batch_size,
        {str(kind): size for kind, size in ledger.peak.items()},
        tuple(sizes),
        tuple(_blocks(task, model)),
        outputs[0],
        "real" if fake is None else "fake",
        parts[0],
        parts[1],
        parts[2],
        tuple(place - len(parts[0]) for place in ready),
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
    trained: Sequence[nn.Parameter],
    keep_gradients: bool,
) -> Iterator[Sequence[Work]]:
    """One step; the work of forward, backward and optimizer."""
    for parameter in trained:
        if not keep_gradients:
            parameter.grad = None
        elif parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
            ledger.add(parameter.grad, "gradients")
    ledger.reset()
    with precision.autocast():
        total = task.loss(bare(model), batch).total.float()
    ends = [len(ledger.work)]
    total.backward()
    del total
    ends.append(len(ledger.work))
    with ledger.counting("optimizer"):
        optimizer.step()
    ends.append(len(ledger.work))
    for start, stop in zip([0, *ends], ends, strict=False):
        yield ledger.work[start:stop]


def _blocks(task: Task, model: nn.Module) -> list[int]:
    """Bytes of the blocks that fsdp gathers one by one; last, of the rest. What two share counts once."""
    seen: set[int] = set()
    return [_bytes_of(part, seen) for part in (*blocks_of(task, bare(model)), model)]


def _bytes_of(module: nn.Module, seen: set[int]) -> int:
    fresh = [parameter for parameter in module.parameters() if id(parameter) not in seen]
    seen.update(map(id, fresh))
    return sum(parameter.numel() * parameter.element_size() for parameter in fresh)


def blocking_messages(task: Task, config: RunConfig) -> int:
    """Messages in a forward and backward that wait for all ranks: two for each BatchNorm that is synchronised."""
    if config.distributed.sync_batchnorm == "off":
        return 0
    return 2 * sum(isinstance(module, BatchNorm) for module in blueprint(task).modules())


def modelled_step(footprint: Footprint, gpu: str) -> tuple[Step, list[str]]:
    """A step on a GPU that is not here: the roofline of every operator that the task's own step starts."""
    slow, middle, fast = (gpu_machine(gpu, place) for place in range(3))
    parts = (footprint.forward, footprint.backward, footprint.optimizer)
    times = [[seconds(part, machine) for part in parts] for machine in (slow, middle, fast)]
    totals = [sum(row) for row in times]
    passed = [0.0, *accumulate(seconds([work], middle) for work in footprint.backward)]
    step = Step(
        batch_size=footprint.batch_size,
        forward_s=times[1][0],
        backward_s=times[1][1],
        optimizer_s=times[1][2],
        gradients=footprint.gradients,
        ready=tuple(passed[place] / passed[-1] for place in footprint.ready),
        spread=(totals[0] / totals[2]) ** 0.5 - 1,
        blocks=footprint.blocks,
    )
    flops = sum(work.flops for part in parts for work in part)
    note = (
        f"the step is modelled, not measured: {len(footprint.forward) + len(footprint.backward)} operators, "
        f"{flops / 1e12:.3g} TFLOP, on {gpu} ({middle.source}) at {middle.flops / 1e12:.3g} TFLOP/s "
        f"({middle.half_flops / 1e12:.3g} in 16 bits), {middle.bandwidth / 1e9:.0f} GB/s and "
        f"{middle.launch_s * 1e6:.0f} µs a kernel; between the cautious and the good case lies a factor of "
        f"{totals[0] / totals[2]:.2g}"
    )
    return step, [note, "input is taken to keep up, and every GPU to be equally fast"]
