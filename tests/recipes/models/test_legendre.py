from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.signal import cont2discrete
from scipy.special import eval_legendre
from torch import Tensor

from lockstep.recipes.speech.lmu import delay_system, transition, zero_order_hold

thetas = st.floats(1.0, 3000.0)


def close(actual: Tensor, expected: Any, tolerance: float) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=tolerance)


@pytest.mark.parametrize("theta", [1.0, 7.3, 1000.0])
def test_orders_one_and_two_are_their_closed_forms(theta: float) -> None:
    a, b = zero_order_hold(*delay_system(1, theta))
    close(a, [[math.exp(-1 / theta)]], 1e-15)
    close(b, [1 - math.exp(-1 / theta)], 1e-15)
    # Order 2 has the eigenvalues (-2 ± i√2)/θ.
    n = np.array([[-1.0, -1.0], [3.0, -3.0]])
    root = math.sqrt(2)
    expected = np.cos(root / theta) * np.eye(2) + np.sin(root / theta) / root * (n + 2 * np.eye(2))
    expected *= math.exp(-2 / theta)
    a, b = zero_order_hold(*delay_system(2, theta))
    close(a, expected, 1e-15)
    close(b, np.linalg.solve(n, (expected - np.eye(2)) @ [1.0, -3.0]), 1e-14)


@pytest.mark.parametrize(
    ("order", "theta"), [(256, 1000.0), (256, 100.0), (256, 1.0), (128, 30.0), (64, 1000.0), (6, 4.0)]
)
def test_it_is_the_zero_order_hold_of_scipy(order: int, theta: float) -> None:
    a, b = delay_system(order, theta)
    expected_a, expected_b, *_ = cont2discrete(
        (a.numpy(), b.numpy()[:, None], np.eye(order), np.zeros((order, 1))), 1.0
    )
    actual_a, actual_b = zero_order_hold(a, b)
    assert actual_a.dtype == torch.float64
    close(actual_a, expected_a, 1e-10)
    close(actual_b, expected_b[:, 0], 1e-10)


@settings(max_examples=30)
@given(order=st.integers(1, 256), theta=thetas)
def test_a_constant_input_is_held_for_ever(order: int, theta: float) -> None:
    """The constant 1 is the first Legendre polynomial: its memory is (1, 0, 0, …), and stays so."""
    a, b = zero_order_hold(*delay_system(order, theta))
    constant = torch.eye(order, dtype=torch.float64)[0]
    close(a @ constant + b, constant, 1e-10)


def test_the_memory_is_the_window_in_legendre_polynomials() -> None:
    order, theta = 24, 200.0
    a, b = zero_order_hold(*delay_system(order, theta))
    signal = torch.sin(torch.arange(1000, dtype=torch.float64) / 37)
    m = torch.zeros(order, dtype=torch.float64)
    for u in signal:
        m = a @ m + b * u
    delays = torch.arange(0, 201, 20)
    decoded = eval_legendre(np.arange(order), 2 * delays.numpy()[:, None] / theta - 1) @ m.numpy()
    # A step's input is held for the step: on average half a step late.
    held = torch.sin((999 - delays + 0.5) / 37)
    close(torch.as_tensor(decoded), held, 0.02)


@pytest.mark.parametrize("theta", [100.0, 1000.0])
def test_order_256_forgets_and_does_not_grow(theta: float) -> None:
    """Were rounding to break the stability, powers would explode or last."""
    a, _ = zero_order_hold(*delay_system(256, theta))
    norms = []
    for _ in range(12):  # A, A², A⁴, … A²⁰⁴⁸
        norms.append(float(torch.linalg.matrix_norm(a, 2)))
        a = a @ a
    assert max(norms) < 20
    assert norms[-1] < 0.01


@settings(max_examples=30)
@given(order=st.integers(1, 40), theta=thetas, steps=st.integers(1, 20), seed=st.integers(0, 99))
def test_a_row_of_the_transition_is_as_many_single_steps(order: int, theta: float, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    m, u = (torch.randn(n, dtype=torch.float64, generator=generator) for n in (order, steps))
    start = torch.cat([m, u])
    a, b = zero_order_hold(*delay_system(order, theta))
    for row, value in zip(transition(order, theta, steps), u, strict=True):
        m = a @ m + b * value
        close(row @ start, m, 1e-11)
