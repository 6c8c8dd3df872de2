"""BatchNorm on several ranks: statistics of the whole batch.

torch's ``SyncBatchNorm`` needs a GPU. :class:`SyncedBatchNorm` runs on any device and over any backend, and lets a rank
without samples take part. Statistics travel as (count, mean, M2) with M2 = Σ (x - mean)², one all-gather a forward, and
are combined as in Chan, Golub and LeVeque, "Algorithms for computing the sample variance" (The American Statistician
37, 1983), which does not cancel as Σx² - (Σx)²/n does. All ranks combine the same rows in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lockstep._compat.torch import BatchNorm, check_input_dim
from lockstep.engine.distributed.staging import all_gather_rows, all_reduce, world_size
from lockstep.errors import RunError, UnsupportedError


def has_batchnorm(model: nn.Module) -> bool:
    """Return whether a BatchNorm layer of any kind is in ``model``, so that a sample's output depends on its batch."""
    return any(isinstance(module, BatchNorm) for module in model.modules())


class Statistics(NamedTuple):
    """Of a batch over all ranks: ``mean`` and biased ``var`` [C], and the number of ``values`` per channel []."""

    mean: Tensor
    var: Tensor
    values: Tensor


class SyncedBatchNorm(BatchNorm):
    """BatchNorm over the batches of all ranks; in evaluation an ordinary BatchNorm. Made by :func:`convert`.

    Input [N, C, …], where N differs between ranks and may be 0. A forward in training is collective, and so is its
    backward. Half-precision input keeps its type; its statistics are float32.
    """

    #: Joins the collectives with a count of zero and gives zero gradients; see :func:`ghost`.
    ghost: bool = False

    def forward(self, input: Tensor) -> Tensor:
        check_input_dim(self, input)
        if not self.training:
            # Ranks may evaluate different numbers of batches: no collective here.
            return super().forward(input)
        local = 0 if self.ghost else input.numel() // input.size(1)
        batch = self._gather(input, local)
        if local > 1 or self._has_variance(batch, input):
            self._track(batch)
        normalise = cast(Any, _Normalise.apply)
        output: Tensor = normalise(input, self.weight, self.bias, *batch, self.eps, local)
        return output

    @torch.no_grad()
    def _gather(self, input: Tensor, local: int) -> Statistics:
        """Combine the statistics of all ranks; ``local`` values per channel are here."""
        kind = torch.float32 if input.dtype in {torch.float16, torch.bfloat16} else input.dtype
        row = torch.zeros(1 + 2 * self.num_features, dtype=torch.float64, device=input.device)
        if local:
            # Two passes are as exact as torch.var_mean, and on a CPU five to seventeen times as fast.
            dims = [dim for dim in range(input.dim()) if dim != 1]
            mean = input.sum(dims, dtype=kind) / local
            spread = (input - _per_channel(mean, input)).square_().sum(dims)
            torch.cat([row.new_full((1,), local), mean, spread], out=row)
        rows = all_gather_rows(row, None)
        counts = rows[:, :1]
        means, spreads = rows[:, 1:].chunk(2, dim=1)
        values = counts.sum()
        # A batch without values has mean 0 and variance 0, not NaN.
        divisor = values.clamp(min=1)
        mean = (counts * means).sum(0) / divisor
        spread = (spreads + counts * (means - mean).square()).sum(0)
        return Statistics(mean.to(kind), (spread / divisor).to(kind), values)

    def _has_variance(self, batch: Statistics, input: Tensor) -> bool:
        """Return whether there are two values. It waits for the device, so only a rank that has fewer itself asks."""
        values = float(batch.values)
        if values == 1:
            ranks = world_size(None)
            raise RunError(
                f"BatchNorm cannot train on one value: {ranks} ranks have one for each channel together",
                why=f"the variance of one value is 0 (the input of this rank has the size {tuple(input.shape)}); where "
                "unreadable samples are left out, a step may have one readable sample",
                fix="repair the samples that skipped-rank*.jsonl of the run folder names, or raise the batch size",
            )
        return values > 1

    @torch.no_grad()
    def _track(self, batch: Statistics) -> None:
        """Update the running statistics as ``nn.BatchNorm`` does; the variance is the unbiased one."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        share = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                share = 1.0 / float(self.num_batches_tracked)
        unbiased = batch.var * (batch.values / (batch.values - 1))
        self.running_mean.mul_(1 - share).add_(batch.mean, alpha=share)
        self.running_var.mul_(1 - share).add_(unbiased, alpha=share)


class SyncedBatchNorm1d(SyncedBatchNorm, nn.BatchNorm1d):
    """Input [N, C] or [N, C, L]."""


class SyncedBatchNorm2d(SyncedBatchNorm, nn.BatchNorm2d):
    """Input [N, C, H, W]."""


class SyncedBatchNorm3d(SyncedBatchNorm, nn.BatchNorm3d):
    """Input [N, C, D, H, W]."""


class SyncedBatchNormNd(SyncedBatchNorm, nn.SyncBatchNorm):
    """In place of torch's ``SyncBatchNorm``: input [N, C, …]."""


_SYNCED: dict[type[BatchNorm], type[SyncedBatchNorm]] = {
    nn.BatchNorm1d: SyncedBatchNorm1d,
    nn.BatchNorm2d: SyncedBatchNorm2d,
    nn.BatchNorm3d: SyncedBatchNorm3d,
    nn.SyncBatchNorm: SyncedBatchNormNd,
}


class _Normalise(torch.autograd.Function):
    """y = (x - mean) / √(var + ε) · weight + bias, where mean and var depend on every rank's x.

    Backward (Ioffe and Szegedy, "Batch normalization", ICML 2015, section 3), with x̂ = (x - mean) / √(var + ε):
    dx = weight / √(var + ε) · (dy - Σ dy / n - x̂ · Σ dy·x̂ / n), where n and the sums are over all ranks. The
    gradients of weight and bias are this rank's part of the sum, as those of any other parameter.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        values: Tensor,
        eps: float,
        local: int,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, mean, var, values)
        ctx.eps = eps
        ctx.local = local
        if local == 0:
            # Of a ghost's input only the shape is used: it cannot bring a NaN along.
            constant = torch.zeros_like(input)
            return constant if bias is None else constant.add_(_per_channel(bias, input))
        scale, shift = (None if term is None else term.to(mean.dtype) for term in (weight, bias))
        return F.batch_norm(input, mean, var, scale, shift, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, var, values = ctx.saved_tensors
        wants_input, wants_weight, wants_bias, *unused = ctx.needs_input_grad
        inverse = torch.rsqrt(var + ctx.eps)
        sums = _sums(grad, input, mean, inverse) if ctx.local else mean.new_zeros(2 * mean.numel())
        grad_weight, grad_bias = sums.to(mean.dtype if weight is None else weight.dtype, copy=True).chunk(2)
        grad_input = None
        if wants_input:
            # All ranks come here or none does: it is a property of the model.
            products, totals = (all_reduce(sums, None) / values.clamp(min=1).to(sums.dtype)).chunk(2)
            if ctx.local:
                scale = inverse if weight is None else inverse * weight
                grad_input = F.batch_norm(
                    input.to(mean.dtype), mean, var, -scale * products, -scale * totals, training=False, eps=ctx.eps
                )
                grad_input = grad_input.addcmul_(grad, _per_channel(scale, input)).to(input.dtype)
            else:
                grad_input = torch.zeros_like(input)
        affine = (grad_weight if wants_weight else None, grad_bias if wants_bias else None)
        return (grad_input, *affine, *[None] * len(unused))


def _sums(grad: Tensor, input: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    """Compute [Σ dy·x̂, Σ dy] over this rank's values: [2 C]. torch's kernel takes one pass, and no memory."""
    output_mask = [False, True, True]
    _, products, totals = torch.ops.aten.native_batch_norm_backward(
        grad, input, torch.ones_like(mean), None, None, mean, inverse, True, 0.0, output_mask
    )
    return torch.cat([products, totals])


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    """Reshape [C] → [1, C, 1, …], to broadcast over ``like``."""
    return values.view(1, -1, *[1] * (like.dim() - 2))


def convert(module: nn.Module) -> nn.Module:
    """Make every BatchNorm layer in ``module`` a :class:`SyncedBatchNorm`; returns ``module``.

    Layers change class in place (as torch's lazy modules do), so hooks, shared layers and references to them held
    elsewhere stay valid, and ``isinstance(layer, nn.BatchNorm2d)`` stays true.
    """
    layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, BatchNorm)]
    for name, layer in layers:
        if _synced(type(layer)) is None:
            raise UnsupportedError(
                f"the BatchNorm layer {name or 'itself'!r} of class {type(layer).__name__} cannot be synchronised",
                why="only nn.BatchNorm1d, 2d, 3d and nn.SyncBatchNorm can: its forward may compute something else",
                fix="set distributed.sync_batchnorm to off, or use nn.BatchNorm1d, 2d or 3d",
            )
    for _, layer in layers:
        layer.__class__ = cast(type[SyncedBatchNorm], _synced(type(layer)))
    return module


def _synced(kind: type[BatchNorm]) -> type[SyncedBatchNorm] | None:
    """Return the synchronised class of ``kind``; one that adds to torch's, but inherits its forward, gets one here."""
    if issubclass(kind, SyncedBatchNorm):
        return kind
    base = next((base for base in _SYNCED if issubclass(kind, base) and kind.forward is base.forward), None)
    if base is not None and kind not in _SYNCED:
        _SYNCED[kind] = type(f"Synced{kind.__name__}", (_SYNCED[base], kind), {})
    return _SYNCED.get(kind)


@contextmanager
def ghost(module: nn.Module) -> Iterator[None]:
    """Forward passes in the body join the collectives of other ranks, but count nothing: for a rank without samples.

    Its layers contribute a count of zero and zero gradient sums, their output is the bias, and no gradient leaves them
    backwards. The backward pass may run after the body.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, SyncedBatchNorm)]
    before = [layer.ghost for layer in layers]
    for layer in layers:
        layer.ghost = True
    try:
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer.ghost = was
