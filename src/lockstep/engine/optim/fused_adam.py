"""torch's fused Adam kernels without what ``Optimizer.step`` does around them in Python, a third of a small step."""

from __future__ import annotations

from operator import is_, methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lockstep._compat.torch import fused_adam_, fused_adamw_, needs_own_step, take_step

_AVERAGE = methodcaller("get", "exp_avg")


class _Lists(NamedTuple):
    """Arguments of the kernel for a group besides gradients, in the order of its parameters.

    ``steps`` are the elements of ``counts``, so that one addition of ``ones`` counts a step of all parameters.
    """

    parameters: list[nn.Parameter]
    averages: list[Tensor]
    squares: list[Tensor]
    counts: Tensor
    ones: Tensor
    steps: list[Tensor]


class AdamKernel:
    """``optimizer.step()``, with the same result bit for bit.

    Where the optimizer is torch's fused Adam or AdamW and has no hooks, the kernels are called directly,
    as ``torch.optim.adam._fused_adam`` does; else ``optimizer.step()`` is.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._is_plain = type(optimizer) in (Adam, AdamW)
        self._lists: list[_Lists] = []
        #: Parameters without a gradient, and the first moments in the optimizer's state, when the lists were made.
        self._unused: list[nn.Parameter] = []
        self._averages: list[Tensor] = []

    def __call__(self, found_inf: Tensor | None = None) -> None:
        """Take the step; where ``found_inf`` (shape ()) is 1, nothing changes: for optimizers with fused kernels."""
        optimizer = self._optimizer
        gradients = self._gradients() if self._is_plain and not needs_own_step(optimizer) else None
        if gradients is None:
            if found_inf is not None:
                optimizer.found_inf = found_inf  # type: ignore[attr-defined]
                optimizer.grad_scale = None  # type: ignore[attr-defined]
            if isinstance(optimizer, SGD):
                _start_momentum(optimizer)
            take_step(optimizer)
            return
        with torch.no_grad():
            for group, lists, group_gradients in zip(optimizer.param_groups, self._lists, gradients, strict=True):
                if group_gradients:
                    _step(group, lists, group_gradients, found_inf)

    def _gradients(self) -> list[list[Tensor]] | None:
        """Return the gradients of the parameters in the lists, made again after changes; ``None``: not plain.

        Anybody may freeze parameters, add groups, or replace states, as loading a checkpoint does.
        """
        gradients = [[g for p in lists.parameters if (g := p.grad) is not None] for lists in self._lists]
        if not self._are_current(gradients):
            groups = self._optimizer.param_groups
            used = [[p for p in group["params"] if p.grad is not None] for group in groups]
            self._is_plain = all(map(_is_plain, groups, used))
            if not self._is_plain:
                return None
            state = self._optimizer.state
            self._lists = [_lists(parameters, state) for parameters in used]
            self._averages = [*map(_AVERAGE, state.values())]
            self._unused = [p for group in groups for p in group["params"] if p.grad is None]
            gradients = [[p.grad for p in parameters] for parameters in used]
        return gradients

    def _are_current(self, gradients: list[list[Tensor]]) -> bool:
        states = self._optimizer.state
        return (
            len(self._lists) == len(self._optimizer.param_groups)
            and [*map(len, gradients)] == [len(lists.parameters) for lists in self._lists]
            and len(states) == len(self._averages)
            and all(map(is_, map(_AVERAGE, states.values()), self._averages))
            and not any(p.grad is not None for p in self._unused)
        )


def _start_momentum(optimizer: Optimizer) -> None:
    """Make a momentum of zero for parameters that have none.

    The fused kernel allocates buffers uninitialised, and leaves them so when the first step is skipped; where some
    parameters have a buffer and others do not (a layer that was unfrozen), it fails.
    """
    if len(optimizer.state) == sum(len(group["params"]) for group in optimizer.param_groups):
        return
    for group in optimizer.param_groups:
        if group.get("fused") and group["momentum"] and not group["dampening"]:
            for parameter in group["params"]:
                if parameter.grad is not None and not optimizer.state[parameter]:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _is_plain(group: dict[str, Any], parameters: list[nn.Parameter]) -> bool:
    """Return whether ``parameters`` need nothing but the kernel's usual arguments, on one device and in one dtype."""
    kinds = {(p.device, p.dtype) for p in parameters}
    unusual = ("amsgrad", "maximize", "capturable", "differentiable")
    numbers = (group["lr"], *group["betas"])
    return bool(
        group.get("fused")
        and len(kinds) <= 1
        and all(p.is_floating_point() and type(p.data) is Tensor for p in parameters)
        and not any(group[name] for name in unusual)
        and all(isinstance(number, float) for number in numbers)
    )


def _lists(parameters: list[nn.Parameter], states: Any) -> _Lists:
    parameter_states = [states[parameter] for parameter in parameters]
    for parameter, state in zip(parameters, parameter_states, strict=True):
        if not state:  # as Adam._init_group
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    counts = torch.stack([state["step"] for state in parameter_states]) if parameter_states else torch.zeros(0)
    steps = list(counts.unbind())
    for state, step in zip(parameter_states, steps, strict=True):
        state["step"] = step
    averages, squares = ([state[name] for state in parameter_states] for name in ("exp_avg", "exp_avg_sq"))
    return _Lists(list(parameters), averages, squares, counts, torch.ones_like(counts), steps)


def _step(group: dict[str, Any], lists: _Lists, gradients: list[Tensor], found_inf: Tensor | None) -> None:
    lists.counts.add_(lists.ones)
    kernel = fused_adamw_ if group["decoupled_weight_decay"] else fused_adam_
    kernel(
        lists.parameters,
        gradients,
        lists.averages,
        lists.squares,
        [],
        lists.steps,
        amsgrad=False,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
        grad_scale=None,
        found_inf=found_inf,
    )
    if found_inf is not None:
        lists.counts.sub_(found_inf)
