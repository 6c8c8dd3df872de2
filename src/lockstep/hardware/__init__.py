"""Devices of this machine, placement of ranks on them, and the rank of this process. Imports no torch."""

from lockstep.hardware.detect import Device as Device
from lockstep.hardware.detect import detect_devices as detect_devices
from lockstep.hardware.detect import get_available_gpus as get_available_gpus
from lockstep.hardware.nvml import GpuUser as GpuUser
from lockstep.hardware.resolve import Placement as Placement
from lockstep.hardware.resolve import resolve_hardware as resolve_hardware
from lockstep.hardware.resolve import resolve_placement as resolve_placement
from lockstep.hardware.world import World as World
from lockstep.hardware.world import read_world as read_world
