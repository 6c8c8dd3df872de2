"""Observe training: backward passes, gradients, optimizer steps, `DistributedDataParallel`, clipping, scaling."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep._compat.observation import is_shard, loss_term
from lockstep._compat.torch import BatchNorm, foreach_norm
from lockstep.arithmetic import ceil_div
from lockstep.audit.observer.record import Observation, Recorder, script_line

#: The first steps are all recorded in full; after them one of as many, and those near the end of a pass.
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
    """Writes records of forward and backward passes, clipping and optimizer steps; ends the script."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._optimizers: list[Optimizer] = []
        #: Norms of the weights before the step that runs, by optimizer.
        self._weights: dict[int, list[float]] = {}
        self._training_passes: set[int] = set()
        self._loss_line: str | None = None
        self._is_scaled = False
        self._is_sharded = False
        self._names: dict[int, str] = {}
        recorder.watch(Optimizer, "__init__", self._note_optimizer)
        recorder.watch(LRScheduler, "__init__", partial(self._note, "scheduler"))
        recorder.watch(DistributedDataParallel, "__init__", self._note_replica)
        recorder.watch(torch.amp.GradScaler, "scale", partial(self._note_scaler, True))
        recorder.watch(torch.amp.GradScaler, "unscale_", partial(self._note_scaler, False))
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            recorder.watch(nn.utils, name, partial(self._note_clip, name))
        for name in LOSSES:
            recorder.watch(nn.functional, name, self._note_loss)
        recorder.watch(torch.autograd, "backward", self._note_backward)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def is_full(self) -> bool:
        """Return whether the next step is recorded in full: its gradients and weights, too."""
        done = self.recorder.step - 1
        data_pass = self.recorder.current_pass
        is_near_end = data_pass is not None and data_pass.left is not None and data_pass.left <= LAST_BATCHES
        return not self._is_sharded and (done < EVERY or done % EVERY == 0 or is_near_end)

    def _note_optimizer(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Observation:
        yield
        self._optimizers.append(optimizer)
        self._is_sharded |= any(map(is_shard, _parameters([optimizer])))
        self.recorder.write("optimizer", is_sharded=self._is_sharded)

    def _note(self, kind: str, *args: Any, **kwargs: Any) -> Observation:
        self.recorder.write(kind)
        yield

    def _note_replica(self, replica: DistributedDataParallel, *args: Any, **kwargs: Any) -> Observation:
        yield
        modules = replica.module.modules()
        batchnorm = sum(isinstance(m, BatchNorm) and not isinstance(m, nn.SyncBatchNorm) for m in modules)
        self.recorder.write("ddp", batchnorm=batchnorm)
        self._names |= {id(parameter): name for name, parameter in replica.module.named_parameters()}
        replica.module.register_forward_pre_hook(self._before_module)

    def _before_module(self, module: nn.Module, _: Any) -> None:
        is_training = module.training and torch.is_grad_enabled()
        if is_training and not torch.compiler.is_compiling() and self.is_full():
            frames = [frame for frame, _ in traceback.walk_stack(sys._getframe())]
            replicas = [
                frame.f_locals["self"] for frame in frames if frame.f_code is DistributedDataParallel.forward.__code__
            ]
            syncs = all(replica.require_backward_grad_sync for replica in replicas)
            self.recorder.write("forward", is_bare=not replicas, syncs=syncs)

    def _note_loss(self, *args: Any, **kwargs: Any) -> Observation:
        value = yield
        if torch.is_grad_enabled():
            self._loss_line = script_line() if self.is_full() else self._loss_line
        elif isinstance(value, Tensor) and value.numel() == 1:
            target = args[1] if len(args) > 1 else kwargs["target"]
            has_classes = not target.is_floating_point()
            ignored = int((target == kwargs.get("ignore_index", -100)).sum()) if has_classes else 0
            self.recorder.write("eval_loss", loss=value.item(), count=target.numel() - ignored)

    def _note_backward(self, tensors: Any, *args: Any, **kwargs: Any) -> Observation:
        loss = tensors if isinstance(tensors, Tensor) else next(iter(tensors), None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            return
        data_pass = self.recorder.current_pass
        indices = data_pass.unused.pop(0) if data_pass and data_pass.unused else None  # of the oldest batch
        if not self.is_full():
            self.recorder.write("backward", indices=indices)
            return
        factor, count, reduction = loss_term(loss) or (None, None, None)
        self.recorder.write(
            "backward",
            indices=indices,
            loss=loss.item(),
            factor=factor,
            count=count,
            reduction=reduction,
            loss_line=self._loss_line,
            graph=loss.grad_fn.name() if loss.grad_fn else None,
            dirty=[n for n, optimizer in enumerate(self._optimizers, 1) if any(_gradients([optimizer]))],
        )
        parameters = _sampled(self._optimizers)
        gradients: list[list[float]] = [[] for _ in parameters]

        def note(position: int, gradient: Tensor) -> None:
            gradients[position] = _entries(gradient)

        handles = [parameter.register_hook(partial(note, position)) for position, parameter in enumerate(parameters)]
        yield
        for handle in handles:
            handle.remove()
        self.recorder.write("local", gradients=list(chain(*gradients)))

    def _note_scaler(self, scales: bool, scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Observation:
        self._is_scaled = scales and scaler.is_enabled()
        if self._is_scaled:
            self.recorder.write("scaler")
        yield

    def _note_clip(self, name: str, *args: Any, **kwargs: Any) -> Observation:
        if self.is_full():
            norms = _norms([_gradient(parameter) for parameter in _parameters(self._optimizers)])
            self.recorder.write("clip", call=name, is_scaled=self._is_scaled, norms=norms)
        yield

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        norms: list[float] = []
        with self.recorder.guarded("weights"):
            if self.is_full():
                norms = _norms([parameter.detach() for parameter in _parameters([optimizer])])
        self._weights.setdefault(id(optimizer), norms)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        weights = self._weights.pop(id(optimizer), None)
        if weights is None:  # a subclass has called super().step(), which came here before
            return
        with self.recorder.guarded("step"):
            self._note_step(optimizer, weights)
        is_past = self.recorder.current_pass is None and self.recorder.step > self.recorder.max_steps
        if is_past or len(self._training_passes) > MAX_PASSES:
            self.recorder.write("cut", is_script=True)
            raise SystemExit(0)

    def _note_step(self, optimizer: Optimizer, weights: list[float]) -> None:
        """Record a step; in full with norms and sampled gradients, which it leaves as it has applied them."""
        data_pass = self.recorder.current_pass
        if data_pass is not None:
            data_pass.steps += 1
            self._training_passes.add(data_pass.number)
        parameters = _parameters([optimizer]) if weights else []
        self.recorder.write(
            "step",
            optimizer=self._optimizers.index(optimizer) + 1,
            lr=[float(group["lr"]) for group in optimizer.param_groups],
            weights=weights,
            norms=_norms([_gradient(parameter) for parameter in parameters]),
            gradients=_gradients([optimizer]) if weights else [],
            names=[
                self._names.get(id(parameter), f"parameter {position} of shape {tuple(parameter.shape)}")
                for position, parameter in enumerate(parameters)
            ],
        )
        self.recorder.step += 1
        self._is_scaled = False


def _parameters(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    return [parameter for group in groups for parameter in group if parameter.requires_grad]


def _sampled(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Return at most ``MAX_PARAMETERS`` parameters, evenly spread."""
    parameters = _parameters(optimizers)
    return parameters[:: max(1, ceil_div(len(parameters), MAX_PARAMETERS))]


def _gradients(optimizers: Sequence[Optimizer]) -> list[float]:
    return [value for parameter in _sampled(optimizers) for value in _entries(_gradient(parameter))]


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _entries(tensor: Tensor) -> list[float]:
    """Return at most ``ENTRIES`` values of a tensor, evenly spread; none of a sparse one."""
    if tensor.is_sparse:
        return []
    flat = tensor.detach().reshape(-1)
    values: list[float] = flat[:: max(1, flat.numel() // ENTRIES)][:ENTRIES].tolist()
    return values


def _norms(tensors: list[Tensor]) -> list[float]:
    if not tensors or any(tensor.is_sparse for tensor in tensors):
        return []
    return torch.stack([norm.double().cpu() for norm in foreach_norm(tensors)]).tolist()
