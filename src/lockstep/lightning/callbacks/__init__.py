"""Callbacks for any Lightning ``Trainer``; each works alone."""

from lockstep.lightning.callbacks.monitors import ConfigurationCheck, DeviceMonitor, LearningRate
from lockstep.lightning.callbacks.rows import JSONMetricsLogger
from lockstep.lightning.callbacks.status import RunStatus
from lockstep.lightning.callbacks.stopping import AgreedEarlyStopping, StopOnSignal
from lockstep.lightning.callbacks.upload import Upload

#: By the name that some configurations have.
JSONMetricLogger = JSONMetricsLogger

__all__ = [
    "AgreedEarlyStopping",
    "ConfigurationCheck",
    "DeviceMonitor",
    "JSONMetricLogger",
    "JSONMetricsLogger",
    "LearningRate",
    "RunStatus",
    "StopOnSignal",
    "Upload",
]
