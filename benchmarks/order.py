"""What the order of samples costs, in nanoseconds a position; the target is 1,000 at n = 10¹².

::

    python benchmarks/order.py            # speed
    python benchmarks/order.py --rounds   # why ten rounds: neighbours that stay neighbours (a minute)
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from lockstep.data import order
from lockstep.data.order import BLOCK, Order
from lockstep.data.sampling import BucketedOrder


def ns_per_position(samples: int, width: int, positions: int) -> float:
    """Consecutive slices of ``width`` positions from the middle of an epoch; the best of three epochs."""
    best = float("inf")
    for epoch in range(3):
        walk = Order(samples, seed=42)
        first = (samples - positions) // 2
        start = time.perf_counter()
        for position in range(first, first + positions, width):
            walk.slice(epoch, position, min(position + width, first + positions))
        best = min(best, time.perf_counter() - start)
    return best / positions * 1e9


def ns_per_bucketed_position(samples: int, width: int) -> float:
    walk = BucketedOrder(Order(samples, seed=42), np.random.default_rng(0).integers(1, 2000, samples), 8192, 32)
    start = time.perf_counter()
    for position in range(0, samples, width):
        walk.slice(0, position, min(position + width, samples))
    return (time.perf_counter() - start) / samples * 1e9


def kept_neighbours(samples: int, rounds: int, epochs: int) -> float:
    """How often positions p, p + 1 hold samples s, s + 1 (mod n), an epoch; 1 for a uniform order."""
    order.ROUNDS = rounds
    walk = Order(samples, seed=0)
    kept = sum(int((np.diff(walk.slice(epoch, 0, samples)) % samples == 1).sum()) for epoch in range(epochs))
    return kept / epochs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", action="store_true")
    if parser.parse_args().rounds:
        for rounds in (4, 6, 8, 10, 12):
            kept = kept_neighbours(1024, rounds, epochs=100_000)
            print(f"{rounds:2d} rounds: {kept:.3f} kept neighbours an epoch (± 0.003)")
        return
    for samples in (1_000, 100_000, 10**12, 2**62):
        positions = min(samples, 16 * BLOCK)
        for width in (32, 256, BLOCK):
            cost = ns_per_position(samples, width, positions)
            print(f"n = {samples:<20,d} slices of {width:>6,d}: {cost:7.1f} ns a position")
    cost = ns_per_bucketed_position(1_000_000, 256)
    print(f"length-bucketed, n = 1,000,000, slices of 256: {cost:.1f} ns a position")


if __name__ == "__main__":
    main()
