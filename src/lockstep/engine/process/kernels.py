"""How float32 is computed on a GPU, and how its memory is reserved: set on entry, restored on exit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

#: The second is the name before torch 2.9, still read.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@contextmanager
def float32_products(matmul: str | None, *, exact: bool = False, benchmark: bool = False) -> Iterator[None]:
    """Set torch's switches for float32 kernels.

    torch has two interfaces for them, and raises where it compiles and they disagree: ``fp32_precision`` alone sets
    the newer one. ``set_float32_matmul_precision`` and ``allow_tf32`` set both.

    Args:
        matmul: ``highest`` or ``high`` (TF32); ``None`` leaves it as it is.
        exact: deterministic kernels in float32, convolutions and recurrent layers included.
        benchmark: let cuDNN measure its algorithms.
    """
    cudnn: Any = torch.backends.cudnn
    newer: list[Any] = [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
    kept = [part.fp32_precision for part in newer]
    # Where the caller's own disagree, the older one cannot be read: it is the other of two values.
    allowed, older = kept[1] != "tf32", "highest" if kept[0] == "tf32" else "high"
    with suppress(RuntimeError):
        allowed = cudnn.allow_tf32
    with suppress(RuntimeError):
        older = torch.get_float32_matmul_precision()
    switches = cudnn.benchmark, cudnn.deterministic
    if matmul is not None or exact:
        torch.set_float32_matmul_precision("highest" if exact else matmul or "highest")
    if exact:
        cudnn.allow_tf32 = False
        cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "ieee"
    if exact or benchmark:
        cudnn.benchmark, cudnn.deterministic = benchmark and not exact, exact
    try:
        yield
    finally:
        if matmul is not None or exact:
            cudnn.allow_tf32 = allowed
            torch.set_float32_matmul_precision(older)
        for part, value in zip(newer, kept, strict=True):
            part.fp32_precision = value
        cudnn.benchmark, cudnn.deterministic = switches


@contextmanager
def expandable_segments(device: torch.device) -> Iterator[None]:
    """Let torch's GPU allocator grow its blocks, so that batches of many sizes leave fewer gaps.

    It reads the variable when a process first uses a GPU; whoever has set it wants something else.
    """
    sets = device.type == "cuda" and not torch.cuda.is_initialized() and not any(map(os.environ.get, _ALLOCATOR))
    if sets:
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"
    try:
        yield
    finally:
        if sets:
            os.environ.pop(_ALLOCATOR[0], None)
