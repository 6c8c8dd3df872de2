"""``strategy: single``: forward and backward in one process; and what strategies with several ranks add to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep._compat.torch import backward
from lockstep.config import RunConfig
from lockstep.data.reader import Unreadable
from lockstep.data.requests import Window
from lockstep.engine.diagnostics.ablation import Watched
from lockstep.engine.distributed.buffers import Buffers
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.distributed.staging import SideStream, to_device, wait
from lockstep.engine.distributed.sync_batchnorm import ghost
from lockstep.engine.strategies.base import (
    CheckedLoss,
    Flags,
    Reduced,
    Replica,
    SeededDraws,
    Strategy,
    without_count,
)
from lockstep.engine.task import Task
from lockstep.engine.trained import bare
from lockstep.errors import UnsupportedError
from lockstep.planning import Plan


def build(replica: Replica, config: RunConfig, plan: Plan) -> Strategy:
    """The strategy of one process."""
    return SingleStrategy(replica)


class SingleStrategy:
    """One process. Also the arithmetic that the others build on."""

    is_sharded = False

    def __init__(self, replica: Replica) -> None:
        self.module, device = replica.module, replica.device
        self._task = replica.task
        self._ask = CheckedLoss(replica.task, replica.loss_mode)
        self._watching = replica.task.watching if isinstance(replica.task, Watched) else nullcontext
        self._model = bare(self.module) if replica.forward is None else replica.forward
        self._wrapped = self._model is not bare(self.module)
        self._parameters = list(self.module.parameters())
        self._follow()
        self._precision = replica.precision
        self._device = device
        self._moves = device.type != "cpu"
        self._side = SideStream(device) if device.type == "cuda" else None
        self._graphs = replica.compiled and self._side is not None
        self.draws = SeededDraws(replica.seed, [device], everything=False)
        self._rank = replica.rank
        self._buffers = Buffers(self.module, device)

    def gradients(self, window: Window, batches: Iterator[Any], step: int, flags: Flags) -> Reduced:
        self._begin()
        total, count = self._run(window, batches, step)
        return Reduced(total, count, 1.0, flags)

    def check_buffers(self) -> None:
        self._buffers.check()

    def evaluating(self, task: Task) -> Task:
        return task

    @property
    def compiled(self) -> nn.Module | None:
        # On a CPU to compile for evaluation, too, takes longer than it saves.
        return self._model if self._graphs else None

    def whole(self, state: dict[str, Any], collectives: Collectives, *, keep: bool) -> dict[str, Any]:
        return state

    def _begin(self) -> None:
        """Before a step: adapt to parameters that were frozen or unfrozen since the one before, clear gradients."""
        if [parameter.requires_grad for parameter in self._parameters] != self._requires_grad:
            self._clear()
            self._adapt()
        self._clear()
        self._buffers.begin()

    def _follow(self) -> None:
        """Take note of the parameters that are trained now."""
        self._requires_grad = [parameter.requires_grad for parameter in self._parameters]
        self._trained = [parameter for parameter in self._parameters if parameter.requires_grad]

    def _adapt(self) -> None:
        """Train the parameters that require a gradient now. Collective."""
        self._follow()

    def _refuse_change(self, strategy: str) -> None:
        named = zip(self.module.named_parameters(), self._requires_grad, strict=True)
        name = next(name for (name, parameter), before in named if parameter.requires_grad != before)
        raise UnsupportedError(
            f"strategy {strategy} cannot freeze or unfreeze parameters during training, as {name}",
            why="they are divided among the ranks as they were at the start",
            fix="call requires_grad_() in the task's model(), or use --strategy ddp",
        )

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _run(self, window: Window, batches: Iterator[Any], step: int) -> tuple[Tensor, Tensor | float]:
        """Forward and backward of every micro-batch; local sums."""
        totals: Tensor | None = None
        counts: Tensor | float = 0.0
        for place, _ in enumerate(window.requests):
            total, count = self._forward_pass(
                next(batches), step, self._rank if place == 0 else self._rank + (place << 16)
            )
            self._backward(total)
            # A new tensor: a CUDA graph writes the next total to the same memory.
            totals = total.detach().clone() if totals is None else totals + total.detach()
            self._keep_gradients(more=place + 1 < len(window.requests))
            counts = counts + (count.detach() if isinstance(count, Tensor) else count)
        assert totals is not None, "a single process always has samples"
        return totals, counts

    def _keep_gradients(self, *, more: bool) -> None:
        """Before the next micro-batch: gradients of a CUDA graph are in its memory, which it will write to again."""
        if more and self._graphs:
            for parameter in self._trained:
                parameter.grad = None if parameter.grad is None else parameter.grad.clone()

    def _arrived(self, batch: Any) -> Any:
        """``batch`` on the device."""
        if self._side is not None:
            return self._side(batch)
        return to_device(batch, self._device) if self._moves else batch

    def _forward_pass(self, batch: Any, step: int, part: int) -> tuple[Tensor, Tensor | int]:
        if isinstance(batch, Unreadable):
            with ghost(self.module), self._buffers.untouched():
                return without_count(self._forward_pass(batch.stand_in, step, part))
        batch = self._arrived(batch)
        self._buffers.rewind()
        self.draws(step, part)
        return self._computed(batch)

    def _computed(self, batch: Any) -> tuple[Tensor, Tensor | int]:
        """The loss of a batch that is there, with what it draws."""
        if self._precision.is_full:
            return self._loss(batch)
        with self._precision.autocast():
            total, count = self._loss(batch)
        return total.float(), count

    def _loss(self, batch: Any) -> tuple[Tensor, Tensor | int]:
        return self._ask(self._model, batch)

    def _backward(self, total: Tensor) -> None:
        seed = self._precision.seed()
        if total.dtype != seed.dtype:
            seed = seed.to(total.dtype)
        if self._wrapped or type(total) is not Tensor:
            total.backward(seed)
        else:
            backward(total, seed)


class RanksStrategy(SingleStrategy):
    """One process a rank: what there is to do besides reducing gradients."""

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        self._buffers = Buffers(replica.module, replica.device, "ranks")

    def gradients(self, window: Window, batches: Iterator[Any], step: int, flags: Flags) -> Reduced:
        self._begin()
        reduced = self._reduced_gradients(window, batches, step, flags)
        self._buffers.end(window)
        return reduced

    def _reduced_gradients(self, window: Window, batches: Iterator[Any], step: int, flags: Flags) -> Reduced:
        raise NotImplementedError

    def _leave_out(self, used: Sequence[bool]) -> None:
        """Remove zeros that were filled in for parameters without a gradient on any rank. Collective.

        An optimizer leaves parameters without a gradient alone; it would decay those whose gradient is zero.

        Args:
            used: whether each trained parameter has a gradient of this rank.
        """
        anywhere = torch.tensor(used, dtype=torch.float32, device=self._device)
        wait(dist.all_reduce(anywhere, async_op=True))
        if not all(used):
            for parameter, number in zip(self._trained, anywhere.tolist(), strict=True):
                parameter.grad = parameter.grad if number else None

    def _ghost(self, batch: Any) -> None:
        """Join the collective forward of ranks that have samples; leave no trace in gradients and buffers."""
        kept = [parameter.grad for parameter in self._parameters]
        self._clear()
        with ghost(self.module), self._buffers.untouched():
            total, _ = self._forward_pass(batch, 0, 0)
            self._backward(total)
        for parameter, gradient in zip(self._parameters, kept, strict=True):
            parameter.grad = gradient
