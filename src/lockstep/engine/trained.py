"""A task as it is trained: its model with the modules beside it, its callbacks, and its loss.

What the task returned is checked: a loss is a sum and a count; a mean is recognized by its graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lockstep._compat.torch import buffers_of, compiled_in_place, saved, unshared
from lockstep.engine.task import Callback, Context, Loss, Task
from lockstep.errors import TaskError, UnsupportedError


class Trained(nn.Module):
    """Modules that are moved, trained and saved together.

    Names of parameters and keys of the state dict begin with the prefix by which each module is given. That of a task's
    model is empty, and those of modules beside it are ``modules.<name>.``.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.prefixes = tuple(modules)
        self.parts = nn.ModuleList(modules.values())

    def _parts(self, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
        return ((prefix + part, module) for part, module in zip(self.prefixes, self.parts, strict=True))

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        memo = set() if memo is None else memo
        for part, module in self._parts(f"{prefix}." if prefix else ""):
            yield from module.named_modules(memo, part.removesuffix("."), remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        found: dict[str, Any] = {}
        for prefix, module in self._parts():
            found |= module.state_dict(prefix=prefix, **kwargs)
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        rest = dict(state_dict)
        for prefix, module in reversed([*self._parts()]):
            own = {key.removeprefix(prefix): rest.pop(key) for key in [*rest] if key.startswith(prefix)}
            module.load_state_dict(own, *args, **kwargs)


def build_model(task: Task) -> nn.Module:
    """``task.model()``, together with ``task.modules()`` where there are any: what is trained and saved."""
    model = task.model()
    extras = dict(task.modules())
    for source, module in {"model()": model, **{f"modules() for {n!r}": m for n, m in extras.items()}}.items():
        what = f"the task's {source} returned {type(module).__name__}"
        if not isinstance(module, nn.Module):
            raise TaskError(f"{what}, not a module", fix="return an nn.Module")
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise TaskError(
                what,
                why="Lockstep distributes the model over the selected devices; a wrapper would use others, or twice",
                fix="return the module inside; select devices with --devices, and a strategy with --strategy",
            )
    model, extras = compiled_in_place(model), {name: compiled_in_place(extra) for name, extra in extras.items()}
    beside = {f"modules.{name}.": module for name, module in extras.items()}
    trained = Trained({"": model, **beside}) if beside else model
    separate_elements(trained)
    return trained


def separate_elements(model: nn.Module) -> None:
    """Give buffers that ``expand()`` has made memory for each element, as a move to another device does."""
    separate: dict[int, Tensor] = {}
    for layer in model.modules():
        buffers = buffers_of(layer)
        for name, buffer in buffers.items():
            if buffer is not None and unshared(buffer) is not buffer:
                buffers[name] = separate.setdefault(id(buffer), unshared(buffer))


def bare(module: nn.Module) -> nn.Module:
    """The task's model itself: what its functions are called with."""
    return module.parts[0] if isinstance(module, Trained) else module


def refuse_modules(model: nn.Module, strategy: str) -> None:
    if isinstance(model, Trained):
        names = ", ".join(prefix.split(".")[1] for prefix in model.prefixes[1:])
        what = f"strategy {strategy} divides the model, and cannot train modules beside it: {names}"
        raise UnsupportedError(what, fix="make them part of the model, or use --strategy ddp")


def refuse_meta(model: nn.Module) -> None:
    """Raise :class:`TaskError` where a parameter has no memory, since nothing would be trained."""
    name = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if name is not None:
        fix = "make a new module in each call of model(), or keep it in an attribute of the task"
        raise TaskError(f"the parameter {name} of the task's model is on the meta device", fix=fix)


class Callbacks:
    """The callbacks of a task by the methods that they override, so that others cost no call."""

    def __init__(self, task: Task) -> None:
        self._methods: dict[str, list[Callable[[Context, nn.Module], None]]] = {}
        for callback in task.callbacks():
            for name in (name for name in vars(Callback) if name.startswith("on_")):
                if getattr(type(callback), name, None) not in (None, getattr(Callback, name)):
                    self._methods.setdefault(name, []).append(getattr(callback, name))

    def __len__(self) -> int:
        return len(self._methods)

    def call(self, name: str, context: Context, model: nn.Module) -> None:
        for method in self._methods.get(name, ()):
            method(context, bare(model))

    def caller(self, name: str, context: Context, model: nn.Module) -> Callable[[], None] | None:
        """A function that calls ``name``; ``None`` where no callback has it."""
        return (lambda: self.call(name, context, model)) if name in self._methods else None


_Kind = Literal["mean", "sum", "unknown"]
#: Operations that leave a mean a mean, and a sum a sum. Their names end in ``Backward`` and a number.
_KEEP = frozenset({"ToCopy", "Neg", "Rsub", "Alias", "Clone", "View", "ReshapeAlias", "UnsafeView", "Squeeze"})
_REDUCTIONS: dict[int, _Kind] = {1: "mean", 2: "sum"}
#: A deeper chain of additions is a loop over samples.
_DEPTH = 100


class Term(NamedTuple):
    """A term of a loss: how it was reduced, and what its sum was divided by; ``None``: by nothing, or unknown.

    ``is_weighed``: divided by a sum of weights, or by a number that the loss computed.
    """

    kind: _Kind
    items: Tensor | float | None = None
    is_weighed: bool = False


def is_mean(total: Tensor, count: float) -> bool:
    """Whether the graph of ``total`` shows a mean over the ``count`` items that it should sum."""
    if count <= 1:
        return False
    kinds = [term.kind for term in terms_of(total, count)]
    # A sum over items of each one's mean has as many terms as items.
    return len(kinds) < count and "mean" in kinds and "sum" not in kinds


def terms_of(total: Tensor, count: float) -> list[Term]:
    """The terms of ``total``, a loss of ``count`` items, by its graph; terms without a gradient do not matter."""
    return [] if total.grad_fn is None else _terms(total.grad_fn, count)


def _terms(node: Any, count: float, depth: int = 0) -> list[Term]:
    """The terms of the sum that ``node`` computes."""
    name = node.name().partition("Backward")[0]
    inputs = [before for before, _ in node.next_functions if before is not None]
    if depth > _DEPTH:
        return [Term("sum")]
    reduction = saved(node, "reduction")
    if reduction is not None:
        kind = _REDUCTIONS.get(reduction, "unknown")
        return [Term(kind, *(_divisor(node) if kind == "mean" else ()))]
    if name in ("Add", "Sub"):
        return [term for one in inputs for term in _terms(one, count, depth + 1)]
    if name == "Mean":
        summed = saved(inputs[0], "dim") if inputs[0].name().startswith("Sum") else None
        per_item = isinstance(summed, tuple) and 0 in summed
        items = math.prod(saved(node, "self_sym_sizes"))
        return [Term("mean" if items >= count and not per_item else "unknown", items)]
    if name == "Sum":  # over columns, of means over rows, or over rows
        return [Term("unknown" if inputs[0].name().startswith("Mean") else "sum")]
    if len(inputs) != 1 or name not in ("Mul", "Div", *_KEEP):
        return [Term("unknown")]
    terms = _terms(inputs[0], count, depth + 1)
    if name in _KEEP:
        return terms
    factor = _constant(node)
    if name == "Div" and factor is not None and [term.kind for term in terms] == ["sum"]:
        return [Term("mean" if factor == count else "unknown", float(factor), is_weighed=True)]
    if name == "Div" and factor is not None and isinstance(saved(node, "other"), Tensor) and terms == [Term("unknown")]:
        return [Term("unknown", factor, is_weighed=True)]
    shrinks = factor is not None and (abs(factor) <= 1 if name == "Mul" else abs(factor) >= 1)
    if shrinks and all(term.kind != "sum" for term in terms):
        return terms
    return [term._replace(kind="unknown") for term in terms]


def _divisor(node: Any) -> tuple[Tensor | float | None, bool]:
    """What a loss of torch's with ``reduction="mean"`` divides by, and whether it is a sum of weights."""
    values, target, ignored = saved(node, "self"), saved(node, "target"), saved(node, "ignore_index")
    if ignored is None:
        return (values.numel() if isinstance(values, Tensor) else None), False
    counted = target != (ignored + 2**63) % 2**64 - 2**63  # kept as a number without a sign
    weight = saved(node, "weight")
    # In single precision: the sum that torch has saved is of the type of the values.
    return (counted.sum() if weight is None else weight.float()[target[counted]].sum()), True


def _constant(node: Any) -> float | None:
    """The number that ``node`` multiplies with, or divides by."""
    for value in (saved(node, "other"), saved(node, "self")):
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
            return float(value)
    return None


def check_loss(loss: Any) -> Loss:
    """What a task returned, as a :class:`Loss` with a scalar total. Raises :class:`TaskError`: a number, or no pair."""
    fix = "return Loss(total, count): F.cross_entropy(…, reduction='sum') and the number of items"
    if not isinstance(loss, tuple) or len(loss) != 2:
        raise TaskError("the task's loss is not a sum and a count", why=f"it returned {type(loss).__name__}", fix=fix)
    total, count = loss
    if not isinstance(total, Tensor):
        why = f"it is a {type(total).__name__}"
        if isinstance(total, int | float):
            why, fix = f"{why}, which has no gradient, as after .item()", "return the tensor itself as the total"
        raise TaskError("the task's loss total is not a tensor", why=why, fix=fix)
    if isinstance(count, Tensor) and count.numel() != 1:
        raise TaskError("the task's loss count is not one number", why=f"its shape is {tuple(count.shape)}", fix=fix)
    return Loss(summed(total) if total.dim() else total, count)


def summed(values: Tensor) -> Tensor:
    """The sum of one value per item, in single precision at least: sums in half precision soon leave its range."""
    return (values.float() if values.itemsize < 4 else values).sum()


def refuse_mean(total: Tensor, count: float, fix: str) -> None:
    """Raise :class:`TaskError` where ``total`` is a mean over ``count`` items, or the count is negative."""
    if not count >= 0:
        raise TaskError(
            f"the count of the loss is {count:g}",
            why="the gradient is divided by it, so it must be the number of items, or the sum of weights from 0 up",
            fix="give a count of at least 0",
        )
    if is_mean(total, count):
        raise TaskError(
            f"the loss is a mean, and its count is {count:g}",
            why=f"a sum is divided by its count, so gradients would be 1/{count:g} of those of the mean",
            fix=fix,
        )


_FIX_OF_MEAN = (
    "use reduction='sum', or multiply: Loss(mean * count, count); a mean of equal weight for each micro-batch is "
    "Loss(mean, 1)"
)


class CheckedLoss:
    """A task's loss, checked on the first batch; a count may have the shape (1,). ``mode``: of ``torch.compile``."""

    def __init__(self, task: Task, mode: str | None = None) -> None:
        self._loss = task.loss if mode is None else torch.compile(task.loss, mode=mode)
        self._is_checked = False

    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        loss = self._loss(model, batch)
        if not self._is_checked:
            checked = check_loss(loss)
            refuse_mean(checked.total, float(checked.count), _FIX_OF_MEAN)
            self._is_checked = True
        total, count = loss
        if total.dim():
            total = summed(total)
        if isinstance(count, Tensor) and count.dim():
            count = count.reshape(())
        return Loss(total, count)


def without_count(total: Tensor, count: Tensor | int) -> tuple[Tensor, Tensor | int]:
    """A loss of 0 for 0 items, with gradients of 0: of a batch that replaces one without readable samples."""
    total = total.where(torch.zeros_like(total, dtype=torch.bool), torch.zeros_like(total))
    return total, torch.zeros_like(count) if isinstance(count, Tensor) else 0


def train_mode(model: nn.Module) -> None:
    """As ``model.train()``, except for what the task itself has put in evaluation mode.

    That is a layer whose parent is in training mode (a frozen BatchNorm), or a module without trainable parameters (a
    frozen backbone). Others are trained: many libraries return a whole model in evaluation mode.
    """
    kept: list[nn.Module] = []
    for parent in model.modules():
        for module in parent.children():
            is_layer = parent.training and next(module.children(), None) is None
            parameters = list(module.parameters())
            if not module.training and (is_layer or (parameters and not any(p.requires_grad for p in parameters))):
                kept.append(module)
    model.train()
    for module in kept:
        module.eval()
