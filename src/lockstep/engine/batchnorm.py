"""Interim: replaced by the count-weighted layer."""
from __future__ import annotations
import contextlib
from collections.abc import Iterator
from typing import Any
from torch import nn

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

def has_batchnorm(model: nn.Module) -> bool:
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())

def convert(module: nn.Module, group: Any) -> nn.Module:
    return module

@contextlib.contextmanager
def ghost(module: nn.Module) -> Iterator[None]:
    yield

def merge_running_stats(module: nn.Module, weight: float, group: Any) -> None:
    pass
