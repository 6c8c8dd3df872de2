"""Names of Ray Train (v2) that its public modules do not export."""

from __future__ import annotations

from lockstep._compat import missing

try:
    from ray.train import BackendConfig
    from ray.train.backend import Backend
    from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
    from ray.train.v2.api.config import LoggingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
except ImportError as error:
    raise missing("ray", error.name or error) from error

__all__ = [
    "Backend",
    "BackendConfig",
    "ControllerCallback",
    "DataParallelTrainer",
    "LoggingConfig",
    "WorkerGroupCallback",
]
