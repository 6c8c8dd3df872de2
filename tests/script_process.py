"""As :mod:`tests.command_process`, with torch's compiler, which the first optimizer that a script makes imports."""

from __future__ import annotations

import torch._dynamo

from tests.command_process import main

__all__ = ["main", "torch"]
