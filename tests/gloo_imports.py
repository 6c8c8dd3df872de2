"""What the server imports from which tests' ranks are forked (see tests/gloo.py)."""

import cloudpickle  # noqa: F401
import pytest  # noqa: F401  # the main module of the tests' own process
import torchmetrics  # noqa: F401

import lockstep.engine.attempt  # noqa: F401
