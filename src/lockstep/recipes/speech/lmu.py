"""The Legendre memory unit (LMU), a recurrent layer with a long linear memory.

A step of the cell, for an input ``x``, a hidden state ``h`` and a memory ``m`` (Voelker, Kajić and Eliasmith 2019)::

    u = e_x·x + e_h·h + e_m·m        what is written to the memory: one number
    m = A m + B u                    the Legendre delay system of some order over θ steps
    h = tanh(W_x x + W_h h + W_m m)  the output

``A`` and ``B`` are constants (:func:`delay_system`), so ``m`` is linear in the ``u``. Both forms go through
time in chunks: the memory after step k of a chunk is the product of a constant matrix, ``[A^(k+1), A^k B, …, B]``, and
``[m, u_0, …, u_k]`` with the memory before the chunk, for all of the chunk's steps and all sequences at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lockstep._compat.torch import ConvertedModule


def delay_system(order: int, theta: float) -> tuple[Tensor, Tensor]:
    """The continuous system ``dm/dt = A m + B u``, time in steps: A of shape (order, order), B of (order,), in float64.

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
    """The step ``m[t] = A m[t-1] + B u[t]`` that is exact while ``u`` is constant over a step of length 1.

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
    """What ``steps`` steps do: row k of shape (order, order + steps) maps ``[m, u_0, u_1, …]`` to the memory after u_k.

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
        rows = grad_rows.flatten(0, 1)
        scalars = grad_scalars.flatten()
        inputs = x.flatten(0, 1)
        grad_x = (rows @ weight).addr_(scalars, encoder).view_as(x) if ctx.needs_input_grad[0] else None
        return grad_x, rows.t() @ inputs, scalars @ inputs


class _LinearScan(torch.autograd.Function):
    """The states (batch, steps + 1, order) of ``s[j+1] = A s[j] + l[j]``, from ``s[0]`` on, for a constant ``A``."""

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


project: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = _Projection.apply
linear_scan: Callable[[Tensor, Tensor, Tensor], Tensor] = _LinearScan.apply
feedback_scan: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = _FeedbackScan.apply

FORMS = ("parallel", "recurrent")
#: Steps of a chunk. The memory is carried from chunk to chunk, one after another.
CHUNK = 16


class LMUState(NamedTuple):
    """Where a sequence stands: the last output ``h`` (batch, hidden) and the memory ``m`` (batch, order)."""

    h: Tensor
    m: Tensor


class LMU(ConvertedModule):
    """A layer of Legendre memory units on (batch, time, features).

    Args:
        theta: steps that the memory looks back.
        form: ``parallel`` has no ``e_h``, ``e_m`` and ``W_h``, so that nothing but the memory is recurrent and all time
            steps are computed together (Chilkuri and Eliasmith 2021, "Parallelizing Legendre Memory Unit Training");
            ``recurrent`` is the whole cell. The parameters that both have are the same.

    The memory is computed in float32 at least, under autocast and in half precision too.
    """

    e_x: Tensor
    W_x: Tensor
    W_m: Tensor
    transition: Tensor

    def __init__(
        self, input_size: int, hidden_size: int, memory_size: int, theta: float, form: str = "parallel"
    ) -> None:
        super().__init__()
        if form not in FORMS:
            raise ValueError(f"the form of an LMU is one of {', '.join(FORMS)}, not {form!r}")
        sizes = (input_size, hidden_size, memory_size)
        if min(sizes) < 1 or not 0 < theta < math.inf:
            raise ValueError(f"sizes are at least 1 and theta is positive, not {sizes} and {theta}")
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.memory_size = memory_size
        self.theta = theta
        self.form = form
        self.e_x = nn.Parameter(torch.empty(input_size))
        self.W_x = nn.Parameter(torch.empty(hidden_size, input_size))
        self.W_m = nn.Parameter(torch.empty(hidden_size, memory_size))
        if form == "recurrent":
            self.e_h = nn.Parameter(torch.empty(hidden_size))
            self.e_m = nn.Parameter(torch.empty(memory_size))
            self.W_h = nn.Parameter(torch.empty(hidden_size, hidden_size))
        self.reset_parameters()
        self.register_buffer("transition", self._transition(self.W_x.device), persistent=False)

    def reset_parameters(self) -> None:
        """LeCun uniform encoders, Xavier normal matrices and ``e_m`` = 0, as Voelker et al. (2019)."""
        for name, parameter in self.named_parameters(recurse=False):
            if name.startswith("W_"):
                nn.init.xavier_normal_(parameter)
            elif name == "e_m":
                nn.init.zeros_(parameter)
            else:
                limit = math.sqrt(3 / len(parameter))
                nn.init.uniform_(parameter, -limit, limit)

    def forward(
        self, x: Tensor, lengths: Tensor | None = None, state: LMUState | None = None
    ) -> tuple[Tensor, LMUState]:
        """The output (batch, time, hidden_size), 0 after a sequence's end, and the state at each sequence's end.

        Pieces one after another, each from the ``state`` of the one before, give the output of the whole.

        Args:
            x: (batch, time, input_size), at least one step. What stands after a sequence's end has no influence.
            lengths: steps of each sequence, integers of shape (batch,) from 0 to time; ``None``: all of them.
            state: where each sequence stands, as an earlier call returned it; ``None``: zeros.

        Raises:
            ValueError: another shape, or a length out of range (seen on the CPU only).
        """
        self._check(x, lengths, state)
        padding = None
        if lengths is not None:
            lengths = lengths.to(x.device)
            padding = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
            x = x.masked_fill(padding[..., None], 0)
        if state is None:
            zeros = self.transition.new_zeros
            state = LMUState(*(zeros(x.shape[0], size) for size in (self.hidden_size, self.memory_size)))
        state = LMUState(*(part.to(self.transition.dtype) for part in state))
        kind = x.device.type
        # Not is_autocast_available(), where torch.compile would end its graph.
        is_autocast = kind != "meta" and torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if is_autocast else x.dtype
        go = self._recurrent if self.form == "recurrent" else self._parallel
        with torch.autocast(kind, enabled=False) if is_autocast else nullcontext():
            output, chunks = go(x.to(dtype), padding, state)
            return output.to(dtype), self._state_at_end(output, chunks, lengths, state)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, {self.memory_size}, theta={self.theta}, form={self.form!r}"

    def _parallel(self, x: Tensor, padding: Tensor | None, state: LMUState) -> tuple[Tensor, Tensor]:
        """The output, and of every chunk the memory before it and its ``u``: (batch, chunks, order + steps)."""
        batch, time, _ = x.shape
        rows = self._rows(time)
        steps = len(rows)
        order = self.memory_size
        stride = self._stride(batch, time)
        z, u = project(x, self.W_x.to(x.dtype), self.e_x.to(x.dtype))
        u = F.pad(u.to(rows.dtype), (0, -time % steps)).view(batch, -1, steps)
        added = F.linear(u[:, :-1], rows[-1, :, order:])
        chunks = torch.cat([linear_scan(state.m, added, rows[-1, :, :order]), u], 2)
        if stride == 1:
            m = F.linear(chunks, rows.flatten(0, 1)).view(batch, -1, order)[:, :time]
            y = F.linear(m.to(z.dtype), self.W_m.to(z.dtype))
        else:
            before = torch.cat([self._memory(chunks, rows[stride - 1 : -1 : stride]), u.view(batch, -1, stride)], 2)
            weight = self.W_m.to(rows.dtype) @ rows[:stride, :, : order + stride]
            y = F.linear(before[:, : -(-time // stride)].to(z.dtype), weight.flatten(0, 1).to(z.dtype))
            y = y.view(batch, -1, self.hidden_size)[:, :time]
        # In place: at this size, fresh memory costs as much as the arithmetic.
        z.add_(y)
        if padding is not None:
            z.masked_fill_(padding[..., None], 0)
        return z.tanh_(), chunks

    def _recurrent(self, x: Tensor, padding: Tensor | None, state: LMUState) -> tuple[Tensor, Tensor]:
        """As :meth:`_parallel`. A chunk's earlier ``u`` travel with ``h``, so that a step is one product and tanh.

        Before a chunk's step k, its first memory ``m`` has become ``p = A^k m``; the impulses since are answered by
        ``v_i = W_m A^i B`` and ``c_i = e_m·A^i B``. With sums over 1 ≤ i ≤ k::

            u[t] = e_x·x[t] + e_m·p + e_h·h[t-1] + Σ c_{i-1} u[t-i]
            h[t] = tanh(W_x x[t] + W_m A p + W_h h[t-1] + v_0 u[t] + Σ v_i u[t-i])
        """
        rows = self._rows(x.shape[1])
        steps = len(rows)
        order = self.memory_size
        W_x, W_m, e_x, e_m = (w.to(rows.dtype) for w in (self.W_x, self.W_m, self.e_x, self.e_m))
        response = rows[-1, :, order:].flip(1)
        v = W_m @ response
        matrix = self._step_matrix(v, e_m @ response)
        # u[t] is inserted into h[t]: what goes into it goes there too, times v_0.
        z, u = project(x, torch.addr(W_x, v[:, 0], e_x).to(x.dtype), e_x.to(x.dtype))
        p_weight = torch.addr(W_m @ rows[0, :, :order], v[:, 0], e_m)
        h, m = state
        outputs = []
        chunks = []
        for z_part, u_part in zip(z.to(rows.dtype).split(steps, 1), u.to(rows.dtype).split(steps, 1), strict=True):
            length = z_part.shape[1]
            p = self._memory(m[:, None], rows[: length - 1, :, :order])
            hs, us = feedback_scan(h, z_part + F.linear(p, p_weight), u_part + p @ e_m, matrix)
            outputs.append(hs)
            chunks.append(torch.cat([m, F.pad(us, (0, steps - length))], 1))
            h = hs[:, -1]
            m = F.linear(chunks[-1], rows[length - 1])
        output = torch.cat(outputs, 1)
        if padding is not None:
            output = output.masked_fill(padding[..., None], 0)
        return output, torch.stack(chunks, 1)

    def _step_matrix(self, v: Tensor, c: Tensor) -> Tensor:
        """(hidden + steps, hidden + steps): from ``[h[t-1], u[t-1], u[t-2], …]`` to ``[h[t], u[t], u[t-1], …]``."""
        hidden, steps = v.shape
        u_row = torch.cat([self.e_h.to(c.dtype), c[:-1], c.new_zeros(1)])
        h_rows = torch.addr(torch.cat([self.W_h.to(c.dtype), F.pad(v[:, 1:], (0, 1))], 1), v[:, 0], u_row)
        shift = torch.eye(steps - 1, hidden + steps, dtype=c.dtype, device=c.device).roll(hidden, 1)
        return torch.cat([h_rows, u_row[None], shift])

    def _rows(self, time: int) -> Tensor:
        """Of :attr:`transition`, what chunks of at most ``time`` steps need: (steps, order, order + steps)."""
        steps = min(CHUNK, time)
        return self.transition[:steps, :, : self.memory_size + steps]

    def _stride(self, batch: int, time: int) -> int:
        """The parallel form computes the memory at every stride-th step, and ``W_m A^k`` for the steps between.

        That takes order² · (batch · time / stride + hidden · stride) products; measured, this power of two is best.
        """
        if time < CHUNK:
            return 1
        if torch.compiler.is_compiling():
            return 4  # the batch would become a constant of the program
        stride = 1
        while stride < CHUNK and batch * time >= (stride + 1) ** 2 * self.hidden_size:
            stride *= 2
        return stride

    def _memory(self, chunks: Tensor, rows: Tensor) -> Tensor:
        """The memory before each chunk and after some of its steps, one a row: (batch, chunks · (1 + rows), order)."""
        batch, count, _ = chunks.shape
        later = F.linear(chunks, rows.flatten(0, 1)).view(batch, count, -1, self.memory_size)
        return torch.cat([chunks[..., None, : self.memory_size], later], 2).flatten(1, 2)

    def _state_at_end(self, output: Tensor, chunks: Tensor, lengths: Tensor | None, state: LMUState) -> LMUState:
        batch, time, _ = output.shape
        rows = self._rows(time)
        if lengths is None:
            # A view of the output would keep all of it alive.
            h = output[:, -1].clone()
            m = F.linear(chunks[:, -1], rows[(time - 1) % len(rows)])
            return LMUState(h.to(rows.dtype), m)
        last = (lengths - 1).clamp(min=0)
        each = torch.arange(batch, device=last.device)
        h = output[each, last]
        m = rows[last % len(rows)] @ chunks[each, last // len(rows), :, None]
        is_empty = (lengths == 0)[:, None]
        return LMUState(torch.where(is_empty, state.h, h.to(rows.dtype)), torch.where(is_empty, state.m, m[..., 0]))

    def _check(self, x: Tensor, lengths: Tensor | None, state: LMUState | None) -> None:
        if x.ndim != 3 or x.shape[1] < 1 or x.shape[2] != self.input_size:
            raise ValueError(f"the input is (batch, time ≥ 1, {self.input_size}), not {tuple(x.shape)}")
        batch, time, _ = x.shape
        if lengths is not None:
            if lengths.shape != (batch,) or lengths.is_floating_point():
                given_lengths = f"{lengths.dtype} of shape {tuple(lengths.shape)}"
                raise ValueError(f"the lengths are integers of shape ({batch},), not {given_lengths}")
            readable = lengths.device.type == "cpu" and not torch.compiler.is_compiling()
            if readable and not bool(((lengths >= 0) & (lengths <= time)).all()):
                raise ValueError(f"the lengths go from 0 to the {time} steps of the input, not {lengths.tolist()}")
        state_shapes = [(batch, self.hidden_size), (batch, self.memory_size)]
        if state is not None and [tuple(part.shape) for part in state] != state_shapes:
            raise ValueError(
                f"the state's h and m are of shape {state_shapes}, not {[tuple(part.shape) for part in state]}"
            )

    def _transition(self, device: torch.device) -> Tensor:
        dtype = torch.promote_types(self.W_x.dtype, torch.float32)
        return transition(self.memory_size, float(self.theta), CHUNK).to(device, dtype, copy=True)

    def converted(self) -> None:
        # Converted from float32 it would keep float32's rounding, and from a device without data nothing at all.
        self.transition = self._transition(self.transition.device)
