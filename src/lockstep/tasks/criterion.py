"""A sum and a count from the value of a criterion, which may be a mean over anything: ``lockstep.fit(loss=…)``.

What a mean was divided by is in its graph: class weights, ignored targets and masks are counted as the criterion does.
On its first batch the result and its gradient are compared with those of parts of the batch, which ranks have.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lockstep._compat.torch import tree_leaves, tree_map
from lockstep.engine.generators import generators_kept
from lockstep.engine.task import Loss
from lockstep.engine.trained import Term, terms_of
from lockstep.errors import TaskError

#: What to multiply a value with: the divisor of its term of that number, the rows of the batch, or nothing.
_Form = int | Literal["rows", "sum"]
#: Parts of a batch that are compared with the whole.
_PARTS = 8


class Counted:
    """Sums and counts from the values of one criterion."""

    def __init__(self) -> None:
        self._form: _Form | None = None
        #: Of a criterion that takes the model: what each weighed term was divided by, for each row.
        self._ratios: list[float] | None = None

    def of_output(self, criterion: Callable[..., Any], output: Any, target: Any) -> Loss:
        """The loss of a batch. Raises :class:`TaskError` where no count makes the criterion a sum over rows."""
        is_training = torch.is_grad_enabled()
        with torch.enable_grad():  # the graph shows what a mean was divided by, in evaluations as well
            value = criterion(output if is_training else _with_gradient(output), target)
            loss = _given(value, target)
            if loss is None:
                rows = rows_of(target)
                if self._form is None:
                    self._form = _compared(criterion, output, target, value)
                form = self._form
                loss = _sum(value, rows, _unchecked_form(criterion, value, rows) if form is None else form)
                if not isinstance(loss.count, Tensor) and not loss.count:  # 0 / 0, whose gradient is not a number
                    loss = Loss(_zero(output), 0)
        return loss if is_training else Loss(loss.total.detach(), loss.count)

    def of_batch(self, criterion: Callable[..., Any], model: nn.Module, batch: Any) -> Loss:
        """As :meth:`of_output`, for a criterion that calls the model: it has one count for each row, or is refused."""
        value = criterion(model, batch)
        loss = _given(value, batch)
        if loss is not None:
            return loss
        rows = rows_of(batch)
        terms = [term for term in terms_of(value, rows) if term.items is not None]
        ratios = [float(term.items) / rows for term in terms if term.items is not None and term.is_weighed]
        self._ratios = ratios if self._ratios is None and terms else self._ratios
        is_mean_of_rows = not terms or any(_is_multiple(term, rows) for term in terms)
        is_sum = getattr(criterion, "reduction", "mean") == "sum"
        if not is_sum and _is_sum(value, rows):
            raise _not_of_rows("the loss is a sum, of which the count is not known")
        if not is_mean_of_rows or any(ratio % 1 for ratio in ratios) or (terms and ratios != self._ratios):
            raise _not_of_rows("the loss is a mean over something else than the samples of a batch")
        return _sum(value, rows, "sum" if is_sum else "rows")


def _given(value: Any, batch: Any) -> Loss | None:
    """The sum and count that a criterion has returned itself, or as one value per sample; ``None``: one value."""
    if isinstance(value, tuple):
        return Loss(*value)
    samples = _samples(batch)
    if samples is None or not isinstance(value, Tensor) or (value.dim() and value.numel() != samples):
        raise TaskError(
            f"the loss returned {described(value)} for a batch of {samples or 'an unknown number of'} samples",
            fix="return the mean over the samples, a value per sample, or lockstep.Loss(sum, count)",
        )
    return Loss(value, samples) if value.dim() else None


def _sum(value: Tensor, rows: int, form: _Form) -> Loss:
    """The sum and the count that ``value`` stands for."""
    value = value.float() if value.itemsize < 4 else value
    if form == "sum":
        return Loss(value, rows)
    if form == "rows":
        return Loss(value * rows, rows)
    items = next((term.items for term in terms_of(value, rows)[form : form + 1]), None)
    if items is None and not value.item():  # what a criterion returns where nothing is to be counted
        return Loss(value, 0)
    if items is None:
        raise _not_of_rows(
            "the graph of the loss does not show what its mean was divided by, as under training.compile_loss"
        )
    if isinstance(items, Tensor):  # where torch's losses count nothing, they are 0 / 0, with gradients of 0
        value = torch.where(items > 0, value, 0.0)
    return Loss(value * items, items)  # type: ignore[arg-type]


def _unchecked_form(criterion: Callable[..., Any], value: Tensor, rows: int) -> _Form:
    """The form by the graph alone. Raises :class:`TaskError` where terms were divided by different numbers."""
    terms = terms_of(value, rows)
    if getattr(criterion, "reduction", None) == "sum" or _is_sum(value, rows):
        return "sum"
    numbers = [number for number, term in enumerate(terms) if term.items is not None]
    if len({float(terms[number].items or 0.0) for number in numbers}) == 1:
        return numbers[0]
    if all(_is_multiple(terms[number], rows) for number in numbers):
        return "rows"
    raise _not_of_rows("terms of the loss were divided by different numbers")


def _compared(criterion: Callable[..., Any], output: Any, target: Any, value: Tensor) -> _Form | None:
    """The form in which parts of the batch add up to the whole; ``None`` if they cannot be compared.

    Raises :class:`TaskError` where no form does.
    """
    rows = rows_of(target)
    size = max(min(2, rows - 1), math.ceil(rows / _PARTS))
    leaves = [leaf for leaf in tree_leaves((output, target)) if isinstance(leaf, Tensor) and leaf.dim()]
    if rows < 2 or any(len(leaf) != rows for leaf in leaves):
        return None
    parts = list[tuple[Tensor, int]]()
    outputs = list[list[Tensor]]()
    try:
        with generators_kept(), warnings.catch_warnings(action="ignore"):
            copied = copy.deepcopy(criterion) if isinstance(criterion, nn.Module) else criterion
            for part in (slice(None), *(slice(start, start + size) for start in range(0, rows, size))):
                targets, outputs_of_part = _rows(target, part), _with_gradient(_rows(output, part))
                parts.append((copied(outputs_of_part, targets), rows_of(targets)))
                leaves = [leaf for leaf in tree_leaves(outputs_of_part) if isinstance(leaf, Tensor)]
                outputs.append([leaf for leaf in leaves if leaf.requires_grad])
    except Exception:  # it needs the whole batch: the graph decides
        return None
    terms = [terms_of(one, number) for one, number in parts]
    divisors = _divisors(terms)
    candidates: dict[_Form, list[float]] = {**divisors, "rows": [float(number) for _, number in parts]}
    # A term's value may be 0 in the first batch, as of outputs that are 0: then its divisor alone shows what it adds.
    forms = [
        form for form, counts in candidates.items() if all(map(_is_proportional, divisors.values(), repeat(counts)))
    ]
    tolerance = 1e-4 if value.itemsize >= 4 else 3e-2
    if not _adds_up([value.item(), parts[0][0].item()], tolerance):  # it draws random numbers, or is not finite
        return None
    for form in (*forms, "sum"):
        losses = [_sum(one, number, form) for one, number in parts]
        totals = [loss.total.item() for loss in losses]
        if not all(map(math.isfinite, totals)):
            return None
        is_sum_of_parts = _adds_up(totals, tolerance) and _adds_up([float(loss.count) for loss in losses], tolerance)
        if is_sum_of_parts and _gradients_are_equal(losses, outputs, tolerance):
            return form
    raise _not_of_rows("the loss of a batch is not made of the losses of its samples")


def _divisors(terms: Sequence[Sequence[Term]]) -> dict[_Form, list[float]]:
    """What each term was divided by, in the whole batch and its parts, where all of them show it."""
    divisors: dict[_Form, list[float]] = {}
    if len({len(each) for each in terms}) == 1:
        for number, term in enumerate(zip(*terms, strict=True)):
            counts = [float(part.items) for part in term if part.items is not None]
            if len(counts) == len(term):
                divisors[number] = counts
    return divisors


def _is_proportional(numbers: list[float], others: list[float]) -> bool:
    scaled = zip(numbers, others, strict=True)
    return all(math.isclose(one * others[0], other * numbers[0], rel_tol=1e-5) for one, other in scaled)


def _gradients_are_equal(losses: Sequence[Loss], outputs: Sequence[list[Tensor]], tolerance: float) -> bool:
    """Whether the sum of the whole batch has the gradients of the sums of its parts."""
    whole, *parts = map(_gradients, losses, outputs)
    for gradient, *gradients_of_parts in zip(whole, *parts, strict=True):
        joined = torch.cat(gradients_of_parts) if gradient.dim() else torch.stack(gradients_of_parts).sum()
        if (joined - gradient).norm() > tolerance * gradient.norm():
            return False
    return True


def _gradients(loss: Loss, outputs: list[Tensor]) -> Sequence[Tensor]:
    if not loss.total.requires_grad:
        return [torch.zeros_like(output) for output in outputs]
    return torch.autograd.grad(loss.total, outputs, retain_graph=True, allow_unused=True, materialize_grads=True)


def _adds_up(whole_and_parts: list[float], tolerance: float) -> bool:
    whole, *parts = whole_and_parts
    return abs(whole - sum(parts)) <= tolerance * max(abs(whole), sum(map(abs, parts)))


def _is_sum(value: Tensor, rows: int) -> bool:
    """Whether the graph of ``value`` shows a sum of which nothing was divided."""
    terms = terms_of(value, rows)
    return bool(terms) and all(term.kind == "sum" for term in terms)


def _is_multiple(term: Term, rows: int) -> bool:
    """Whether the term was divided by one number for each row, such as its elements."""
    return term.items is not None and float(term.items) >= rows and float(term.items) % rows == 0


def _not_of_rows(what: str) -> TaskError:
    return TaskError(
        what,
        why="ranks and micro-batches have parts of a batch: their losses add up only as a sum and its count, the "
        "number of targets, or the sum of their weights, that a mean is divided by",
        fix="state both, for example:\n"
        'total = F.cross_entropy(output, target, weight=w, reduction="sum")\n'
        "return lockstep.Loss(total, w[target].sum())\n"
        "or, for a loss of a whole batch, which then depends on how batches are divided: "
        "lockstep.Loss(mean * len(target), len(target))",
    )


def _with_gradient(values: Any) -> Any:
    """``values`` outside the model's graph, with floating-point tensors that require a gradient."""
    return tree_map(
        lambda leaf: leaf.detach().requires_grad_() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf,
        values,
    )


def _zero(output: Any) -> Tensor:
    """0, whose gradients are 0."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return sum((leaf.sum().where(torch.tensor(False, device=leaf.device), 0.0) for leaf in leaves), torch.zeros(()))


def _rows(values: Any, part: slice) -> Any:
    return tree_map(lambda leaf: leaf[part] if isinstance(leaf, Tensor) and leaf.dim() else leaf, values)


def rows_of(batch: Any) -> int:
    """Samples of a batch that has some."""
    samples = _samples(batch)
    assert samples is not None
    return samples


def _samples(batch: Any) -> int | None:
    """Rows of the first tensor in ``batch``; ``None`` without one."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else None
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ()
    return next((rows for rows in map(_samples, values) if rows is not None), None)


def described(value: Any) -> str:
    """A value, in an error."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
