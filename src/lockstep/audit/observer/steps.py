"""Observe training: backward passes, gradients, optimizer steps, `DistributedDataParallel`, clipping, scaling."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep._compat.observation import loss_term
from lockstep._compat.torch import BatchNorm, foreach_norm
from lockstep.audit.observer.loaders import LoaderObserver
from lockstep.audit.observer.record import Patches, Recorder, guarded, script_line

#: Steps that are all looked at; after them one of ``EVERY``, and those near the end of a pass.
FIRST_STEPS = 16
EVERY = 16
LAST_BATCHES = 4
#: Parameters whose gradients are sampled, and entries of each.
MOST_PARAMETERS = 16
ENTRIES = 8
#: Training passes after which the script is ended.
MOST_PASSES = 2
LOSSES = (
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
)


class StepObserver:
    """Writes records of forward and backward passes, clipping and optimizer steps; ends the script.

    Args:
        recorder: where records go.
        patches: replaced functions, to be undone.
        most_steps: optimizer steps of a pass after which it ends.
    """

    def __init__(self, recorder: Recorder, patches: Patches, most_steps: int) -> None:
        self.recorder = recorder
        self.most_steps = most_steps
        self.steps = 0
        self.loaders = LoaderObserver(recorder, patches, should_stop=lambda steps: steps >= most_steps)
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._stepping: set[int] = set()
        self._training_passes: list[int] = []
        self._loss_line: str | None = None
        self._is_scaled = False
        self._has_ended = False
        self._names: dict[int, str] = {}
        patches.after(Optimizer, "add_param_group", self._note_optimizer)
        patches.after(LRScheduler, "__init__", self._note_scheduler)
        patches.after(DistributedDataParallel, "__init__", self._note_replica)
        patches.before(torch.amp.GradScaler, "scale", self._note_scaled)
        patches.before(torch.amp.GradScaler, "unscale_", self._note_unscaled)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            patches.before(nn.utils, name, partial(self._note_clip, name))
        for name in LOSSES:
            patches.after(nn.functional, name, self._note_loss)
        patches.replace(torch.autograd, "backward", self._backward)
        patches.on_undo(register_optimizer_step_pre_hook(self._before_step).remove)
        patches.on_undo(register_optimizer_step_post_hook(self._after_step).remove)

    # --- new objects ------------------------------------------------------------------------------

    def _note_optimizer(self, _: None, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        if not any(reference() is optimizer for reference in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))
            self.recorder.write({"t": "optimizer", "site": script_line()})

    def _note_scheduler(self, _: None, scheduler: LRScheduler, *args: Any, **kwargs: Any) -> None:
        self.recorder.write({"t": "scheduler", "name": type(scheduler).__name__, "site": script_line()})

    def _note_replica(self, _: None, replica: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        modules = list(replica.module.modules())
        self.recorder.write(
            {
                "t": "ddp",
                "site": script_line(),
                "batchnorm": sum(isinstance(m, BatchNorm) and not isinstance(m, nn.SyncBatchNorm) for m in modules),
            }
        )
        for name, parameter in replica.module.named_parameters():
            self._names[id(parameter)] = name
        inside: list[bool] = []

        # Hooks must not hold the replica: its reducer ends with the last reference to it, before the interpreter does.
        def before(wrapper: Any, _: Any) -> None:
            inside.append(True)
            if torch.is_grad_enabled() and self.looks():
                sync = bool(wrapper.require_backward_grad_sync)
                self.recorder.write({"t": "forward", "sync": sync, "site": script_line()})

        def inner(module: nn.Module, _: Any) -> None:
            if not torch.is_grad_enabled():
                self.loaders.on_inference()
            elif not inside and module.training and self.looks():
                self.recorder.write({"t": "bare", "site": script_line()})

        replica.register_forward_pre_hook(before)
        replica.register_forward_hook(lambda *_: inside.clear(), always_call=True)
        replica.module.register_forward_pre_hook(inner)

    # --- losses and gradients --------------------------------------------------------------------

    def looks(self) -> bool:
        """Whether the step that follows is recorded in full."""
        left = self.loaders.batches_left()
        return self.steps < FIRST_STEPS or self.steps % EVERY == 0 or (left is not None and left <= LAST_BATCHES)

    def _note_loss(self, value: Any, *args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if torch.is_grad_enabled():
            self._loss_line = script_line() if self.looks() else self._loss_line
        elif isinstance(value, Tensor) and value.numel() == 1:
            target = args[1] if len(args) > 1 else kwargs.get("target")
            count = target.numel() if isinstance(target, Tensor) else 0
            if isinstance(target, Tensor) and not target.is_floating_point():
                count = int((target != kwargs.get("ignore_index", -100)).sum())
            self.recorder.write({"t": "eval", "loss": value.item(), "count": count, "site": script_line()})

    def _parameters(self, optimizers: Iterable[Optimizer]) -> list[Tensor]:
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        return [parameter for group in groups for parameter in group if parameter.requires_grad]

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            loss = tensors if isinstance(tensors, Tensor) else next(iter(tensors), None)
            if self.recorder.is_child or not isinstance(loss, Tensor) or loss.numel() != 1:
                return original(tensors, *args, **kwargs)
            gradients = guarded(self._watch_gradients, self.recorder)(loss)
            try:
                return original(tensors, *args, **kwargs)
            finally:
                if gradients is not None:
                    guarded(self._note_gradients, self.recorder)(*gradients)

        return backward

    def _watch_gradients(self, loss: Tensor) -> Any:
        current = self.loaders.current
        record: dict[str, Any] = {"t": "backward", "pass": current and current.lockstep_pass, "site": script_line()}
        if not self.looks():
            self.recorder.write(record)
            return None
        optimizers = [made for made in (reference() for reference in self._optimizers) if made is not None]
        factor, count, kind = loss_term(loss) or (None, None, None)
        record |= {"loss": loss.item(), "factor": factor, "count": count, "kind": kind, "line": self._loss_line}
        record |= {"graph": loss.grad_fn.name() if loss.grad_fn is not None else None}
        record |= {"clean": [self._is_clean(optimizer) for optimizer in optimizers]}
        self.recorder.write(record)
        parameters = sampled(self._parameters(optimizers))
        sums: list[list[float]] = [[] for _ in parameters]

        def hook(position: int, gradient: Tensor) -> None:
            values = entries(gradient)
            before = sums[position]
            sums[position] = [a + b for a, b in zip(before, values, strict=True)] if before else values

        handles = [
            parameter.register_hook(lambda gradient, position=position: hook(position, gradient))
            for position, parameter in enumerate(parameters)
        ]
        return sums, handles

    def _note_gradients(self, sums: list[list[float]], handles: list[Any]) -> None:
        for handle in handles:
            handle.remove()
        self.recorder.write({"t": "local", "grad": sums})

    def _is_clean(self, optimizer: Optimizer) -> bool:
        """Whether the sampled gradients are zero or not there, so that this backward pass begins a new sum."""
        gradients = [parameter.grad for parameter in sampled(self._parameters([optimizer]))]
        return not any(gradient is not None and bool(gradient.any()) for gradient in gradients)

    # --- the step ----------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if id(optimizer) in self._stepping:
            return None
        self._stepping.add(id(optimizer))
        if not self.looks():
            return None
        note = guarded(self._note_step, self.recorder)
        norms = guarded(self._norms, self.recorder)([parameter.detach() for parameter in self._parameters([optimizer])])
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            note(optimizer, norms)
            return None

        def observed(*values: Any) -> Any:
            result = closure(*values)
            note(optimizer, norms)
            return result

        return ((args[0], observed, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": observed})

    def _norms(self, tensors: list[Tensor]) -> list[float]:
        if not tensors or any(tensor.is_sparse or _is_sharded(tensor) for tensor in tensors):
            return []
        return torch.stack([norm.double().cpu() for norm in foreach_norm(tensors)]).tolist()

    def _note_step(self, optimizer: Optimizer, norms: list[float]) -> None:
        parameters = self._parameters([optimizer])
        is_whole = not any(map(_is_sharded, parameters))
        if not is_whole:
            self.recorder.write({"t": "limit", "code": "sharded", "text": "parameters are sharded"})
        gradients = [_gradient(parameter) for parameter in parameters]
        self.recorder.write(
            {
                "t": "look",
                "step": self.steps + 1,
                "weights": norms,
                "gradients": self._norms(gradients) if is_whole else [],
                "grad": [entries(_gradient(parameter)) for parameter in sampled(parameters)] if is_whole else [],
                "names": self._named(parameters) if not self.steps else [],
            }
        )

    def _named(self, parameters: list[Tensor]) -> list[str]:
        """Name them as the wrapped module does, others by number and shape."""
        numbered = enumerate(parameters)
        return [self._names.get(id(p), f"parameter {number} of shape {tuple(p.shape)}") for number, p in numbered]

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepping.discard(id(optimizer))
        guarded(self._count_step, self.recorder)(optimizer)
        passes = len(self._training_passes)
        if passes > MOST_PASSES or (self.loaders.current is None and self.steps >= self.most_steps):
            self.recorder.write({"t": "ended", "pass": passes})
            if self._has_ended:  # the script has caught it
                os._exit(0)
            self._has_ended = True
            raise SystemExit(0)

    def _count_step(self, optimizer: Optimizer) -> None:
        self.steps += 1
        self.loaders.on_step()
        current = self.loaders.current
        number = None if current is None else current.lockstep_pass
        if number is not None and number not in self._training_passes:
            self._training_passes.append(number)
        matches = [reference() is optimizer for reference in self._optimizers]
        record = {"t": "step", "step": self.steps, "optimizer": matches.index(True) + 1 if True in matches else 0}
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        self.recorder.write({**record, "pass": number, "lr": rates, "site": script_line()})
        self._is_scaled = False

    # --- scaling and clipping ------------------------------------------------------------------------

    def _note_scaled(self, scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> None:
        if scaler.is_enabled() and not self._is_scaled:
            self.recorder.write({"t": "scaled"})
        self._is_scaled = scaler.is_enabled()

    def _note_unscaled(self, *args: Any, **kwargs: Any) -> None:
        self._is_scaled = False

    def _note_clip(self, name: str, *args: Any, **kwargs: Any) -> None:
        if self.looks():
            made = [reference() for reference in self._optimizers]
            parameters = sampled(self._parameters([optimizer for optimizer in made if optimizer is not None]))
            grad = [entries(_gradient(parameter)) for parameter in parameters]
            record = {"t": "clip", "call": name, "scaled": self._is_scaled, "grad": grad}
            self.recorder.write({**record, "site": script_line()})


def sampled(parameters: list[Tensor]) -> list[Tensor]:
    """Return at most ``MOST_PARAMETERS`` of them, evenly spread."""
    stride = max(1, -(-len(parameters) // MOST_PARAMETERS))
    return parameters[::stride]


def entries(tensor: Tensor) -> list[float]:
    """Return at most ``ENTRIES`` values of a tensor, evenly spread; none of a sparse one."""
    if tensor.is_sparse or not tensor.numel():
        return []
    flat = tensor.detach().reshape(-1)
    stride = max(1, flat.numel() // ENTRIES)
    values: list[float] = flat[::stride][:ENTRIES].tolist()
    return values


def _is_sharded(tensor: Tensor) -> bool:
    return type(tensor).__name__ in ("DTensor", "FlatParameter")


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
