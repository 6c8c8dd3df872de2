"""The Legendre delay system: the linear memory of an LMU, in float64 on the CPU.

The state ``m`` (order d) of ``θ dm/dt = Ā m + B̄ u`` holds the last θ steps of the scalar input ``u`` as
coefficients of shifted Legendre polynomials, each of maximum 1 on the window: ``u(t-θ')`` is about
``Σ_i m_i P_i(2θ'/θ - 1)`` (Voelker, Kajić and Eliasmith 2019, "Legendre Memory Units", equations 1–3).
"""

from __future__ import annotations

import torch
from torch import Tensor


def delay_system(order: int, theta: float) -> tuple[Tensor, Tensor]:
    """The continuous system ``dm/dt = A m + B u``, time in steps: A of shape (order, order), B of (order,).

    ``A_ij = (2i+1)/θ · (-1 if i < j else (-1)^(i-j+1))`` and ``B_i = (2i+1)/θ · (-1)^i`` (equation 2 of
    Voelker et al. 2019).
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
    joint[:order, :order], joint[:order, order] = a, b
    joint = torch.linalg.matrix_exp(joint)
    return joint[:order, :order], joint[:order, order]


def transition(order: int, theta: float, steps: int) -> Tensor:
    """What ``steps`` steps do: row k of shape (order, order + steps) maps ``[m, u_0, u_1, …]`` to the memory after u_k.

    Row k is ``[A^(k+1), A^k B, …, A B, B, 0, …]``. Shape (steps, order, order + steps).
    """
    a, b = zero_order_hold(*delay_system(order, theta))
    rows = a.new_zeros(steps, order, order + steps)
    rows[0, :, :order], rows[0, :, order] = a, b
    for k in range(1, steps):
        rows[k] = a @ rows[k - 1]
        rows[k, :, order + k] = b
    return rows
