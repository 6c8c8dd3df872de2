"""From reduced gradient sums to new weights: denominator, finiteness, clipping, optimizer, all without a host sync."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lockstep.config import OptimizerConfig
from lockstep.engine.precision import Precision
from lockstep.plan import Schedule


def build_optimizer(config: OptimizerConfig, model: nn.Module, lr: float) -> Optimizer:
    """The configured optimizer over all trainable parameters, fused where torch has a fused kernel."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    fused = all(p.device.type in {"cpu", "cuda"} and p.is_floating_point() for p in parameters)
    if config.name == "sgd":
        return SGD(
            parameters,
            lr=lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            nesterov=config.nesterov,
            fused=fused,
        )
    kind = AdamW if config.name == "adamw" else Adam
    return kind(parameters, lr=lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=fused)


class Update:
    """Applies one step. Gradients arrive as sums times ``precision.seed()``; they are multiplied once.

    A step whose gradients are not all finite leaves the weights as they are. The decision is taken from
    reduced values, so it is the same on every rank. On a GPU it is taken by the fused optimizer itself.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, schedule: Schedule, precision: Precision, max_norm: float | None
    ) -> None:
        self.optimizer = optimizer
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._schedule = schedule
        self._precision = precision
        self._max_norm = max_norm
        self._device = self._parameters[0].device
        self._found_inf = torch.zeros((), device=self._device)
        self.skipped = torch.zeros((), dtype=torch.float64, device=self._device)
        self._asks_host = self._device.type == "cpu" or not getattr(optimizer, "_step_supports_amp_scaling", False)
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.lr = schedule.at(0)
        self.grad_norm: Tensor | None = None

    def apply(self, step: int, count: Tensor | float, divisor: float, *, want_norm: bool) -> None:
        """Finish the step that follows ``step`` finished ones.

        Args:
            count: Σ count over all ranks and micro-batches.
            divisor: what the reduction divided the gradient sums by (ranks under DDP, else 1).
            want_norm: compute the gradient norm even when nothing is clipped.
        """
        self._set_lr(step)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        # Σ count = 0 gives inf, then NaN gradients, then a skipped step, on every rank alike.
        factor = divisor / (self._precision.seed() * count)
        self._found_inf.zero_()
        if self._max_norm is not None or want_norm:
            norm = torch.nn.utils.get_total_norm(gradients) * factor
            self.grad_norm = norm
            if self._max_norm is not None:
                factor = factor * (self._max_norm / (norm + 1e-6)).clamp(max=1.0)
        if gradients:
            # torch.amp.GradScaler's own kernel: multiply and test for inf and NaN in one pass.
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._found_inf, factor.float())
        self._step_unless_found()
        self.skipped += self._found_inf
        self._precision.update(self._found_inf)

    def _step_unless_found(self) -> None:
        if self._asks_host:
            if not self._found_inf.item():
                self.optimizer.step()
            return
        self.optimizer.found_inf = self._found_inf  # type: ignore[attr-defined]
        self.optimizer.grad_scale = None  # type: ignore[attr-defined]
        self.optimizer.step()

    def _set_lr(self, step: int) -> None:
        self.lr = self._schedule.at(step)
        share = self.lr / self._schedule.lr
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * share

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "precision": self._precision.state_dict(), "skipped": float(self.skipped)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        initial = [group["initial_lr"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, lr in zip(self.optimizer.param_groups, initial, strict=True):
            group["initial_lr"] = lr
        self._precision.load_state_dict(state["precision"])
        self.skipped.fill_(state["skipped"])
