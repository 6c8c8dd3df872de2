"""All of a run's number format: autocast around the forward pass, loss scaling around the backward, cast weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lockstep._compat.torch import amp_update_scale_
from lockstep.data.requests import mapped
from lockstep.engine.trained import bare
from lockstep.precisions import PRECISIONS

GROWTH_INTERVAL = 2000


def autocast_type(kind: str) -> torch.dtype | None:
    """Return the type of a forward pass under autocast; ``None``: there is no autocast."""
    name = PRECISIONS[kind].autocast
    return None if name is None else getattr(torch, name)


def autocast(kind: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of the forward pass."""
    dtype = autocast_type(kind)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def cast(model: nn.Module, kind: str) -> nn.Module:
    """Cast the weights, where the precision does; then forward casts its inputs, and returns float32."""
    if PRECISIONS[kind].weights == "bfloat16":
        inner = bare(model).bfloat16()
        inner.register_forward_pre_hook(
            lambda _, args, kwargs: (_floats(args, torch.bfloat16), _floats(kwargs, torch.bfloat16)), with_kwargs=True
        )
        inner.register_forward_hook(lambda _module, _args, output: _floats(output, torch.float32))
    return model


def _floats(values: Any, dtype: torch.dtype) -> Any:
    """Convert the floating-point tensors of ``values`` to ``dtype``."""
    return mapped(
        values, lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, "to"
    )


class Precision:
    """A precision on one device: its autocast and its loss scale. :func:`cast` is for the weights.

    Gradients leave the backward pass multiplied by :meth:`seed`: the plan's power-of-two pre-scale, times
    the dynamic loss scale in fp16 (Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740). The update
    divides by both in the same multiplication that applies the denominator.
    """

    def __init__(self, kind: str, device: torch.device, pre_scale: float) -> None:
        self._kind = kind
        self.is_full = autocast_type(kind) is None
        self._device = device
        self._pre_scale_value = pre_scale
        self._pre_scale = self._seed = torch.tensor(pre_scale, dtype=torch.float32, device=device)
        self._scale: Tensor | None = None
        if PRECISIONS[kind].scales_loss:
            self._scale = torch.tensor(2.0**16, dtype=torch.float32, device=device)
            self._good_steps = torch.tensor(0, dtype=torch.int32, device=device)
            self._seed = self._pre_scale * self._scale

    def autocast(self) -> AbstractContextManager[Any]:
        return autocast(self._kind, self._device)

    def seed(self) -> Tensor:
        """Return the start of ``backward``, shape (): exact, since both factors are powers of two."""
        return self._seed

    def seed_value(self) -> float:
        """Return :meth:`seed` as a number; synchronises with a GPU."""
        return self._pre_scale_value if self._scale is None else self._seed.item()

    def update(self, found_inf: Tensor, counted: Tensor | None = None) -> None:
        """Halve the loss scale after an overflow, double it after 2,000 good steps. No host sync.

        ``counted``: false leaves the scale as it is, after a step without items.
        """
        if self._scale is None:
            return
        before = (self._scale.clone(), self._good_steps.clone()) if counted is not None else None
        # The kernel of torch.amp.GradScaler, which would read found_inf on the host every step.
        found_inf = found_inf.to(self._scale.device)  # parameters may be in host memory
        amp_update_scale_(self._scale, self._good_steps, found_inf, 2.0, 0.5, GROWTH_INTERVAL)
        if before is not None and counted is not None:
            counted = counted.to(self._scale.device)
            self._scale.copy_(torch.where(counted, self._scale, before[0]))
            self._good_steps.copy_(torch.where(counted, self._good_steps, before[1]))
        self._seed = self._pre_scale * self._scale

    def state_dict(self) -> dict[str, Any]:
        if self._scale is None:
            return {}
        return {"scale": float(self._scale), "good_steps": int(self._good_steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._scale is not None and state:
            self._scale.fill_(state["scale"])
            self._good_steps.fill_(state["good_steps"])
            self._seed = self._pre_scale * self._scale
