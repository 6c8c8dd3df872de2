"""How the gradient of one step is computed: which rank runs which micro-batch, and how sums are reduced.

The loop uses :class:`Strategy` only. After :meth:`Strategy.gradients` every rank has, in
``p.grad``, the same reduced sum of gradients (times ``precision.seed()``, over ``divisor``).
"""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from lockstep._compat.torch import saved
from lockstep.data.order import dropout_seed
from lockstep.data.reader import Unreadable
from lockstep.data.requests import Window
from lockstep.engine.distributed.collectives import Collectives
from lockstep.engine.optim.precision import Precision
from lockstep.engine.task import Loss, Task
from lockstep.errors import TaskError

_Kind = Literal["mean", "sum", "unknown"]
#: Operations that leave a mean a mean, and a sum a sum. Their names end in ``Backward`` and a number.
_KEEP = frozenset({"ToCopy", "Neg", "Rsub", "Alias", "Clone", "View", "ReshapeAlias", "UnsafeView", "Squeeze"})
_REDUCTIONS: dict[int, _Kind] = {1: "mean", 2: "sum"}
#: A deeper chain of additions is a loop over samples.
_DEPTH = 100


def is_mean(total: Tensor, count: float) -> bool:
    """Whether ``total`` averages over the ``count`` items that it should sum; false where that is not clear.

    Nothing is computed: a loss that is evaluated once more may draw random numbers, or count its calls.
    """
    if count <= 1 or total.grad_fn is None:
        return False
    terms = _terms(total.grad_fn, count)
    # A sum over items of each one's mean has as many terms as items.
    return len(terms) < count and "mean" in terms and "sum" not in terms


def _terms(node: Any, count: float, depth: int = 0) -> list[_Kind]:
    """How each term of the sum that ``node`` computes was reduced; terms without a gradient do not matter."""
    name = node.name().partition("Backward")[0]
    inputs = [before for before, _ in node.next_functions if before is not None]
    if depth > _DEPTH:
        return ["sum"]
    reduction = saved(node, "reduction")
    if reduction is not None:
        return [_REDUCTIONS.get(reduction, "unknown")]
    if name in ("Add", "Sub"):
        return [kind for one in inputs for kind in _terms(one, count, depth + 1)]
    if name == "Mean":
        summed = saved(inputs[0], "dim") if inputs[0].name().startswith("Sum") else None
        per_item = isinstance(summed, tuple) and 0 in summed
        over_items = math.prod(saved(node, "self_sym_sizes")) >= count and not per_item
        return ["mean" if over_items else "unknown"]
    if name == "Sum":
        return ["sum"]
    if len(inputs) != 1 or name not in ("Mul", "Div", *_KEEP):
        return ["unknown"]
    kinds = _terms(inputs[0], count, depth + 1)
    if name in _KEEP:
        return kinds
    factor = _constant(node)
    if name == "Div" and factor == count and kinds == ["sum"]:
        return ["mean"]
    shrinks = factor is not None and (abs(factor) <= 1 if name == "Mul" else abs(factor) >= 1)
    return kinds if shrinks and "sum" not in kinds else ["unknown"]


def _constant(node: Any) -> float | None:
    """The number that ``node`` multiplies with, or divides by."""
    for value in (saved(node, "other"), saved(node, "self")):
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
            return float(value)
    return None


#: On a GPU, reading the agreed flags costs a host sync; they are read every FLAG_INTERVAL steps.
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
    """How a step's gradients are computed and reduced.

    Attributes:
        module: what is saved, evaluated and optimized: the model, and modules beside it (:class:`.Trained`).
        is_sharded: each rank has a part of the parameters only, so that reading all is collective.
        draws: sets the random generators for each sample or micro-batch.
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

    @property
    def compiled(self) -> nn.Module | None:
        """What evaluation calls in place of the task's model; ``None``: the model."""
        ...

    def whole(self, state: dict[str, Any], collectives: Collectives, *, keep: bool) -> dict[str, Any]:
        """A checkpoint's content from the parts that ranks have, on ranks that ``keep`` it. Collective if sharded."""
        ...


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
    """A task's loss, checked on the first batch; a count may have the shape (1,).

    Args:
        mode: compiles the loss, with the model that it calls: a mode of ``torch.compile``.
    """

    def __init__(self, task: Task, mode: str | None = None) -> None:
        self._loss = task.loss if mode is None else torch.compile(task.loss, mode=mode)
        self._is_checked = False

    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        loss = self._loss(model, batch)
        if not self._is_checked:
            refuse_mean(check_loss(loss))
            self._is_checked = True
        if isinstance(loss[1], Tensor) and loss[1].dim():
            return Loss(loss[0], loss[1].reshape(()))
        return loss


def without_count(loss: tuple[Tensor, Tensor | int]) -> tuple[Tensor, Tensor | int]:
    """A loss of 0 for 0 items, with gradients of 0: of a batch that replaces one without readable samples."""
    total, count = loss
    total = total.where(torch.zeros_like(total, dtype=torch.bool), torch.zeros_like(total))
    return total, torch.zeros_like(count) if isinstance(count, Tensor) else 0


def stood_in(batch: Any, ask: Callable[..., Any]) -> tuple[Any, Callable[..., Any], bool]:
    """``batch`` and ``ask``, or what takes their place where ``batch`` has no readable sample; and whether it has."""
    if not isinstance(batch, Unreadable):
        return batch, ask, True
    return batch.stand_in, lambda *given: without_count(ask(*given)), False


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

    Each of ``devices`` draws separate numbers. To seed Python's and NumPy's generators takes 7 µs. Where
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
    """What one process trains. ``forward`` stands in for ``module`` in the task's loss: wrapped, or ``compiled``.

    ``loss_mode``: of ``torch.compile``, for the loss; see :class:`CheckedLoss`.
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
