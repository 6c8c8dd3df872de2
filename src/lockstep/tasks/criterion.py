"""A sum and a count from the value of a criterion, which may be a mean over anything: ``lockstep.fit(loss=…)``.

The divisor of a mean is read from its graph: class weights, ignored targets and masks count as in the criterion.
On several batches the result is compared with those of parts of the batch, which ranks have.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import set_stance

from lockstep._compat.torch import tree_leaves, tree_map
from lockstep.engine.ablation import separate_rows
from lockstep.engine.generators import generators_kept
from lockstep.engine.loss import Term, terms_of
from lockstep.engine.task import Loss
from lockstep.errors import TaskError

#: Factor of a value: the divisor of its term of that number, the rows of the batch, or nothing.
_Form = int | Literal["rows", "sum"]
#: From callables and rows of a batch: the value of the criterion, and the outputs of the model that it depends on.
_Evaluate = Callable[..., tuple[Any, list[Tensor]]]
#: Parts of a batch that are compared with the whole: rather many; or two unequal ones, which are rather never empty.
_PARTS = (8.0, 1.6)
#: Of a model whose ranks call it equally often.
_HALVES = (2.0,)
#: Batches that are compared: these first ones, and those with a power of two as their number.
_FIRST_BATCHES = 4


class Counted:
    """Sums and counts from the values of one criterion."""

    def __init__(self) -> None:
        self._form: _Form | None = None
        self._batches = 0
        self._gives_counts = False
        #: Generators for which batches are not compared with their parts.
        self._draws: set[str] = set()
        self._has_warned = False

    def of_output(self, criterion: Callable[..., Any], output: Any, target: Any) -> Loss:
        """Return the loss of a batch. Raises :class:`TaskError` where no count makes the criterion a sum over rows."""
        is_training = torch.is_grad_enabled()
        with torch.enable_grad():  # the graph shows the divisor of a mean, in evaluations as well
            value = criterion(output if is_training else _with_gradient(output), target)
            loss = _given(value, target)
            if loss is None:
                if self._is_due():

                    def of_part(criterion: Any, outputs: Any, targets: Any) -> tuple[Any, list[Tensor]]:
                        outputs = _with_gradient(outputs)
                        leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
                        return criterion(outputs, targets), [leaf for leaf in leaves if leaf.requires_grad]

                    parts = _Parts(of_part, (criterion,), (output, target), rows_of(target), 1e-4)
                    self._compare(parts, _PARTS)
                loss = self._sum(criterion, value, rows_of(target))
                if not isinstance(loss.count, Tensor) and not loss.count:  # 0 / 0, whose gradient is not a number
                    loss = Loss(_zero(output), 0)
        return loss if is_training else Loss(loss.total.detach(), loss.count)

    def of_batch(self, criterion: Callable[..., Any], model: nn.Module, batch: Any) -> Loss:
        """Return the loss as :meth:`of_output` does, for a criterion that calls the model."""
        is_training = torch.is_grad_enabled()
        if not self._gives_counts and _samples(batch) and self._is_due():
            device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))

            def of_part(criterion: Any, model: nn.Module, part: Any) -> tuple[Any, list[Tensor]]:
                return criterion(model, part), []

            with torch.autocast(device.type, enabled=False), torch.enable_grad():
                parts = _Parts(of_part, (criterion, model), (batch,), rows_of(batch), 1e-3)
                self._compare(parts, _parts_of(model))
        with torch.set_grad_enabled(is_training or self._form not in ("rows", "sum")):
            value = criterion(model, batch)
            loss = _given(value, batch)
            self._gives_counts = loss is not None
            if loss is None:
                loss = self._sum(criterion, value, rows_of(batch), refuses_sums=True)
        return loss if is_training else Loss(loss.total.detach(), loss.count)

    def _is_due(self) -> bool:
        """Return whether this batch is compared with its parts."""
        if torch.compiler.is_compiling():  # training.compile_loss
            return self._form is None
        self._batches += 1
        return self._batches <= _FIRST_BATCHES or self._batches.bit_count() == 1

    def _compare(self, batch: _Parts, numbers: Sequence[float]) -> None:
        """Compare a batch with its parts, of which there are about as many as one of ``numbers``.

        Raises :class:`TaskError`: its parts do not add up.
        """
        for number in numbers if batch.are_rows else ():
            forms = batch.forms(number)
            if forms is None:
                continue
            if self._form is None:
                self._form = forms[0]
            elif self._form not in forms:
                raise _not_of_rows("the loss of this batch is not made of the losses of its samples, as before")
            return
        self._draws |= batch.draws

    def _sum(self, criterion: Callable[..., Any], value: Tensor, rows: int, *, refuses_sums: bool = False) -> Loss:
        terms = terms_of(value, rows)
        form = self._form
        is_sum = getattr(criterion, "reduction", None) == "sum"
        if form is None:
            form = "sum" if is_sum else _unchecked_form(terms, rows, self._draws)
            if self._draws and not is_sum and not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"the loss draws from {_listed(self._draws)}, so its batches are not compared with their parts: it "
                    "is taken for the mean that its graph shows. lockstep.Loss(total, count) states sum and count",
                    stacklevel=2,
                )
        if form == "sum" and refuses_sums and not is_sum:
            raise _not_of_rows("the loss is a sum, of which the count is not known")
        return _sum(value, terms, rows, form)


def _given(value: Any, batch: Any) -> Loss | None:
    """Return a sum and count that a criterion returned, or made of its value per sample; ``None``: one value."""
    if isinstance(value, Loss):
        return value
    samples = _samples(batch)
    if samples is None or not isinstance(value, Tensor) or (value.dim() and value.numel() != samples):
        raise TaskError(
            f"the loss returned {described(value)} for a batch of {samples or 'an unknown number of'} samples",
            fix="return the mean over the samples, a value per sample, or lockstep.Loss(sum, count)",
        )
    return Loss(value, samples) if value.dim() else None


def _sum(value: Tensor, terms: Sequence[Term], rows: int, form: _Form) -> Loss:
    """Return the sum and the count that ``value`` stands for."""
    value = value.float() if value.itemsize < 4 else value
    if form == "sum":
        return Loss(value, rows)
    if form == "rows":
        return Loss(value * rows, rows)
    term = terms[form] if form < len(terms) else Term("unknown")
    items = term.items
    may_be_empty = items is None or (term.is_weighed and isinstance(items, float) and items == 1)
    if may_be_empty and not value.item():  # a criterion that counted nothing: sum / mask.sum().clamp(min=1)
        return Loss(value, 0)
    if items is None:
        raise _not_of_rows(
            "the graph of the loss does not show the divisor of its mean, as under training.compile_loss"
        )
    if isinstance(items, Tensor) or not items:  # where torch's losses count nothing, they are 0 / 0
        value = torch.where(torch.as_tensor(items > 0, device=value.device), value, 0.0)
    return Loss(value * items, items)  # type: ignore[arg-type]


def _unchecked_form(terms: Sequence[Term], rows: int, draws: set[str]) -> _Form:
    """Find the form by the graph alone. Raises :class:`TaskError`: it shows none, or terms differ in divisors."""
    if terms and all(term.kind == "sum" for term in terms):
        return "sum"
    numbers = [number for number, term in enumerate(terms) if term.items is not None]
    if draws and len(numbers) < len(terms):
        raise _not_of_rows(f"the loss draws from {_listed(draws)}, and its graph does not show the divisor of its mean")
    if len({float(terms[number].items or 0.0) for number in numbers}) == 1:
        return numbers[0]
    if all(_is_multiple(terms[number], rows) for number in numbers):
        return "rows"
    raise _not_of_rows("terms of the loss were divided by different numbers")


def _listed(draws: set[str]) -> str:
    return " and ".join(sorted(draws))


class _Part(NamedTuple):
    """The value of some rows, its terms, and the outputs that its gradients are compared for."""

    value: Tensor
    terms: list[Term]
    rows: int
    outputs: list[Tensor]


class _Parts:
    """A batch of ``rows`` that is compared with its parts.

    Args:
        evaluate: called with ``callables`` and some rows of ``values``; see :data:`_Evaluate`.

    Attributes:
        draws: generators of which rows have other random numbers in parts than in the whole batch.
    """

    def __init__(
        self,
        evaluate: _Evaluate,
        callables: tuple[Any, ...],
        values: tuple[Any, ...],
        rows: int,
        tolerance: float,
    ) -> None:
        self._evaluate = evaluate
        self._callables = callables
        self._values = values
        self._rows = rows
        leaves = tree_leaves(values)
        self.are_rows = all(isinstance(leaf, Tensor) and (not leaf.dim() or len(leaf) == rows) for leaf in leaves)
        is_half = self.are_rows and any(leaf.is_floating_point() and leaf.itemsize < 4 for leaf in leaves)
        self._tolerance = 3e-2 if is_half else tolerance
        self.draws: set[str] = set()

    def forms(self, number: float) -> list[_Form] | None:
        """Return the forms in which about ``number`` parts add up to the whole; ``None`` if they cannot be compared.

        Raises :class:`TaskError`: no form does.
        """
        rows = self._rows
        size = max(min(2, rows - 1), math.ceil(rows / number))
        starts = range(0, rows, size) if rows > 1 else (0, 0)
        whole, again = self._parts([slice(None), slice(None)], restarts=True)
        # First as if numbers were drawn for a batch, then as if row by row.
        for restarts in (True, False):
            parts = self._parts([slice(start, start + size) for start in starts], restarts=restarts)
            if rows < 2 or whole is None or again is None or None in parts:  # it needs the whole batch
                return None
            if whole.value.dim() or not math.isfinite(whole.value.item()):
                return None
            is_repeated = _adds_up([again.value.item(), whole.value.item()], self._tolerance)
            forms = _fitting_forms([whole, *filter(None, parts)], self._tolerance) if is_repeated else []
            if forms is None or forms:
                self.draws.clear()
                return forms
            if not is_repeated:
                self.draws.add("other generators")
            if not self.draws:
                raise _not_of_rows("the loss of a batch is not made of the losses of its samples")
        return None

    def _parts(self, slices: Sequence[slice], *, restarts: bool) -> list[_Part | None]:
        """Evaluate some rows after the others; ``restarts``: each with the same state of the generators."""
        with generators_kept(), warnings.catch_warnings(action="ignore"):
            return [self._part(rows, generators_kept() if restarts else nullcontext()) for rows in slices]

    def _part(self, rows: slice, generators: AbstractContextManager[None]) -> _Part | None:
        """Evaluate some rows; ``None`` after an error: the next rows are evaluated even so, as on other ranks."""
        callables = [each if isinstance(each, nn.Module) else _copied(each) for each in self._callables]
        modules = [each for each in callables if isinstance(each, nn.Module)]
        eager = nullcontext() if torch.compiler.is_compiling() else set_stance("force_eager")
        try:
            with generators, eager, separate_rows(self.draws, *modules):
                value, outputs = self._evaluate(*callables, *_rows(self._values, rows))
        except Exception:
            return None
        if not isinstance(value, Tensor):  # a sum and its count
            return None
        number = len(range(*rows.indices(self._rows)))
        return _Part(value if outputs else value.detach(), terms_of(value, number), number, outputs)


def _copied(criterion: Any) -> Any:
    """Copy a criterion whose state the comparison would change; modules in it are shared."""
    owner = getattr(criterion, "__self__", criterion)  # of a method
    parts = (owner, *getattr(owner, "__dict__", {}).values())
    try:
        return copy.deepcopy(criterion, {id(part): part for part in parts if isinstance(part, nn.Module)})
    except Exception:  # whatever an object of the user's raises
        return criterion


def _fitting_forms(parts: Sequence[_Part], tolerance: float) -> list[_Form] | None:
    """Return the forms in which the other parts add up to the first one; ``None``: they have infinite losses."""
    divisors = _divisors([part.terms for part in parts])
    candidates: dict[_Form, list[float]] = {**divisors, "rows": [float(part.rows) for part in parts]}
    # A term's value may be 0 in a batch, as of outputs that are 0: then its divisor alone shows its share.
    forms = [
        form for form, counts in candidates.items() if all(map(_is_proportional, divisors.values(), repeat(counts)))
    ]
    fitting_forms = list[_Form]()
    for form in (*forms, "sum"):
        losses = [_sum(part.value, part.terms, part.rows, form) for part in parts]
        totals = [loss.total.item() for loss in losses]
        if not all(map(math.isfinite, totals)):
            return None
        is_sum_of_parts = _adds_up(totals, tolerance) and _adds_up([float(loss.count) for loss in losses], tolerance)
        if is_sum_of_parts and _gradients_are_equal(losses, [part.outputs for part in parts], tolerance):
            fitting_forms.append(form)
    return fitting_forms


def _divisors(terms: Sequence[Sequence[Term]]) -> dict[_Form, list[float]]:
    """Return the divisors of each term in the whole batch and its parts, if all of them show one."""
    divisors: dict[_Form, list[float]] = {}
    if len({len(each) for each in terms}) == 1:
        for number, term in enumerate(zip(*terms, strict=True)):
            counts = [float(part.items) for part in term if part.items is not None]
            if len(counts) == len(term):
                divisors[number] = counts
    return divisors


def _is_proportional(divisors: list[float], counts: list[float]) -> bool:
    pairs = zip(divisors, counts, strict=True)
    return all(math.isclose(divisor * counts[0], count * divisors[0], rel_tol=1e-5) for divisor, count in pairs)


def _gradients_are_equal(losses: Sequence[Loss], outputs: Sequence[list[Tensor]], tolerance: float) -> bool:
    """Return whether the sum of the whole batch has the gradients of the sums of its parts."""
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


def _is_multiple(term: Term, rows: int) -> bool:
    """Return whether the term was divided by one number for each row, such as its elements."""
    return term.items is not None and float(term.items) >= rows and float(term.items) % rows == 0


def _not_of_rows(problem: str) -> TaskError:
    return TaskError(
        problem,
        why="ranks and micro-batches have parts of a batch: their losses add up only as a sum and its count, the "
        "number of targets, or the sum of their weights, that a mean is divided by",
        fix="state both, for example:\n"
        'total = F.cross_entropy(output, target, weight=w, reduction="sum")\n'
        "return lockstep.Loss(total, w[target].sum())\n"
        "or, for a loss of a whole batch, which then depends on how batches are divided: "
        "lockstep.Loss(mean * len(target), len(target))",
    )


def _with_gradient(values: Any) -> Any:
    """Copy ``values`` out of the model's graph; floating-point tensors require a gradient."""
    return tree_map(
        lambda leaf: leaf.detach().requires_grad_() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf,
        values,
    )


def _zero(output: Any) -> Tensor:
    """Return 0, with gradients of 0."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return sum((leaf.sum().where(torch.tensor(False, device=leaf.device), 0.0) for leaf in leaves), torch.zeros(()))


def _parts_of(model: nn.Module) -> Sequence[float]:
    """Return numbers of parts to compare a batch in: calls of a model that is divided among ranks are collective."""
    return _HALVES if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()) else _PARTS


def _rows(values: Any, part: slice) -> Any:
    return tree_map(lambda leaf: leaf[part] if isinstance(leaf, Tensor) and leaf.dim() else leaf, values)


def rows_of(batch: Any) -> int:
    """Count the samples of a batch that has some."""
    samples = _samples(batch)
    assert samples is not None
    return samples


def _samples(batch: Any) -> int | None:
    """Count rows of the first tensor in ``batch``; ``None`` without one."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else None
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ()
    return next((rows for rows in map(_samples, values) if rows is not None), None)


def described(value: Any) -> str:
    """Format a value for an error."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
