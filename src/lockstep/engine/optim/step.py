"""From reduced gradient sums to new weights: denominator, finiteness, clipping, optimizer, all without a host sync."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lockstep._compat.torch import amp_unscale_, compiler_not_imported, foreach_mul_, foreach_norm, takes_found_inf
from lockstep.config import AveragingConfig
from lockstep.engine.optim import optimizers
from lockstep.engine.optim.averages import Averages
from lockstep.engine.optim.fused_adam import AdamKernel
from lockstep.engine.optim.groups import StoredOptimizer
from lockstep.engine.optim.precision import Precision
from lockstep.engine.optim.rates import Rates, scheduler_of
from lockstep.engine.partition import Divided
from lockstep.engine.rank_context import RankContext
from lockstep.engine.task import Task
from lockstep.engine.trained import bare
from lockstep.errors import TaskError, many


def _dense(parameter: nn.Parameter) -> Tensor:
    """Return the numbers of the gradient, real and without the zeros of a sparse one; it shares their memory."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        parameter.grad = gradient = gradient.coalesce()
        return gradient.values()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def _clipping(norm: Tensor | float, max_norm: float) -> Tensor | float:
    """Return the factor that limits a gradient of this norm to ``max_norm``; NaN where the norm is not finite."""
    if isinstance(norm, float):
        return min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else math.nan
    return torch.where(torch.isfinite(norm), (max_norm / (norm + 1e-6)).clamp(max=1.0), torch.nan)


class Gradients:
    """The gradients of ``parameters`` on this process. ``divided``: the model, of which it has parts."""

    def __init__(self, parameters: Sequence[nn.Parameter], divided: Divided | None) -> None:
        self._parameters = parameters
        self._divided = divided
        self._has_complex = any(parameter.is_complex() for parameter in parameters)
        self._one_norm = len({(p.device, p.dtype) for p in parameters}) == 1

    def tensors(self) -> list[Tensor]:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if self._has_complex or any(gradient.is_sparse for gradient in gradients):
            gradients = [_dense(p) for p in self._parameters if p.grad is not None]
        return gradients if self._divided is None else self._divided.local(gradients)

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Compute the global L2 norm; ``get_total_norm`` would first sort the tensors by device and dtype."""
        if self._divided is not None:
            return self._divided.total_norm(gradients)
        if not self._one_norm or not gradients:
            return torch.nn.utils.get_total_norm(gradients)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(foreach_norm(gradients, 2.0)))
        return norm


class Update:
    """Applies one step. Gradients arrive as sums times ``precision.seed()``; they are multiplied once.

    A step whose gradients are not all finite leaves the weights as they are. The decision is taken from
    reduced values, so it is the same on every rank. On a GPU nothing waits for the host: the fused
    optimizer itself leaves such a step out. On a CPU plain numbers are cheaper than tensors.

    Args:
        named: parameters by name, frozen ones too: they may be unfrozen, and have no gradient until then.
        divided: the model, of which this process or its devices have parts.

    Attributes:
        averages: of the weights; :meth:`state_dict` is called while they are in use.
        waits_for: the weights may not change before this event: a checkpoint is being copied.
        after_backward: called with reduced and divided gradients, before they are clipped.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        rates: Rates,
        precision: Precision,
        max_norm: float | None,
        divided: Divided | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.rates = rates
        self.precision = precision
        self.max_norm = max_norm
        self.divided = divided
        self.averages = Averages(AveragingConfig(), nn.Module(), 0)
        self._stored = StoredOptimizer(optimizer, named, divided)
        parameters = list(named.values()) if divided is None else divided.parameters()
        self._gradients = Gradients(parameters, divided)
        # A stage of a pipeline may have none.
        device = parameters[0].device if parameters else precision.seed().device
        self._on_host = device.type == "cpu"
        self._step = AdamKernel(optimizer)
        self._fused = takes_found_inf(optimizer)
        self._found_inf = torch.zeros((), dtype=torch.float32, device=device)
        self._skipped = torch.zeros((), dtype=torch.float32, device=device)
        self._factor = torch.zeros((), dtype=torch.float64, device=device)
        self.grad_norm: Tensor | float | None = None
        self.waits_for: torch.cuda.Event | None = None
        self.after_backward: Callable[[], None] | None = None

    @property
    def skipped(self) -> int:
        """Steps so far that had no finite gradient; synchronises with a GPU."""
        return int(self._skipped)

    def apply(self, step: int, count: Tensor | float, divisor: float, *, want_norm: bool) -> None:
        """Finish the step that follows ``step`` finished ones.

        ``count``: over all ranks and micro-batches. ``divisor``: the divisor of the gradient sums in the reduction
        (ranks under DDP, else 1). ``want_norm``: compute the gradient norm even when nothing is clipped.
        """
        if self.waits_for is not None:
            self.waits_for.wait()
            self.waits_for = None
        self.rates.set(step)
        items = float(count) if self._on_host else count
        # With no items there is no gradient. A count on a GPU is not read for that.
        if not isinstance(items, Tensor) and not items:
            self.grad_norm = 0.0 if want_norm else self.grad_norm
        else:
            self._apply(items, divisor, want_norm)
        self.rates.advance("step")

    def _apply(self, count: Tensor | float, divisor: float, want_norm: bool) -> None:
        counted = count != 0 if isinstance(count, Tensor) else None  # whether there were items, if the host cannot know
        gradients = self._gradients.tensors()
        seed = self.precision.seed_value() if self._on_host else self.precision.seed()
        # Σ count = 0 gives inf, then NaN gradients, then a skipped step, on every rank alike.
        factor = divisor / (seed * count)
        if self.after_backward is not None:
            foreach_mul_(gradients, factor)  # otherwise they are divided as they are clipped
            factor = 1.0
            self.after_backward()
            gradients = self._gradients.tensors()
        if want_norm or self.max_norm is not None:
            total_norm = self._gradients.norm(gradients)
            norm = (total_norm.item() if self._on_host else total_norm) * factor
            self.grad_norm = norm if counted is None else torch.where(counted, norm, 0.0)
            if self.max_norm is not None:
                factor = factor * _clipping(norm, self.max_norm)
        found_inf = self._unscale(gradients, factor)
        if self._fused and not self._on_host:
            self._step(found_inf)
        elif not found_inf.item():
            self._step()
        self._skipped += found_inf if counted is None else found_inf * counted
        self.precision.update(found_inf, counted)

    def _unscale(self, gradients: list[Tensor], factor: Tensor | float) -> Tensor:
        """Multiply by ``factor``, and note a gradient that is not finite: one pass, in GradScaler's kernel."""
        if isinstance(factor, Tensor):
            # The kernel tests its input, not its output: a count of 0 makes the factor infinite.
            self._found_inf.copy_(~torch.isfinite(factor))
        else:
            self._found_inf.fill_(not math.isfinite(factor))
            factor = self._factor.fill_(factor)
        if gradients:
            amp_unscale_(gradients, self._found_inf, factor)
        if self.divided is not None and self.max_norm is None:  # else ranks have the norm of the whole gradient
            self.divided.agree(self._found_inf)
        return self._found_inf

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._stored.state_dict(),
            "precision": self.precision.state_dict(),
            "skipped": self.skipped,
            "averages": self.averages.trained(),
            **self.rates.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stored.load_state_dict(state)
        keep = ("lr", "initial_lr") if self.rates.load_state_dict(state) else ()
        self.averages.restore(state.get("averages"))
        self._stored.restore_changed(state, keep=keep)
        self.precision.load_state_dict(state["precision"])
        self._skipped.fill_(state["skipped"])


def build_update(
    rank: RankContext, task: Task, model: nn.Module, divided: Divided | None, *, validates: bool
) -> Update:
    """Build the update of ``model``, which is on its device. ``validates``: the run has evaluations."""
    config = rank.config
    plan = rank.plan
    with compiler_not_imported():
        optimizer = task.optimizer(bare(model))
        if optimizer is None:
            optimizer = optimizers.build_optimizer(config.optimizer, model, plan.schedule.base_lr)
    optimizers.check_optimizer(optimizer, model)
    optimizers.check_embeddings(model, reduced=not plan.strategy.one_process or plan.reproducibility == "exact")
    if type(task).scheduler is not Task.scheduler:
        for group in optimizer.param_groups:
            group["lr"] *= plan.schedule.scale
    scheduler = scheduler_of(task, optimizer)
    if scheduler is not None and scheduler.interval == "metric" and not validates:
        raise TaskError(
            "the task's scheduler steps by a metric, and there is no validation data",
            fix="return validation data from datasets(), or a scheduler that steps by step or epoch",
        )
    if scheduler is not None and isinstance(made := scheduler.scheduler, ReduceLROnPlateau) and made.mode != plan.mode:
        raise TaskError(
            f"the task's scheduler has mode {made.mode!r}, and {plan.monitor} is best at its {plan.mode}",
            why="it steps by the monitored metric, and would lower the rate while that improves",
            fix=f"use mode={plan.mode!r}, or monitor the metric that it is for: --set checkpoint.monitor=val_…",
        )
    if divided is not None:
        divided.adopt(optimizer)
    precision = Precision(plan.placement["precision"], rank.device, plan.pre_scale)
    averages = Averages(config.averaging, model, plan.total_steps, optimizer)
    named = dict(model.named_parameters())
    rates = Rates(optimizer, plan.schedule, named, scheduler=scheduler, mode=plan.mode)
    update = Update(named, optimizer, rates, precision, config.training.max_grad_norm, divided)
    update.averages = averages
    return update


def untrained_note(update: Update, model: nn.Module, max_norm: float | None) -> str | None:
    """Return a note where parameters of ``model`` are in no group of the optimizer."""
    trained_ids = {id(parameter) for group in update.optimizer.param_groups for parameter in group["params"]}
    names = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in trained_ids]
    if not names:
        return None
    some = ", ".join([*names[:3], *(["…"] if len(names) > 3 else [])])
    clipped = "" if max_norm is None else "; their gradients count in the norm that training.max_grad_norm limits"
    return f"{many(len(names), 'parameter')} in no group of the optimizer, so not trained: {some}{clipped}"
