"""Learning rate against global batch."""

from __future__ import annotations

import math
from typing import Literal

Scaling = Literal["none", "linear", "sqrt"]


def scale_lr(lr: float, scaling: Scaling, *, global_batch: int, base_batch: int) -> tuple[float, str, str | None]:
    """The learning rate that runs, why, and a note when the user should think about it.

    ``linear``: lr × global / base (Goyal et al. 2017, https://arxiv.org/abs/1706.02677; for SGD).
    ``sqrt``: lr × √(global / base) (Krizhevsky 2014, https://arxiv.org/abs/1404.5997; for Adam see
    Malladi et al. 2022, https://arxiv.org/abs/2205.10287). ``none``: lr as given.

    Args:
        lr: for a global batch of ``base_batch`` samples.
        global_batch: samples per optimizer step.
        base_batch: samples per optimizer step that ``lr`` was tuned for.
    """
    ratio = global_batch / base_batch
    if scaling == "linear":
        return lr * ratio, f"{lr:g} × {global_batch}/{base_batch} (linear scaling)", None
    if scaling == "sqrt":
        return lr * math.sqrt(ratio), f"{lr:g} × √({global_batch}/{base_batch}) (square-root scaling)", None
    note = None
    if ratio > 1:
        note = (
            f"The global batch is {global_batch}, {ratio:g} × {base_batch}. The learning rate stays {lr:g}; "
            f"linear scaling would set {lr * ratio:g} (--lr-scaling linear), with warm-up."
        )
    return lr, "as configured; never changed silently", note
