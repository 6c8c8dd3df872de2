"""``lockstep devices``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from cyclopts import App

from lockstep.cli.output import AsJson, print_json

if TYPE_CHECKING:
    from lockstep.hardware.detect import Device

app = App(name="devices", usage="Usage: lockstep devices [OPTIONS]", help_epilogue="Memory is in GB (1e9 bytes).")


@app.default
def devices(*, as_json: AsJson = False) -> None:
    """Print what is here."""
    from lockstep.hardware.detect import detect_devices
    from lockstep.telemetry.tables import print_table

    found = detect_devices()
    if as_json:
        print_json({"devices": [device.as_dict() for device in found]}, sys.stdout)
        return
    columns = ("device", "name", "memory", "free", "precisions", "used by", "note")
    print_table(columns, [_row(device) for device in found], sys.stdout)


def _row(device: Device) -> tuple[str, ...]:
    users = [f"{user.name} ({user.pid}{_memory(user.memory_gb, ', ')})" for user in device.users]
    return (
        device.id,
        device.name,
        _memory(device.memory_gb),
        _memory(device.free_gb),
        ", ".join(device.precisions) if device.supported else "-",
        ", ".join(users),
        device.note,
    )


def _memory(size_gb: float | None, before: str = "") -> str:
    return "" if size_gb is None else f"{before}{size_gb:g} GB"
