"""Settings of a run: sections, loading from files and flags, JSON schema. Imports no torch."""

from lockstep.config.load import dump, json_schema, load, resolve
from lockstep.config.sections import (
    CheckpointConfig,
    DataConfig,
    DebugConfig,
    DistributedConfig,
    HardwareConfig,
    LaunchConfig,
    OptimizerConfig,
    Precision,
    RunConfig,
    SchedulerConfig,
    Section,
    Strategy,
    TaskSection,
    TelemetryConfig,
    TrainingConfig,
    ValidationConfig,
)

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "DebugConfig",
    "DistributedConfig",
    "HardwareConfig",
    "LaunchConfig",
    "OptimizerConfig",
    "Precision",
    "RunConfig",
    "SchedulerConfig",
    "Section",
    "Strategy",
    "TaskSection",
    "TelemetryConfig",
    "TrainingConfig",
    "ValidationConfig",
    "dump",
    "json_schema",
    "load",
    "resolve",
]
