"""As :mod:`tests.command_process`, with what commands that train with Lightning import."""

import lightning.pytorch

import lockstep.lightning
from tests.command_process import main

__all__ = ["lightning", "lockstep", "main"]
