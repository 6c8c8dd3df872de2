"""Private names of torch for models without memory and for the operators that they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep._compat import missing

try:
    from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError as error:
    raise missing("torch", error) from None

__all__ = ["FakeTensorMode", "TorchDispatchMode", "unset_fake_temporarily"]


def is_mutable(operator: Any) -> bool:
    """Return whether an operator writes to its arguments."""
    return bool(operator._schema.is_mutable)


def overload_packet(operator: Any) -> Any:
    """Return the key of an operator in ``torch.utils.flop_counter``."""
    return operator._overloadpacket


def replace_tensors(model: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter and buffer, as ``model.to_empty()`` does."""
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # torch 2.9 would put a fake one's memory into it
    try:
        model._apply(function)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(overwrites)
