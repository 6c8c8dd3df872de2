"""From reduced gradient sums to new weights: denominator, finiteness, clipping, optimizer, all without a host sync."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lockstep._compat.torch import amp_unscale_, compiler_not_imported, foreach_mul_, foreach_norm, takes_found_inf
from lockstep.config import AveragingConfig
from lockstep.engine.optim import optimizers
from lockstep.engine.optim.averages import Averages
from lockstep.engine.optim.fused_adam import AdamKernel
from lockstep.engine.optim.precision import Precision
from lockstep.engine.partition import Divided
from lockstep.engine.rank_context import RankContext
from lockstep.engine.task import Scheduler, Task
from lockstep.engine.trained import bare
from lockstep.errors import TaskError, many
from lockstep.planning import Schedule


def match_layouts(optimizer: Optimizer) -> None:
    """Lay out restored states in memory as their parameters are.

    A checkpoint keeps values, row by row. A fused optimizer reads a parameter and its moments in the order
    of memory, so with weights of another layout (``channels_last``) it would mix up their elements.
    """
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, Tensor) or not isinstance(state, dict):
            continue  # some optimizers keep more than torch's
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _check_restored(optimizer: Optimizer) -> None:
    """Raise :class:`ValueError` where a restored state cannot be one of torch's Adam, AdamW or SGD.

    Their ``load_state_dict`` takes anything; the first step would fail, in native code perhaps.
    """
    adam = {"step", "exp_avg", "exp_avg_sq"}
    expected = {Adam: adam, AdamW: adam, SGD: set[str]()}.get(type(optimizer))
    if expected is None:
        return
    defaults = {**optimizer.defaults, "initial_lr": 0.0}
    for group, (name, default) in product(optimizer.param_groups, defaults.items()):
        if not _is_like(group.get(name), default):
            raise ValueError(f"the optimizer's {name} is {str(group.get(name))[:80]}")
    for parameter, state in optimizer.state.items():
        missing = expected - state.keys()
        if missing:
            raise ValueError(f"the optimizer's state lacks {', '.join(sorted(missing))}")
        for name, value in state.items():
            fits = value is None if not isinstance(value, Tensor) else value.shape in (parameter.shape, torch.Size())
            if not fits or (name == "step" and value.dim()):
                raise ValueError(f"the optimizer's {name} does not fit a parameter of shape {tuple(parameter.shape)}")


def _is_like(value: Any, default: Any) -> bool:
    """Whether ``value`` may be the setting of an optimizer whose default is ``default``."""
    if isinstance(default, (tuple, list)):
        return isinstance(value, (tuple, list)) and len(value) == len(default) and all(map(_is_like, value, default))
    if default is None or isinstance(default, bool):
        return value is None or isinstance(value, bool)
    return isinstance(value, (int, float, Tensor))


def _dense(parameter: nn.Parameter) -> Tensor:
    """The numbers of the gradient, real and without the zeros of a sparse one; it shares their memory."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        parameter.grad = gradient = gradient.coalesce()
        return gradient.values()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


class Update:
    """Applies one step. Gradients arrive as sums times ``precision.seed()``; they are multiplied once.

    A step whose gradients are not all finite leaves the weights as they are. The decision is taken from
    reduced values, so it is the same on every rank. On a GPU nothing waits for the host: the fused
    optimizer itself leaves such a step out. On a CPU plain numbers are cheaper than tensors.

    Args:
        optimizer: made with the rates before scaling; those of all groups follow the schedule.
        divided: the model, where this process or its devices have parts of it.
        scheduler: sets the rates of all groups, instead of ``schedule``. Without both the caller sets them.
        mode: whether the monitored metric is best at its ``min`` or ``max``, for schedule ``plateau``.
        averages: of the weights; :meth:`state_dict` is called while they are in use.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        schedule: Schedule | None,
        precision: Precision,
        max_norm: float | None,
        divided: Divided | None = None,
        scheduler: Scheduler | None = None,
        mode: Literal["min", "max"] = "min",
        averages: Averages | None = None,
    ) -> None:
        self.optimizer, self.precision, self.max_norm, self.divided = optimizer, precision, max_norm, divided
        self.averages = averages or Averages(AveragingConfig(), model, 0)
        self._schedule, self._scheduler = schedule, scheduler
        #: Of a factor by which the schedule's rate is multiplied.
        self._plateau: ReduceLROnPlateau | None = None
        if schedule is not None and schedule.name == "plateau" and scheduler is None:
            settings: dict[str, Any] = {"factor": schedule.gamma, "patience": schedule.patience}
            least, factor = min(1.0, schedule.min_lr / schedule.lr), SGD([torch.zeros(1)], lr=1.0)
            self._plateau = ReduceLROnPlateau(factor, mode, min_lr=least, **settings)
        # Frozen ones too: they may be unfrozen, and have no gradient until then.
        self._parameters = list(model.parameters()) if divided is None else divided.parameters()
        # A stage of a pipeline may have none.
        device = self._parameters[0].device if self._parameters else precision.seed().device
        # Where gradients are on several devices, what concerns all of them is a number on the host.
        self._several = len({p.device for p in self._parameters}) > 1
        self._on_host = device.type == "cpu" or self._several
        self._step = AdamKernel(optimizer)
        #: Whether gradients may be sparse or complex.
        self._unusual = bool(optimizers.sparse_layers(model)) or any(p.is_complex() for p in self._parameters)
        self._one_norm = len({(p.device, p.dtype) for p in self._parameters}) == 1
        self._fused = takes_found_inf(optimizer)
        self._found_inf, self._factor = torch.zeros((), device=device), torch.zeros((), dtype=torch.float64)
        self._skipped = torch.zeros((), device=device)
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self._named = dict(model.named_parameters())
        self._settings = optimizers.settings_of(optimizer)
        self._groups = len(optimizer.param_groups)
        #: Of the first group that has a rate, which is ``lr``.
        self._shown = next((n for n, group in enumerate(optimizer.param_groups) if group["initial_lr"]), 0)
        self._check_scheduler()
        self._set_lr(0)
        self.grad_norm: Tensor | float | None = None
        #: The weights may not change before it: a checkpoint is being copied.
        self.waits_for: torch.cuda.Event | None = None
        #: Called with reduced and divided gradients, before they are clipped.
        self.after_backward: Callable[[], None] | None = None

    @property
    def _needs_norm(self) -> bool:
        """Whether the update depends on the norm, which is otherwise only logged, and then changes nothing."""
        return self.max_norm is not None or self._several

    @property
    def skipped(self) -> int:
        """Steps so far that had no finite gradient; synchronises with a GPU."""
        return int(self._skipped)

    def apply(self, step: int, count: Tensor | float, divisor: float, *, want_norm: bool) -> None:
        """Finish the step that follows ``step`` finished ones.

        ``count``: over all ranks and micro-batches. ``divisor``: what the reduction divided the gradient sums by (ranks
        under DDP, else 1). ``want_norm``: compute the gradient norm even when nothing is clipped.
        """
        if self.waits_for is not None:
            self.waits_for.wait()
            self.waits_for = None
        self._set_lr(step)
        # With no items there is no gradient. A count on a GPU is not read for that.
        if (self._on_host or not isinstance(count, Tensor)) and not count:
            self.grad_norm = 0.0 if want_norm else self.grad_norm
        else:
            self._apply(count, divisor, want_norm)
        if self._scheduler is not None:
            self._advance("step")

    def _check_scheduler(self) -> None:
        if self._scheduler is not None and self._schedule is not None:
            optimizers.check_steps(self._scheduler, self._schedule)

    def end_epoch(self) -> None:
        self._advance("epoch")

    def judge(self, value: float) -> None:
        """Step what steps by the monitored metric, whose ``value`` is the same on every rank."""
        if self._plateau is not None:
            self._plateau.step(value)
        self._advance("metric", value)

    def _advance(self, interval: str, *value: Any) -> None:
        """Step a scheduler of the task's that steps by ``interval``."""
        if self._scheduler is not None and self._scheduler.interval == interval:
            optimizers.advance(self._scheduler, *value)

    def _apply(self, count: Tensor | float, divisor: float, want_norm: bool) -> None:
        counted = count if isinstance(count, Tensor) else None
        gradients = self._gradients()
        if self.after_backward is not None:
            # Divide now what is otherwise divided as it is clipped.
            seed = self.precision.seed_value() if self._on_host else self.precision.seed()
            foreach_mul_(gradients, divisor / (seed * (float(count) if self._on_host else count)))
            count, divisor = 1.0 / self.precision.seed_value(), 1.0
            self.after_backward()
            gradients = self._gradients()
        if self._on_host:
            self._apply_on_host(gradients, float(count), divisor, want_norm)
        else:
            self._apply_on_device(gradients, count, divisor, want_norm, None if counted is None else counted != 0)

    def _gradients(self) -> list[Tensor]:
        gradients: list[Tensor]
        if self._unusual:
            gradients = [_dense(p) for p in self._parameters if p.grad is not None]
        else:
            gradients = [p.grad for p in self._parameters if p.grad is not None]
        return gradients if self.divided is None else self.divided.local(gradients)

    def _apply_on_host(self, gradients: list[Tensor], count: float, divisor: float, want_norm: bool) -> None:
        factor = divisor / (self.precision.seed_value() * count)
        norm = self._norm(gradients).item() * factor if want_norm or self._needs_norm else None
        self.grad_norm = self.grad_norm if norm is None else norm
        if norm is not None and self._needs_norm:
            found = not math.isfinite(norm)
            if self.max_norm is not None and not found:
                factor *= min(1.0, self.max_norm / (norm + 1e-6))
            if not found:
                foreach_mul_(gradients, factor)
        elif math.isfinite(factor):
            self._found_inf.zero_()
            found = self._unscale(gradients, self._factor.fill_(factor)).item() != 0
        else:
            found = True
        if found:
            self._skipped += 1
        else:
            self._step()
        if not self.precision.is_full:
            self.precision.update(self._found_inf.fill_(float(found)))

    def _apply_on_device(
        self,
        gradients: list[Tensor],
        count: Tensor | float,
        divisor: float,
        want_norm: bool,
        counted: Tensor | None,
    ) -> None:
        """``counted``: whether there were items, where the host does not know."""
        # Σ count = 0 gives inf, then NaN gradients, then a skipped step, on every rank alike.
        factor = divisor / (self.precision.seed() * count)
        if want_norm or self._needs_norm:
            norm = self._norm(gradients) * factor
            self.grad_norm = norm if counted is None else torch.where(counted, norm, 0.0)
            if self.max_norm is not None:
                factor = factor * (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
                factor = torch.where(torch.isfinite(norm), factor, torch.nan)
        # The kernel tests what it reads, not what it writes: a count of 0 makes the factor infinite.
        self._found_inf.copy_(~torch.isfinite(factor))
        found = self._unscale(gradients, factor)
        if self._fused:
            self._step(found)
        elif not found.item():
            self._step()
        self._skipped += found if counted is None else found * counted
        self.precision.update(found, counted)

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        """The global L2 norm; as ``get_total_norm``, which first sorts the tensors by device and dtype."""
        if self.divided is not None:
            return self.divided.total_norm(gradients)
        if not self._one_norm or not gradients:
            return torch.nn.utils.get_total_norm(gradients)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(foreach_norm(gradients, 2.0)))
        return norm

    def _unscale(self, gradients: list[Tensor], factor: Tensor) -> Tensor:
        """Multiply by ``factor``, and note a gradient that is not finite: one pass, in GradScaler's own kernel."""
        if gradients:
            amp_unscale_(gradients, self._found_inf, factor)
        if self.divided is not None:
            self.divided.agree(self._found_inf)
        return self._found_inf

    def _set_lr(self, step: int) -> None:
        groups = self.optimizer.param_groups
        if len(groups) != self._groups:
            self._adopt_groups()
        if self._scheduler is None and self._schedule is not None:
            lr, base_lr = self._schedule.at(step), self._schedule.base_lr
            lr = lr if self._plateau is None else lr * self._plateau.optimizer.param_groups[0]["lr"]
            for group in groups:
                group["lr"] = lr * (group["initial_lr"] / base_lr)
        self.lr = float(groups[self._shown]["lr"])

    def _adopt_groups(self) -> None:
        """Train groups that a hook has added; their learning rate is one before scaling, as in all groups."""
        groups = self.optimizer.param_groups
        optimizers.check_belongs(self.optimizer, self._named)
        if self._scheduler is not None:
            what = "a parameter group was added to an optimizer whose scheduler has one rate for each group before"
            fix = "make all groups in Task.optimizer(); frozen parameters in them are left alone until unfrozen"
            raise TaskError(what, fix=fix)
        for group in groups[self._groups :]:
            group.setdefault("initial_lr", group["lr"])
        self._groups = len(groups)

    def state_dict(self) -> dict[str, Any]:
        with compiler_not_imported():
            optimizer = self.optimizer.state_dict()
        plateau, found = self._plateau, None
        if plateau is not None:
            factor = float(plateau.optimizer.param_groups[0]["lr"])
            found = {"factor": factor, "best": float(plateau.best), "bad": plateau.num_bad_epochs}
        return {
            "optimizer": optimizer,
            "names": None if self.divided is not None else optimizers.names_of(self.optimizer, self._named),
            "settings": self._settings,
            "precision": self.precision.state_dict(),
            "skipped": self.skipped,
            "scheduler": None if self._scheduler is None else self._scheduler.scheduler.state_dict(),
            "averages": self.averages.trained(),
            "plateau": found,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        optimizer = state["optimizer"]
        with compiler_not_imported():
            if self.divided is not None:
                optimizer = self.divided.divided_state(optimizer, self.optimizer)
            else:
                optimizer = optimizers.fitted(optimizer, state.get("names"), self.optimizer, self._named)
            self.optimizer.load_state_dict(optimizer)
        _check_restored(self.optimizer)
        match_layouts(self.optimizer)
        scheduler, plateau, keep = state.get("scheduler"), state.get("plateau"), tuple[str, ...]()
        if scheduler is not None and self._scheduler is not None:
            self._scheduler.scheduler.load_state_dict(scheduler)
            self._check_scheduler()  # its number of steps is that of the checkpoint now
            keep = ("lr", "initial_lr")
        self.averages.restore(state.get("averages"))
        if self._plateau is not None and plateau is not None:
            self._plateau.optimizer.param_groups[0]["lr"] = plateau["factor"]
            self._plateau.best, self._plateau.num_bad_epochs = plateau["best"], plateau["bad"]
        optimizers.restore_changed(self.optimizer, self._settings, state.get("settings"), keep=keep)
        self._groups = len(self.optimizer.param_groups)
        self.precision.load_state_dict(state["precision"])
        self._skipped.fill_(state["skipped"])


def build_update(
    rank: RankContext, task: Task, model: nn.Module, divided: Divided | None, *, validates: bool
) -> Update:
    """The update of ``model``, which is on its device. ``validates``: the run has evaluations."""
    config, plan = rank.config, rank.plan
    with compiler_not_imported():
        own = task.optimizer(bare(model))
        optimizer = own or optimizers.build_optimizer(config.optimizer, model, plan.schedule.base_lr, task)
    optimizers.check_optimizer(optimizer, model)
    optimizers.check_sparse(model, reduced=not plan.strategy.one_process or plan.reproducibility == "exact")
    if type(task).scheduler is not Task.scheduler:
        for group in optimizer.param_groups:
            group["lr"] *= plan.schedule.scale
    scheduler = optimizers.scheduler_of(task, optimizer)
    if scheduler is not None and scheduler.interval == "metric" and not validates:
        fix = "return validation data from datasets(), or a scheduler that steps by step or epoch"
        raise TaskError("the task's scheduler steps by a metric, and there is no validation data", fix=fix)
    if scheduler is not None and isinstance(one := scheduler.scheduler, ReduceLROnPlateau) and one.mode != plan.mode:
        raise TaskError(
            f"the task's scheduler has mode {one.mode!r}, and {plan.monitor} is best at its {plan.mode}",
            why="it steps by the monitored metric, and would lower the rate while that improves",
            fix=f"use mode={plan.mode!r}, or monitor the metric that it is for: --set checkpoint.monitor=val_…",
        )
    if divided is not None:
        divided.adopt(optimizer)
    precision = Precision(plan.placement["precision"], rank.device, plan.pre_scale)
    averages = Averages(config.averaging, model, plan.total_steps, optimizer)
    clip = config.training.max_grad_norm
    return Update(model, optimizer, plan.schedule, precision, clip, divided, scheduler, plan.mode, averages)


def untrained_note(update: Update, model: nn.Module, max_norm: float | None) -> str | None:
    """A note where parameters of ``model`` are in no group of the optimizer."""
    known = {id(parameter) for group in update.optimizer.param_groups for parameter in group["params"]}
    names = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in known]
    if not names:
        return None
    some = ", ".join([*names[:3], *(["…"] if len(names) > 3 else [])])
    clipped = "" if max_norm is None else "; their gradients count in the norm that training.max_grad_norm limits"
    return f"{many(len(names), 'parameter')} in no group of the optimizer, so not trained: {some}{clipped}"
