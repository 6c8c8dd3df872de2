"""Settings of a run: sections, loading from files and flags, JSON schema. Imports no torch."""

from lockstep.config.load import dump as dump
from lockstep.config.load import load as load
from lockstep.config.load import merge as merge
from lockstep.config.load import nested as nested
from lockstep.config.load import one_micro_batch as one_micro_batch
from lockstep.config.load import resolve as resolve
from lockstep.config.sections import AveragingConfig as AveragingConfig
from lockstep.config.sections import CheckpointConfig as CheckpointConfig
from lockstep.config.sections import DataConfig as DataConfig
from lockstep.config.sections import DebugConfig as DebugConfig
from lockstep.config.sections import DistributedConfig as DistributedConfig
from lockstep.config.sections import FsdpConfig as FsdpConfig
from lockstep.config.sections import HardwareConfig as HardwareConfig
from lockstep.config.sections import LaunchConfig as LaunchConfig
from lockstep.config.sections import OptimizerConfig as OptimizerConfig
from lockstep.config.sections import Precision as Precision
from lockstep.config.sections import RunConfig as RunConfig
from lockstep.config.sections import SchedulerConfig as SchedulerConfig
from lockstep.config.sections import Section as Section
from lockstep.config.sections import Strategy as Strategy
