"""What is said of this machine and this installation: devices, the doctor's checks, versions, shell completion."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from lockstep.cli.output import AsJson, answer, flag, verb
from lockstep.errors import UsageError
from lockstep.telemetry.console import print_table, say

LIBRARIES = ("numpy", "torchmetrics", "safetensors", "pydantic", "lightning", "tensorboard")


@verb("[OPTIONS]", "Memory is in GB (1e9 bytes).")
def devices(*, as_json: AsJson = False) -> None:
    from lockstep.hardware.detect import detect_devices
    from lockstep.hardware.resolve import describe_users

    found = detect_devices()
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
        for device in found
    ]
    answer({"devices": [device.as_dict() for device in found]}, partial(print_table, columns, rows), as_json)


@verb("[OPTIONS]")
def version(*, as_json: AsJson = False) -> None:
    from importlib import metadata

    from lockstep.rundir.folder import versions

    found = versions()
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    answer(found, partial(print_table, ("what", "version"), list(found.items())), as_json)


@verb("[SHELL] [OPTIONS]", "Examples:\n  source <(lockstep completion bash)\n  lockstep completion bash --install")
def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"] | None, flag("Which shell. Default: the one in $SHELL.")] = None,
    /,
    *,
    install: Annotated[bool, flag("Write the script where the shell looks for it, instead of printing it.")] = False,
) -> None:
    from lockstep.cli.main import app as root

    used = os.environ.get("SHELL", "")
    chosen = shell or next((name for name in ("bash", "zsh", "fish") if Path(used).name == name), None)
    if chosen is None:
        raise UsageError(
            "which shell is meant?", why=f"$SHELL is {used!r}", fix="lockstep completion bash, zsh or fish"
        )
    if not install:
        sys.stdout.write(root.generate_completion(prog_name="lockstep", shell=chosen) + "\n")
        return
    try:
        written = root.install_completion(shell=chosen)
    except OSError as error:
        raise UsageError(
            "the completion script cannot be installed",
            why=str(error),
            fix="print it and put it where your shell reads it",
        ) from None
    say(f"written to {written}; open a new shell to use it", sys.stdout)
