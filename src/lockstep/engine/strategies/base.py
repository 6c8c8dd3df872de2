"""How the gradient of one step is computed: which rank runs which micro-batch, and how sums are reduced.

After :meth:`Strategy.gradients` every rank has, in ``p.grad``, the same reduced sum of gradients (times
``precision.seed()``, over ``divisor``). :class:`Strategy` trains in one process; the others are derived from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lockstep._compat.torch import backward
from lockstep.data.order import dropout_seed
from lockstep.data.reader import GENERATORS, Unreadable
from lockstep.data.requests import BatchRequest, Window
from lockstep.engine.distributed.buffers import Buffers
from lockstep.engine.distributed.staging import arrival
from lockstep.engine.distributed.sync_batchnorm import ghost
from lockstep.engine.loss import CheckedLoss, without_count
from lockstep.engine.optim.precision import Precision
from lockstep.engine.strategies.reducers import Alone, Flags, Reduced, Reducer, announce_change
from lockstep.engine.task import Task
from lockstep.engine.trained import TrainedParameters, bare


class SeededDraws:
    """Seeds the generators of a forward pass before each micro-batch: dropout, stochastic depth, mixup in the loss.

    Each of ``devices`` draws separate numbers.
    """

    def __init__(self, seed: int, devices: Sequence[torch.device], *, purpose: str = "dropout") -> None:
        self._seed = seed
        self._purpose = purpose
        self._on_devices = list[tuple[torch.Generator, int]]()
        if any(device.type == "cuda" for device in devices):
            torch.cuda.init()
            self._on_devices = [
                (torch.cuda.default_generators[device.index or 0], number)
                for number, device in enumerate(dict.fromkeys(devices))
            ]

    def __call__(self, step: int, part: int) -> None:
        key = self.key(step, part)
        for host in GENERATORS:
            host.seed(key)
        for generator, number in self._on_devices:
            generator.manual_seed(self.key(step, part, number))

    def key(self, step: int, part: int, number: int = 0, purpose: str = "") -> int:
        """Return the seed of a micro-batch on the device with this ``number``."""
        return dropout_seed(self._seed, step, part, number, purpose or self._purpose)


class Passes:
    """The surroundings of a forward pass, of a task and of a session: the device, random draws, and buffers.

    Args:
        module: all modules that are trained.
        buffers: of ``module``.
        seed: of the draws.
        devices: that draw random numbers, the one of the batches first.
    """

    def __init__(self, module: nn.Module, buffers: Buffers, seed: int, devices: Sequence[torch.device]) -> None:
        self.module = module
        self.buffers = buffers
        self.draws = SeededDraws(seed, devices)
        #: Moves a batch to the device.
        self.arrive = arrival(devices[0])

    def begin(self, batch: Any, step: int, part: int) -> Any:
        """Begin the micro-batch ``part`` of a step, and return its ``batch`` on the device."""
        self.buffers.rewind()
        self.draws(step, part)
        return self.arrive(batch)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Let passes in the body join the collectives of ranks that have samples, without a trace in buffers."""
        with ghost(self.module), self.buffers.untouched():
            yield


class Replica(NamedTuple):
    """What one process trains. ``forward`` stands in for ``module`` in the task's loss: wrapped, or ``compiled``.

    ``loss_mode``: of ``torch.compile``, for the loss. ``devices``: that the forward uses, if not ``device`` alone.
    """

    task: Task
    module: nn.Module
    precision: Precision
    device: torch.device
    seed: int
    rank: int = 0
    forward: nn.Module | None = None
    compiled: bool = False
    loss_mode: str | None = None
    devices: tuple[torch.device, ...] = ()


class Strategy:
    """Forward and backward in one process; the interface of the loop, and the base of other strategies.

    Attributes:
        module: the model, with the modules beside it (:class:`.Trained`): saved, evaluated and optimized.
        divided_by: the strategy that has given each rank a part of the parameters, so that reading all is collective.
        passes: the surroundings of its forward passes.
        sums_in_half: whether the task has summed a loss in half precision.
        watching: makes the context for parts of a forward pass outside the task's loss.
    """

    sums_in_half = False
    watching: Callable[[], AbstractContextManager[Any]] = nullcontext
    divided_by: str | None = None
    #: The mode of :class:`Buffers`.
    _merges: Literal["alone", "ranks", "exact"] = "alone"

    def __init__(self, replica: Replica) -> None:
        self.module = replica.module
        self._device = replica.device
        self._rank = replica.rank
        self._ask = CheckedLoss(replica.task, replica.loss_mode)
        self._model = bare(self.module) if replica.forward is None else replica.forward
        self._trainable = TrainedParameters(dict(self.module.named_parameters()), self.divided_by)
        self._parameters = list(self.module.parameters())
        self._precision = replica.precision
        self._graphs = replica.compiled and self._device.type == "cuda"
        buffers = Buffers(self.module, self._device, self._merges)
        self.passes = Passes(self.module, buffers, replica.seed, replica.devices or (self._device,))
        self._follow()

    def gradients(self, window: Window, batches: Iterator[Any], step: int, flags: Flags) -> Reduced:
        """Compute and reduce the gradients of ``window``; ``batches``: of its requests, in order."""
        self._begin()
        reduced = self._reduced_gradients(window, batches, step, flags)
        self.passes.buffers.end(window)
        return reduced

    def evaluating(self, task: Task) -> Task:
        """Return ``task`` as evaluation must ask it."""
        return task

    @property
    def compiled(self) -> nn.Module | None:
        """What evaluation calls in place of the task's model; ``None``: the model."""
        # On a CPU to compile for evaluation, too, takes longer than it saves.
        return self._model if self._graphs else None

    def _begin(self) -> None:
        """Adapt to parameters that were frozen or unfrozen since the step before, and clear gradients."""
        if self._trainable.have_changed():
            self._clear()
            self._adapt()
        self._clear()
        self.passes.buffers.begin()

    def _follow(self) -> None:
        """Sum the gradients of the parameters that are trained now."""
        self._trainable.follow()
        self._trained = self._trainable.trained
        self._reducer = self._make_reducer()

    def _make_reducer(self) -> Reducer:
        return Alone()

    def _adapt(self) -> None:
        """Train the parameters that require a gradient now. Collective."""
        announce_change(self._reducer)
        self._follow()

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _reduced_gradients(self, window: Window, batches: Iterator[Any], step: int, flags: Flags) -> Reduced:
        """Forward and backward of every micro-batch, and what ranks then exchange."""
        self._reducer.begin(flags)
        for index, request in enumerate(window.requests):
            is_last = index == len(window.requests) - 1 and not window.irregular
            self._micro_batch(request, next(batches), step, index, is_last=is_last)
        return self._reducer.reduced(step)

    def _micro_batch(self, request: BatchRequest, batch: Any, step: int, index: int, *, is_last: bool) -> None:
        """Forward and backward of the request at ``index`` in a window; ``is_last``: every rank is at its last one."""
        if request.ghost:
            self._ghost(batch)
            return
        total, count = self._forward_pass(batch, step, self._rank + (index << 16))
        self._reducer.add(total, count, is_last=is_last)
        self._backward(total)
        self._keep_gradients(more=not is_last)

    def _ghost(self, batch: Any) -> None:
        """Join the collective forward of ranks that have samples; leave no trace in gradients and buffers."""
        gradients = [parameter.grad for parameter in self._parameters]
        self._clear()
        with self.passes.uncounted():
            total, _ = self._forward_pass(batch, 0, 0)
            self._backward(total)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def _keep_gradients(self, *, more: bool) -> None:
        """Copy gradients of a CUDA graph before the next micro-batch, which will write to their memory again."""
        if more and self._graphs:
            for parameter in self._trained:
                parameter.grad = None if parameter.grad is None else parameter.grad.clone()

    def _forward_pass(self, batch: Any, step: int, part: int) -> tuple[Tensor, Tensor | int]:
        if isinstance(batch, Unreadable):
            with self.passes.uncounted():
                return without_count(*self._forward_pass(batch.stand_in, step, part))
        return self._computed(self.passes.begin(batch, step, part))

    def _computed(self, batch: Any) -> tuple[Tensor, Tensor | int]:
        """Compute the loss of a batch on the device, with its random draws."""
        if self._precision.is_full:
            total, count = self._loss(batch)
        else:
            with self._precision.autocast():
                total, count = self._loss(batch)
        if total.itemsize < 4:
            self.sums_in_half = True
            total = total.float()
        return total, count

    def _loss(self, batch: Any) -> tuple[Tensor, Tensor | int]:
        return self._ask(self._model, batch)

    def _backward(self, total: Tensor) -> None:
        backward(total, self._precision.seed().to(total.dtype))


class Asked(nn.Module):
    """Calls a task's functions with a model, so that a wrapper sees every method that they call.

    ``trained`` has the parameters of modules beside ``model``.
    """

    def __init__(self, model: nn.Module, trained: nn.Module | None = None) -> None:
        super().__init__()
        self.model = model
        self.trained = trained

    def forward(self, function: Callable[..., Any], batch: Any) -> Any:
        return function(self.model, batch)


class RanksStrategy(Strategy):
    """One process a rank: changes of buffers are merged after every step."""

    _merges = "ranks"
