"""How the gradient of one step comes about: who runs which micro-batch, and how sums are reduced.

The loop sees :class:`Strategy` and nothing below it. After :meth:`Strategy.gradients` every rank holds, in
``p.grad``, the same reduced sum of gradients (times ``precision.seed()``, over ``divisor``).
"""

from __future__ import annotations

import gc
import pickle
import random
from collections.abc import Iterator, Sequence
from inspect import signature
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep._compat.torch import backward, foreach_copy_
from lockstep.data.randomness import dropout_seed
from lockstep.data.requests import Window
from lockstep.engine.distributed.buffers import Buffers
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.distributed.staging import wait
from lockstep.engine.distributed.sync_batchnorm import ghost
from lockstep.engine.optim.precision import Precision
from lockstep.engine.process.prefetch import SideStream, to_device
from lockstep.engine.reduction import is_mean
from lockstep.engine.task import Loss, Task
from lockstep.engine.trained import bare
from lockstep.errors import TaskError, UnsupportedError

#: torch 2.13 renamed the argument.
_NO_BUFFER_BROADCAST: dict[str, Any] = {
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else "broadcast_buffers": False
}
#: On a GPU, reading the agreed flags costs a host sync; they are read every so many steps.
FLAG_INTERVAL = 16


class Flags(NamedTuple):
    """Requests that all ranks must agree on: they travel with the step's count, as sums over ranks.

    ``changed``: parameters were frozen or unfrozen since the step before.
    """

    stop: float = 0.0
    time_up: float = 0.0
    save: float = 0.0
    changed: float = 0.0


class Reduced(NamedTuple):
    """Sums over all ranks and micro-batches of a step. ``flags`` is ``None`` when they were not read."""

    total: Tensor
    count: Tensor | float  # type: ignore[assignment]  # hides tuple.count()
    divisor: float
    flags: Flags | None


class Strategy(Protocol):
    """``module`` is what is saved, evaluated and optimized: the model, and modules beside it (:class:`.Trained`).

    ``is_sharded``: each rank has a part of the parameters only, so that reading all is collective.
    """

    module: nn.Module
    is_sharded: bool
    draws: SeededDraws

    def gradients(self, window: Window, batches: Iterator[Any], step: int, flags: Flags) -> Reduced: ...

    def check_buffers(self) -> None:
        """Before buffers are saved or used in evaluation: ranks agree on them. Collective."""
        ...

    def evaluating(self, task: Task) -> Task:
        """``task`` as evaluation must ask it."""
        ...

    def whole(self, state: dict[str, Any], collectives: Collectives, *, keep: bool) -> dict[str, Any]:
        """A checkpoint's content from the parts that ranks have, on ranks that ``keep`` it. Collective if sharded."""
        ...


class LossModule(nn.Module):
    """``task.loss`` as a module, so that a wrapper around it sees every method of the model that the task calls.

    Args:
        trained: has all parameters, those of modules beside ``model`` among them.
    """

    def __init__(self, task: Task, model: nn.Module, trained: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.trained = trained
        self._loss = CheckedLoss(task)

    def forward(self, batch: Any) -> tuple[Tensor, Tensor | int]:
        total, count = self._loss(self.model, batch)
        return total, count


def check_loss(loss: Any) -> Loss:
    """What a task returned, as a :class:`Loss`.

    Raises:
        TaskError: it is a vector, a number, or not a pair.
    """
    fix = "return Loss(total, count): F.cross_entropy(…, reduction='sum') and the number of items"
    if not isinstance(loss, tuple) or len(loss) != 2:
        raise TaskError("the task's loss is not a sum and a count", why=f"it returned {type(loss).__name__}", fix=fix)
    total, count = loss
    if not isinstance(total, Tensor) or total.numel() != 1 or total.dim() != 0:
        why = f"its shape is {tuple(total.shape)}" if isinstance(total, Tensor) else f"it is a {type(total).__name__}"
        if isinstance(total, int | float):
            why, fix = f"{why}, which has no gradient, as after .item()", "return the tensor itself as the total"
        raise TaskError("the task's loss total is not a scalar tensor", why=why, fix=fix)
    if isinstance(count, Tensor) and count.numel() != 1:
        raise TaskError("the task's loss count is not one number", why=f"its shape is {tuple(count.shape)}", fix=fix)
    return Loss(total, count)


def refuse_mean(loss: Loss) -> None:
    """Raise :class:`TaskError` where the total is a mean over several items: gradients would be too small."""
    count = float(loss.count)
    if is_mean(loss.total, count):
        raise TaskError(
            f"the task's loss total is a mean, and its count is {count:g}",
            why=f"a total is divided by its count, so gradients would be 1/{count:g} of those of the mean",
            fix="use reduction='sum', or multiply: Loss(mean * count, count); a mean of equal weight for each "
            "micro-batch is Loss(mean, 1)",
        )


class CheckedLoss:
    """A task's loss, checked on the first batch; a count may have the shape (1,)."""

    def __init__(self, task: Task) -> None:
        self._loss = task.loss
        self._is_checked = False

    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        loss = self._loss(model, batch)
        if not self._is_checked:
            refuse_mean(check_loss(loss))
            self._is_checked = True
        if isinstance(loss[1], Tensor) and loss[1].dim():
            return Loss(loss[0], loss[1].reshape(()))
        return loss


def check_change(flags: Flags, ranks: int, *, announced: bool = False) -> Flags:
    """``flags``, summed over ``ranks``; ``announced``: this rank is one of those where parameters changed.

    Raises:
        TaskError: parameters were frozen or unfrozen on some ranks only.
    """
    if flags.changed != (ranks if announced else 0):
        raise TaskError(
            "parameters were frozen or unfrozen on some ranks only",
            why=f"requires_grad changed on {flags.changed:.0f} of {ranks} ranks before this step",
            fix="call requires_grad_() on every rank alike: hooks run on all of them",
        )
    return flags


class SeededDraws:
    """Seeds what a forward pass may draw from before each micro-batch: dropout, stochastic depth, mixup in the loss.

    Each of ``devices`` draws numbers of its own. To seed Python's and NumPy's generators takes 7 µs. Where
    ``everything`` is false, it is done only from the step on that follows the first one that drew from them; until
    then one number is drawn from each at the beginning of a step, so that their state depends on the step alone.
    """

    def __init__(
        self, seed: int, devices: Sequence[torch.device], *, everything: bool, purpose: str = "dropout"
    ) -> None:
        self._seed, self._purpose = seed, purpose
        self._everything = everything
        self._step = -1
        self._generators = [(torch.default_generator, 0)]
        if any(device.type == "cuda" for device in devices):
            torch.cuda.init()
            self._generators += [
                (torch.cuda.default_generators[device.index or 0], place)
                for place, device in enumerate(dict.fromkeys(devices))
            ]

    def __call__(self, step: int, part: int) -> None:
        for generator, place in self._generators:
            generator.manual_seed(dropout_seed(self._seed, step, part, place, self._purpose))
        if not self._everything and step > self._step:
            self._compare(step)
        if self._everything:
            key = dropout_seed(self._seed, step, part, 0, self._purpose)
            random.seed(key)
            np.random.seed(key % 2**32)

    @property
    def everything(self) -> bool:
        """Whether Python's and NumPy's generators are seeded in the next step; a checkpoint keeps it."""
        if not self._everything and self._step >= 0:
            here, there = (pickle.dumps(generator.get_state()) for generator in (np.random, self._numpy))
            self._everything = here != there or random.getstate() != self._python.getstate()
        return self._everything

    @everything.setter
    def everything(self, value: bool) -> None:
        self._everything = value

    def _compare(self, step: int) -> None:
        """Find out whether Python's or NumPy's generator has been drawn from since the step before."""
        if self._step < 0:
            self._step, key = 0, dropout_seed(self._seed, 0, 0, 0, "untouched")
            random.seed(key)
            np.random.seed(key % 2**32)
            self._python, self._numpy = random.Random(key), np.random.RandomState(key % 2**32)
        for _ in range(step - self._step):
            same = random.random() == self._python.random()
            if np.random.random_sample() != self._numpy.random_sample() or not same:
                self._everything = True
        self._step = step


class Replica(NamedTuple):
    """What one process trains. ``forward`` stands in for ``module`` in the task's loss: compiled, or wrapped."""

    task: Task
    module: nn.Module
    precision: Precision
    device: torch.device
    seed: int
    rank: int = 0
    forward: nn.Module | None = None


class SingleStrategy:
    """One process. Also the arithmetic that the others build on."""

    is_sharded = False

    def __init__(self, replica: Replica) -> None:
        self.module, device = replica.module, replica.device
        self._task = replica.task
        self._ask = CheckedLoss(replica.task)
        self._model = bare(self.module) if replica.forward is None else replica.forward
        self._wrapped = self._model is not bare(self.module)
        self._parameters = list(self.module.parameters())
        self._follow()
        self._precision = replica.precision
        self._device = device
        self._moves = device.type != "cpu"
        self._side = SideStream(device) if device.type == "cuda" else None
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
            totals = total.detach() if totals is None else totals + total.detach()
            counts = counts + (count.detach() if isinstance(count, Tensor) else count)
        assert totals is not None, "a single process always has samples"
        return totals, counts

    def _forward_pass(self, batch: Any, step: int, part: int) -> tuple[Tensor, Tensor | int]:
        if self._side is not None:
            batch = self._side(batch)
        elif self._moves:
            batch = to_device(batch, self._device)
        self._buffers.rewind()
        self.draws(step, part)
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


class DdpStrategy(RanksStrategy):
    """One process a rank; torch's DistributedDataParallel overlaps the reduction with the last backward.

    The count (and the flags) are reduced beside the backward. A window in which some rank has fewer
    micro-batches goes past DDP and is reduced by hand after the backward, on every rank alike.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        world_size: int,
        find_unused_parameters: bool = False,
        bucket_cap_mb: float | None = None,
    ) -> None:
        super().__init__(replica)
        self._settings: dict[str, Any] = {
            **_NO_BUFFER_BROADCAST,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": True,
            "bucket_cap_mb": bucket_cap_mb,
        }
        self._ddp = DistributedDataParallel(self._loss_module(), **self._settings)
        self._world_size = world_size
        self._sums = torch.zeros(2 + len(Flags._fields), dtype=torch.float64, device=replica.device)
        self._by_hand = False

    def _reduced_gradients(self, window: Window, batches: Iterator[Any], step: int, flags: Flags) -> Reduced:
        self._sums.zero_()
        if any(flags):
            self._sums[2:] = torch.tensor(flags, dtype=torch.float64)
        work: dist.Work | None = None
        self._by_hand = window.irregular
        for place, request in enumerate(window.requests):
            last = place == len(window.requests) - 1 and not window.irregular
            batch = next(batches)
            if request.ghost:
                self._ghost(batch)
                continue
            # What no_sync() does, without a context manager per micro-batch.
            self._ddp.require_backward_grad_sync = last
            total, count = self._forward_pass(batch, step, self._rank + (place << 16))
            self._sums[0] += total.detach()
            self._sums[1] += count
            if last:
                work = dist.all_reduce(self._sums, async_op=True)
            self._backward(total)
        if window.irregular:
            self._reduce_by_hand()
            work = dist.all_reduce(self._sums, async_op=True)
        wait(work)
        divisor = 1.0 if window.irregular else float(self._world_size)
        return Reduced(self._sums[0].clone(), self._sums[1].clone(), divisor, self._read_flags(step))

    def _loss_module(self) -> LossModule:
        return LossModule(self._task, self._model, self.module)

    def _adapt(self) -> None:
        self._sums.zero_()
        self._sums[2:] = torch.tensor(Flags(changed=1.0), dtype=torch.float64)
        wait(dist.all_reduce(self._sums, async_op=True))
        check_change(Flags(*self._sums[2:].tolist()), self._world_size, announced=True)
        super()._adapt()
        del self._ddp  # and the hooks that it has on parameters
        gc.collect()
        self._ddp = DistributedDataParallel(self._loss_module(), **self._settings, init_sync=False)

    def _loss(self, batch: Any) -> tuple[Tensor, Tensor | int]:
        if self._by_hand:
            # DDP's forward may itself be collective: once, after its first reduction, it rebuilds its buckets.
            return super()._loss(batch)
        loss: tuple[Tensor, Tensor | int] = self._ddp(batch)
        return loss

    def _read_flags(self, step: int) -> Flags | None:
        if self._device.type != "cpu" and step % FLAG_INTERVAL:
            return None
        return check_change(Flags(*self._sums[2:].tolist()), self._world_size)

    def _reduce_by_hand(self) -> None:
        parameters = self._trained
        used = [p.grad is not None for p in parameters]
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        for dtype in {p.dtype for p in parameters}:
            gradients = [p.grad for p in parameters if p.dtype == dtype and p.grad is not None]
            flat = torch.cat([g.reshape(-1) for g in gradients])
            wait(dist.all_reduce(flat, async_op=True))
            pieces = flat.split([g.numel() for g in gradients])
            foreach_copy_(gradients, [piece.view_as(g) for piece, g in zip(pieces, gradients, strict=True)])
        self._leave_out(used)
