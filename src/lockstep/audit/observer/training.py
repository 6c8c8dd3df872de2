"""Observe training: backward passes, gradients, optimizer steps, `DistributedDataParallel`, clipping, scaling."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lockstep._compat.observation import loss_term
from lockstep._compat.torch import BatchNorm, foreach_norm
from lockstep.audit.observer.loaders import LoaderObserver
from lockstep.audit.observer.record import Recorder, script_line

#: Steps that are all recorded in full; after them one of ``EVERY``, and those near the end of a pass.
FIRST_STEPS = 16
EVERY = 16
LAST_BATCHES = 4
#: Parameters whose gradients are sampled, and entries of each.
MAX_PARAMETERS = 16
ENTRIES = 8
#: Training passes after which the script is ended.
MAX_PASSES = 2
LOSSES = (
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
)


class TrainingObserver:
    """Writes records of forward and backward passes, clipping and optimizer steps; ends the script.

    Args:
        recorder: where records go.
        max_steps: optimizer steps of a pass after which it ends.
    """

    def __init__(self, recorder: Recorder, max_steps: int) -> None:
        self.recorder = recorder
        self.max_steps = max_steps
        self.loaders = LoaderObserver(recorder, max_steps)
        self._optimizers: list[Optimizer] = []
        self._optimizers_in_step: set[int] = set()
        self._training_passes: set[int] = set()
        self._loss_line: str | None = None
        self._is_scaled = False
        self._has_ended = False
        self._name_of_parameter: dict[int, str] = {}
        #: Of the backward passes that run: sums of sampled gradients, and the hooks that add to them.
        self._running_backwards: list[tuple[list[list[float]], list[RemovableHandle]] | None] = []
        recorder.watch(Optimizer, "add_param_group", after=self._note_optimizer)
        recorder.watch(LRScheduler, "__init__", after=self._note_scheduler)
        recorder.watch(DistributedDataParallel, "__init__", after=self._note_replica)
        recorder.watch(torch.amp.GradScaler, "scale", before=self._note_scaled)
        recorder.watch(torch.amp.GradScaler, "unscale_", before=self._note_unscaled)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            recorder.watch(nn.utils, name, before=partial(self._note_clip, name))
        for name in LOSSES:
            recorder.watch(nn.functional, name, after=self._note_loss)
        recorder.watch(torch.autograd, "backward", before=self._before_backward, after=self._after_backward)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def _note_optimizer(self, _: None, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        if not any(noted is optimizer for noted in self._optimizers):
            self._optimizers.append(optimizer)
            self.recorder.write("optimizer")

    def _note_scheduler(self, _: None, scheduler: LRScheduler, *args: Any, **kwargs: Any) -> None:
        self.recorder.write("scheduler", name=type(scheduler).__name__)

    def _note_replica(self, _: None, replica: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        modules = replica.module.modules()
        batchnorm = sum(isinstance(m, BatchNorm) and not isinstance(m, nn.SyncBatchNorm) for m in modules)
        self.recorder.write("ddp", batchnorm=batchnorm)
        self._name_of_parameter |= {id(parameter): name for name, parameter in replica.module.named_parameters()}
        inside: list[bool] = []

        # Hooks must not hold the replica: its reducer ends with the last reference to it, before the interpreter does.
        def before(wrapper: Any, _: Any) -> None:
            inside.append(True)
            if torch.is_grad_enabled() and self.is_full():
                self.recorder.write("forward", syncs=bool(wrapper.require_backward_grad_sync))

        def inner(module: nn.Module, _: Any) -> None:
            if torch.is_grad_enabled() and not inside and module.training and self.is_full():
                self.recorder.write("bare")

        replica.register_forward_pre_hook(before)
        replica.register_forward_hook(lambda *_: inside.clear(), always_call=True)
        replica.module.register_forward_pre_hook(inner)

    def is_full(self) -> bool:
        """Whether the step to come is recorded in full."""
        done = self.recorder.step - 1
        left = None if self.loaders.current is None else self.loaders.current.left
        return done < FIRST_STEPS or done % EVERY == 0 or (left is not None and left <= LAST_BATCHES)

    def _note_loss(self, value: Any, *args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if torch.is_grad_enabled():
            self._loss_line = script_line() if self.is_full() else self._loss_line
        elif isinstance(value, Tensor) and value.numel() == 1:
            target = args[1] if len(args) > 1 else kwargs.get("target")
            count = target.numel() if isinstance(target, Tensor) else 0
            if isinstance(target, Tensor) and not target.is_floating_point():
                count = int((target != kwargs.get("ignore_index", -100)).sum())
            self.recorder.write("eval_loss", loss=value.item(), count=count)

    def _before_backward(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        self._running_backwards.append(None)
        loss = tensors if isinstance(tensors, Tensor) else next(iter(tensors), None)
        if self.recorder.is_child or not isinstance(loss, Tensor) or loss.numel() != 1:
            return
        current = self.loaders.current
        samples = current.unused.pop(0) if current and current.unused else None
        if not self.is_full():
            self.recorder.write("backward", samples=samples)
            return
        factor, count, reduction = loss_term(loss) or (None, None, None)
        self.recorder.write(
            "backward",
            samples=samples,
            loss=loss.item(),
            factor=factor,
            count=count,
            reduction=reduction,
            loss_line=self._loss_line,
            graph=loss.grad_fn.name() if loss.grad_fn is not None else None,
            is_clean=[not any(any(row) for row in _sampled_gradients([optimizer])) for optimizer in self._optimizers],
        )
        parameters = _sampled(_parameters(self._optimizers))
        sums: list[list[float]] = [[] for _ in parameters]

        def add(position: int, gradient: Tensor) -> None:
            values = _entries(gradient)
            sums[position] = [a + b for a, b in zip(sums[position] or [0.0] * len(values), values, strict=True)]

        handles = [parameter.register_hook(partial(add, position)) for position, parameter in enumerate(parameters)]
        self._running_backwards[-1] = sums, handles

    def _after_backward(self, *args: Any, **kwargs: Any) -> None:
        observed = self._running_backwards.pop()
        if observed is not None:
            sums, handles = observed
            for handle in handles:
                handle.remove()
            self.recorder.write("local", gradients=sums)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if id(optimizer) in self._optimizers_in_step:  # a subclass calls super().step()
            return None
        self._optimizers_in_step.add(id(optimizer))
        if not self.is_full():
            return None
        weights = self.recorder.guard(_norms, [parameter.detach() for parameter in _parameters([optimizer])])
        note = partial(self.recorder.guard, self._note_applied, optimizer, weights)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            note()
            return None

        def observed(*values: Any) -> Any:
            result = closure(*values)
            note()
            return result

        return ((args[0], observed, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": observed})

    def _note_applied(self, optimizer: Optimizer, weights: list[float]) -> None:
        """Record norms and sampled gradients, reduced, of an optimizer just before its step."""
        parameters = _parameters([optimizer])
        if any(map(_is_sharded, parameters)):
            self.recorder.write("sharded")
            return
        numbered = enumerate(parameters)
        self.recorder.write(
            "applied",
            weights=weights,
            norms=_norms([_gradient(parameter) for parameter in parameters]),
            gradients=_sampled_gradients([optimizer]),
            names=[self._name_of_parameter.get(id(p), f"parameter {i} of shape {tuple(p.shape)}") for i, p in numbered],
        )

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizers_in_step.discard(id(optimizer))
        self.recorder.guard(self._count_step, optimizer)
        is_past = self.loaders.current is None and self.recorder.step > self.max_steps
        if is_past or len(self._training_passes) > MAX_PASSES:
            self.recorder.write("cut", is_script=True)
            if self._has_ended:  # the script has caught it
                os._exit(0)
            self._has_ended = True
            raise SystemExit(0)

    def _count_step(self, optimizer: Optimizer) -> None:
        current = self.loaders.current
        if current is not None:
            current.steps += 1
            self._training_passes.add(current.number)
        numbers = [number for number, noted in enumerate(self._optimizers, 1) if noted is optimizer]
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        self.recorder.write("step", optimizer=numbers[0] if numbers else 0, lr=rates)
        self.recorder.step += 1
        self._is_scaled = False

    def _note_scaled(self, scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> None:
        if scaler.is_enabled() and not self._is_scaled:
            self.recorder.write("scaled")
        self._is_scaled = scaler.is_enabled()

    def _note_unscaled(self, *args: Any, **kwargs: Any) -> None:
        self._is_scaled = False

    def _note_clip(self, name: str, *args: Any, **kwargs: Any) -> None:
        if self.is_full():
            gradients = _sampled_gradients(self._optimizers)
            self.recorder.write("clip", call=name, is_scaled=self._is_scaled, gradients=gradients)


def _parameters(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    return [parameter for group in groups for parameter in group if parameter.requires_grad]


def _sampled(parameters: list[Tensor]) -> list[Tensor]:
    """Return at most ``MAX_PARAMETERS`` of them, evenly spread."""
    return parameters[:: max(1, -(-len(parameters) // MAX_PARAMETERS))]


def _sampled_gradients(optimizers: Sequence[Optimizer]) -> list[list[float]]:
    return [_entries(_gradient(parameter)) for parameter in _sampled(_parameters(optimizers))]


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _entries(tensor: Tensor) -> list[float]:
    """Return at most ``ENTRIES`` values of a tensor, evenly spread; none of a sparse one."""
    if tensor.is_sparse or not tensor.numel():
        return []
    flat = tensor.detach().reshape(-1)
    values: list[float] = flat[:: max(1, flat.numel() // ENTRIES)][:ENTRIES].tolist()
    return values


def _norms(tensors: list[Tensor]) -> list[float]:
    if not tensors or any(tensor.is_sparse or _is_sharded(tensor) for tensor in tensors):
        return []
    return torch.stack([norm.double().cpu() for norm in foreach_norm(tensors)]).tolist()


def _is_sharded(tensor: Tensor) -> bool:
    return type(tensor).__name__ in ("DTensor", "FlatParameter")
