"""The Legendre memory unit (LMU), a recurrent layer with a long linear memory.

A step of the cell, for an input ``x``, a hidden state ``h`` and a memory ``m`` (Voelker, Kajić and Eliasmith 2019)::

    u = e_x·x + e_h·h + e_m·m        the number that is written to the memory
    m = A m + B u                    the Legendre delay system of some order over θ steps
    h = tanh(W_x x + W_h h + W_m m)  the output

``A`` and ``B`` are constants (:func:`delay_system`), so ``m`` is linear in the ``u``. The layer goes through
time in chunks: the memory after step k of a chunk is the product of a constant matrix, ``[A^(k+1), A^k B, …, B]``, and
``[m, u_0, …, u_k]`` with the memory before the chunk, for all of the chunk's steps and all sequences at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lockstep._compat.torch import ConvertedModule


def delay_system(order: int, theta: float) -> tuple[Tensor, Tensor]:
    """Make the system ``dm/dt = A m + B u``, time in steps: A (order, order), B (order,), in float64.

    ``m`` has the last θ steps of the scalar input ``u`` as coefficients of shifted Legendre polynomials: ``u(t-θ')`` is
    about ``Σ_i m_i P_i(2θ'/θ - 1)``. ``A_ij = (2i+1)/θ · (-1 if i < j else (-1)^(i-j+1))`` and
    ``B_i = (2i+1)/θ · (-1)^i`` (equations 1–3 of Voelker et al. 2019).
    """
    index = torch.arange(order, dtype=torch.float64, device="cpu")
    scale = (2 * index + 1) / theta
    alternating = 1 - 2 * (index % 2)
    lower = -alternating[:, None] * alternating
    return scale[:, None] * torch.where(index[:, None] < index, -1.0, lower), scale * alternating


def zero_order_hold(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the step ``m[t] = A m[t-1] + B u[t]`` that is exact while ``u`` is constant over a step of length 1.

    The exponential of ``[[a, b], [0, 0]]`` is ``[[A, B], [0, 1]]`` (Van Loan 1978, "Computing integrals
    involving the matrix exponential"), so ``a`` need not be inverted.
    """
    order = len(b)
    joint = a.new_zeros(order + 1, order + 1)
    joint[:order, :order] = a
    joint[:order, order] = b
    joint = torch.linalg.matrix_exp(joint)
    return joint[:order, :order], joint[:order, order]


def transition(order: int, theta: float, steps: int) -> Tensor:
    """Combine ``steps`` steps: row k, (order, order + steps), maps ``[m, u_0, u_1, …]`` to the memory after u_k.

    Row k is ``[A^(k+1), A^k B, …, A B, B, 0, …]``. Shape (steps, order, order + steps).
    """
    a, b = zero_order_hold(*delay_system(order, theta))
    rows = a.new_zeros(steps, order, order + steps)
    rows[0, :, :order] = a
    rows[0, :, order] = b
    for k in range(1, steps):
        rows[k] = a @ rows[k - 1]
        rows[k, :, order + k] = b
    return rows


class _FeedbackScan(torch.autograd.Function):
    """``[h[t], u[t]] = [tanh, identity](i[t] + M [h[t-1], u[t-1], u[t-2], …])``, from ``h[-1]`` and no ``u`` on.

    Shapes: ``h[-1]`` (batch, hidden); the inputs ``i`` for ``h`` (batch, time, hidden) and for ``u`` (batch, time),
    and the results likewise; ``M`` (hidden + history, hidden + history), whose rows after the first ``hidden`` + 1
    shift the history by one place. A step is two kernels; the gradient of ``M`` is one product at the end.
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


feedback_scan: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = _FeedbackScan.apply

#: Steps of a chunk. The memory is carried from chunk to chunk, one after another.
CHUNK = 16


class LMU(ConvertedModule):
    """A layer of Legendre memory units on (batch, time, features).

    Args:
        theta: steps that the memory looks back.

    The memory is computed in float32 at least, under autocast and in half precision too.
    """

    e_x: Tensor
    W_x: Tensor
    W_m: Tensor
    transition: Tensor

    def __init__(self, input_size: int, hidden_size: int, memory_size: int, theta: float) -> None:
        super().__init__()
        sizes = (input_size, hidden_size, memory_size)
        if min(sizes) < 1 or not 0 < theta < math.inf:
            raise ValueError(f"sizes are at least 1 and theta is positive, not {sizes} and {theta}")
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.memory_size = memory_size
        self.theta = theta
        self.e_x = nn.Parameter(torch.empty(input_size))
        self.W_x = nn.Parameter(torch.empty(hidden_size, input_size))
        self.W_m = nn.Parameter(torch.empty(hidden_size, memory_size))
        self.e_h = nn.Parameter(torch.empty(hidden_size))
        self.e_m = nn.Parameter(torch.empty(memory_size))
        self.W_h = nn.Parameter(torch.empty(hidden_size, hidden_size))
        self.reset_parameters()
        self.register_buffer("transition", self._transition(self.W_x.device), persistent=False)

    def reset_parameters(self) -> None:
        """Draw LeCun uniform encoders, Xavier normal matrices and ``e_m`` = 0, as Voelker et al. (2019)."""
        for name, parameter in self.named_parameters(recurse=False):
            if name.startswith("W_"):
                nn.init.xavier_normal_(parameter)
            elif name == "e_m":
                nn.init.zeros_(parameter)
            else:
                limit = math.sqrt(3 / len(parameter))
                nn.init.uniform_(parameter, -limit, limit)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the output (batch, time, hidden_size), 0 after a sequence's end.

        Args:
            x: (batch, time, input_size), at least one step. What stands after a sequence's end has no influence.
            lengths: steps of each sequence, integers of shape (batch,) from 0 to time; ``None``: all of them.
        """
        padding = None
        if lengths is not None:
            padding = torch.arange(x.shape[1], device=x.device) >= lengths.to(x.device)[:, None]
            x = x.masked_fill(padding[..., None], 0)
        kind = x.device.type
        # Not is_autocast_available(), where torch.compile would end its graph.
        is_autocast = kind != "meta" and torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if is_autocast else x.dtype
        with torch.autocast(kind, enabled=False) if is_autocast else nullcontext():
            output = self._outputs(x.to(dtype))
            if padding is not None:
                output = output.masked_fill(padding[..., None], 0)
            return output.to(dtype)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, {self.memory_size}, theta={self.theta}"

    def _outputs(self, x: Tensor) -> Tensor:
        """Return ``h`` after each step. A chunk's earlier ``u`` travel with ``h``: a step is one product and tanh.

        Before a chunk's step k, its first memory ``m`` has become ``p = A^k m``; the impulses since are answered by
        ``v_i = W_m A^i B`` and ``c_i = e_m·A^i B``. With sums over 1 ≤ i ≤ k::

            u[t] = e_x·x[t] + e_m·p + e_h·h[t-1] + Σ c_{i-1} u[t-i]
            h[t] = tanh(W_x x[t] + W_m A p + W_h h[t-1] + v_0 u[t] + Σ v_i u[t-i])
        """
        order = self.memory_size
        steps = min(CHUNK, x.shape[1])
        rows = self.transition[:steps, :, : order + steps]
        W_x, W_m, e_x, e_m = (w.to(rows.dtype) for w in (self.W_x, self.W_m, self.e_x, self.e_m))
        response = rows[-1, :, order:].flip(1)
        v = W_m @ response
        matrix = self._step_matrix(v, e_m @ response)
        # u[t] is inserted into h[t]: what goes into it goes there too, times v_0.
        z = F.linear(x, torch.addr(W_x, v[:, 0], e_x).to(x.dtype))
        u = x @ e_x.to(x.dtype)
        p_weight = torch.addr(W_m @ rows[0, :, :order], v[:, 0], e_m)
        batch = x.shape[0]  # not len(x), which torch.export makes a constant
        h = rows.new_zeros(batch, self.hidden_size)
        m = rows.new_zeros(batch, order)
        outputs = []
        for z_part, u_part in zip(z.to(rows.dtype).split(steps, 1), u.to(rows.dtype).split(steps, 1), strict=True):
            length = z_part.shape[1]
            later = F.linear(m, rows[: length - 1, :, :order].flatten(0, 1)).view(batch, length - 1, order)
            p = torch.cat([m[:, None], later], 1)
            hs, us = feedback_scan(h, z_part + F.linear(p, p_weight), u_part + p @ e_m, matrix)
            outputs.append(hs)
            h = hs[:, -1]
            m = F.linear(torch.cat([m, F.pad(us, (0, steps - length))], 1), rows[length - 1])
        return torch.cat(outputs, 1)

    def _step_matrix(self, v: Tensor, c: Tensor) -> Tensor:
        """Make the (hidden + steps)² matrix from ``[h[t-1], u[t-1], u[t-2], …]`` to ``[h[t], u[t], u[t-1], …]``."""
        hidden, steps = v.shape
        u_row = torch.cat([self.e_h.to(c.dtype), c[:-1], c.new_zeros(1)])
        h_rows = torch.addr(torch.cat([self.W_h.to(c.dtype), F.pad(v[:, 1:], (0, 1))], 1), v[:, 0], u_row)
        shift = torch.eye(steps - 1, hidden + steps, dtype=c.dtype, device=c.device).roll(hidden, 1)
        return torch.cat([h_rows, u_row[None], shift])

    def _transition(self, device: torch.device) -> Tensor:
        dtype = torch.promote_types(self.W_x.dtype, torch.float32)
        return transition(self.memory_size, float(self.theta), CHUNK).to(device, dtype, copy=True)

    def converted(self) -> None:
        # Converted from float32 it would keep float32's rounding, and from a device without data nothing at all.
        self.transition = self._transition(self.transition.device)
