"""Differentiable building blocks of recurrent layers whose own backward pass saves time or memory.

Each keeps memory linear in time, and is differentiable once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Projection(torch.autograd.Function):
    """``(x Wᵀ, x e)`` for ``x`` (batch, time, inputs), ``W`` (outputs, inputs) and ``e`` (inputs,).

    Both gradients of ``x`` land in one tensor; apart, they would be two of the size of ``x`` and their sum.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, encoder: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight, encoder)
        return x @ weight.t(), x @ encoder

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor, grad_scalars: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        x, weight, encoder = ctx.saved_tensors
        rows, scalars, inputs = grad_rows.flatten(0, 1), grad_scalars.flatten(), x.flatten(0, 1)
        grad_x = (rows @ weight).addr_(scalars, encoder).view_as(x) if ctx.needs_input_grad[0] else None
        return grad_x, rows.t() @ inputs, scalars @ inputs


class _LinearScan(torch.autograd.Function):
    """The states of ``s[j+1] = A s[j] + l[j]``, from ``s[0]`` on, for a constant ``A``.

    Shapes: ``s[0]`` (batch, order), ``l`` (batch, steps, order), ``A`` (order, order); the result is
    (batch, steps + 1, order).
    """

    @staticmethod
    def forward(ctx: Any, start: Tensor, inputs: Tensor, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(matrix)
        states = torch.cat([start[None], inputs.transpose(0, 1)])
        for k in range(1, len(states)):
            states[k].addmm_(states[k - 1], matrix.t())
        return states.transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (matrix,) = ctx.saved_tensors
        grad = grad.transpose(0, 1).clone(memory_format=torch.contiguous_format)
        for k in range(len(grad) - 1, 0, -1):
            grad[k - 1].addmm_(grad[k], matrix)
        return grad[0], grad[1:].transpose(0, 1), None


class _FeedbackScan(torch.autograd.Function):
    """``[h[t], u[t]] = [tanh, identity](i[t] + M [h[t-1], u[t-1], u[t-2], …])``, from ``h[-1]`` and no ``u`` on.

    Shapes: ``h[-1]`` (batch, hidden); the inputs ``i`` for ``h`` (batch, time, hidden) and for ``u`` (batch, time),
    and the results likewise; ``M`` (hidden + history, hidden + history), whose rows after the first ``hidden`` + 1
    shift the history by one place. A step is two kernels, forward and backward; the gradient of ``M`` is one
    product at the end.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, h_inputs: Tensor, u_inputs: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        batch, time, hidden = h_inputs.shape
        states = h.new_zeros(time + 1, batch, len(matrix))
        states[0, :, :hidden] = h
        states[1:, :, :hidden] = h_inputs.transpose(0, 1)
        states[1:, :, hidden] = u_inputs.t()
        for k in range(1, time + 1):
            states[k].addmm_(states[k - 1], matrix.t())[:, :hidden].tanh_()
        ctx.save_for_backward(states, matrix)
        return states[1:, :, :hidden].transpose(0, 1), states[1:, :, hidden].t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_h: Tensor, grad_u: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        states, matrix = ctx.saved_tensors
        hidden = grad_h.shape[2]
        slopes = 1 - states[1:, :, :hidden].square()
        grad = torch.zeros_like(states)
        grad[1:, :, :hidden] = grad_h.transpose(0, 1)
        grad[1:, :, hidden] = grad_u.t()
        for k in range(len(grad) - 1, 0, -1):
            grad[k, :, :hidden].mul_(slopes[k - 1])
            grad[k - 1].addmm_(grad[k], matrix)
        grad_matrix = grad[1:].flatten(0, 1).t() @ states[:-1].flatten(0, 1)
        return grad[0, :, :hidden], grad[1:, :, :hidden].transpose(0, 1), grad[1:, :, hidden].t(), grad_matrix


project: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = _Projection.apply
linear_scan: Callable[[Tensor, Tensor, Tensor], Tensor] = _LinearScan.apply
feedback_scan: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = _FeedbackScan.apply
