"""Pure arithmetic on measured communication: bandwidths, the α–β model, slow links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
#: A link with less than this share of the upper quartile of all bandwidths is slow.
SLOW_LINK = 0.6


def bus_factor(operation: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth: what travels over each rank's line for a byte of the message.

    Source: nccl-tests, doc/PERFORMANCE.md. The size of a message is that of the whole result (all-gather) or of the
    whole input (reduce-scatter), as there.
    """
    ring = (ranks - 1) / ranks
    return {"all_reduce": 2 * ring, "all_gather": ring, "reduce_scatter": ring, "broadcast": 1.0}[operation]


class Fit(NamedTuple):
    """t = α + β·bytes. ``alpha_s``: latency; ``beta_s_per_byte``; ``error``: the median relative error of the fit."""

    alpha_s: float
    beta_s_per_byte: float
    error: float

    def seconds(self, size: float) -> float:
        return self.alpha_s + self.beta_s_per_byte * size


def fit_alpha_beta(sizes: Sequence[float], seconds: Sequence[float]) -> Fit:
    """The α–β model (Hockney 1994, https://doi.org/10.1016/S0167-8191(06)80021-9) that fits best, none negative.

    Least squares of *relative* errors, since sizes span orders of magnitude: each equation is divided by its time.

    Args:
        sizes, seconds: at least two different sizes; times above 0.
    """
    s, t = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    scale = s.max()
    rows = np.stack([1 / t, s / scale / t], axis=1)
    alpha, beta = np.linalg.lstsq(rows, np.ones_like(t), rcond=None)[0]
    if alpha < 0 or beta < 0:
        # The least on the border of the allowed region: one of the two is nought.
        column = 1 if alpha < 0 else 0
        only = float(rows[:, column].sum() / (rows[:, column] ** 2).sum())
        alpha, beta = (0.0, only) if column else (only, 0.0)
    fit = Fit(float(alpha), float(beta / scale), 0.0)
    errors = np.abs(fit.alpha_s + fit.beta_s_per_byte * s - t) / t
    return fit._replace(error=float(np.median(errors)))


def slow_links(bandwidths: Mapping[tuple[int, int], float]) -> tuple[list[int], list[tuple[int, int]]]:
    """Ranks all of whose links are slow, and slow links between other ranks.

    Args:
        bandwidths: of each pair of ranks.
    """
    if len(bandwidths) < 3:
        return [], []  # with two ranks there is nothing to compare
    # One slow rank of three or four makes half of the links slow or more, so the median says little.
    usual = float(np.quantile(list(bandwidths.values()), 0.75, method="higher"))
    slow = {pair for pair, bandwidth in bandwidths.items() if bandwidth < SLOW_LINK * usual}
    ranks = sorted({rank for pair in bandwidths for rank in pair})
    culprits = [rank for rank in ranks if all(pair in slow for pair in bandwidths if rank in pair)]
    rest = sorted(pair for pair in slow if not set(pair) & set(culprits))
    return culprits, rest


def message_sizes(most: int) -> list[int]:
    """Bytes: 1 KB, then times 4, up to ``most``."""
    sizes = [1024]
    while sizes[-1] * 4 <= most:
        sizes.append(sizes[-1] * 4)
    return sizes
