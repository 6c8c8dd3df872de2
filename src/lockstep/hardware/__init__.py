"""What is here, what a selection of it resolves to, and who this process is. Imports no torch."""

from lockstep.hardware.detect import detect_devices, get_available_gpus
from lockstep.hardware.device import Device, GpuUser
from lockstep.hardware.resolve import Placement, resolve_hardware, resolve_placement
from lockstep.hardware.world import World, read_world

__all__ = [
    "Device",
    "GpuUser",
    "Placement",
    "World",
    "detect_devices",
    "get_available_gpus",
    "read_world",
    "resolve_hardware",
    "resolve_placement",
]
