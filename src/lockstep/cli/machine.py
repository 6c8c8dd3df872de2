"""Commands about this machine and this installation: devices and versions."""

from __future__ import annotations

from functools import partial

from lockstep.cli.output import AsJson, answer, verb
from lockstep.telemetry.console import print_table

LIBRARIES = ("numpy", "torchmetrics", "safetensors", "pydantic", "lightning", "tensorboard")


@verb("[OPTIONS]", "Memory is in GB (1e9 bytes).")
def devices(*, as_json: AsJson = False) -> None:
    from lockstep.hardware.detect import detect_devices
    from lockstep.hardware.resolve import describe_users

    detected = detect_devices()
    columns = ("device", "name", "memory", "free", "precisions", "used by", "note")
    rows = [
        (
            device.id,
            device.name,
            *("" if size is None else f"{size:g} GB" for size in (device.memory_gb, device.free_gb)),
            ", ".join(device.precisions) if device.supported else "-",
            describe_users(device),
            device.note,
        )
        for device in detected
    ]
    answer({"devices": [device.as_dict() for device in detected]}, partial(print_table, columns, rows), as_json)


@verb("[OPTIONS]")
def version(*, as_json: AsJson = False) -> None:
    from importlib import metadata

    from lockstep.rundir.folder import versions

    installed = versions()
    for name in LIBRARIES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = "not installed"
    answer(installed, partial(print_table, ("name", "version"), list(installed.items())), as_json)
