"""``lockstep verify script.py``: the same steps of a loop with a session on one device and on several."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from lockstep.checkpoint.store import CheckpointStore
from lockstep.config.load import merge
from lockstep.launch.session.script import run_script, several_devices
from lockstep.telemetry.files import make_folders, write_json
from lockstep.telemetry.rundir import RunDir
from lockstep.telemetry.tables import say

#: Largest relative differences that rounding explains, in single precision over some tens of steps; four times as much
#: in half precision.
LIMIT = 1e-3


@dataclass(frozen=True)
class ScriptReport:
    """How far two runs of a script are apart.

    Attributes:
        differences: the largest relative difference of losses, gradient norms and weights.
        first_step: the first step whose loss or gradient norm differs by more than ``limit``, if any.
    """

    script: str
    devices: tuple[str, ...]
    steps: int
    differences: Mapping[str, float]
    first_step: int | None
    limit: float

    @property
    def exit_code(self) -> int:
        return int(not all(value <= self.limit for value in self.differences.values()))

    @property
    def verdict(self) -> str:
        return "equal to rounding" if self.exit_code == 0 else "different"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


def verify_script(
    path: Path, arguments: Sequence[str], given: Mapping[str, Any], *, steps: int, say: Callable[[str], None]
) -> ScriptReport:
    """Run ``steps`` steps of a script on the first of the devices in ``given`` and on all, and compare.

    Raises:
        ConfigError: fewer than two devices. LockstepError: a run failed.
    """
    names = several_devices(given, "one device cannot differ from itself")
    runs = []
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as folder:
        for place, chosen in enumerate((names[:1], names)):
            say(f"{path.name} on {', '.join(chosen)}")
            changes = {
                "hardware": {"selected_devices": chosen},
                "training": {"max_steps": steps},
                "telemetry": {"log_interval": 1, "progress": "silent"},
                "save_dir": str(Path(folder, str(place))),
            }
            runs.append(_measured(run_script(path, arguments, merge(given, changes), redirect=True)[0]))
    (one, weights), (many, others) = runs
    gaps = {name: [_gap(a[name], b[name]) for a, b in zip(one, many, strict=True)] for name in ("loss", "grad_norm")}
    limit = LIMIT * (1 if given.get("hardware", {}).get("precision", "32") == "32" else 4)
    beyond = (n for n, both in enumerate(zip(*gaps.values(), strict=True), 1) if not max(both) <= limit)
    moved = {name: weights[name].double() - others[name].double() for name in weights}
    scale = math.sqrt(sum(value.double().square().sum().item() for value in weights.values()))
    apart = math.sqrt(sum(value.square().sum().item() for value in moved.values()))
    differences = {name: max(values, default=0.0) for name, values in gaps.items()} | {"weights": apart / scale}
    return ScriptReport(path.name, tuple(names), len(one), differences, next(beyond, None), limit)


def _measured(run: RunDir) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Rows of the steps, and the final weights."""
    store = CheckpointStore(run.checkpoints)
    step = store.step_of("last")
    weights = {} if step is None else store.load(step).model
    return run.steps(), {name: value for name, value in weights.items() if torch.is_floating_point(value)}


def _gap(one: float | None, other: float | None) -> float:
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    return abs(one - other) / max(abs(one), abs(other), 1e-6)


def write_script_report(report: ScriptReport, folder: Path) -> list[Path]:
    """``report.json`` in ``folder``. Raises :class:`StorageError`."""
    make_folders(folder)
    write_json(folder / "report.json", report.as_dict())
    return [folder / "report.json"]


def print_script_report(report: ScriptReport, stream: TextIO) -> None:
    say(f"{report.script}, {report.steps} steps on {report.devices[0]} and on {', '.join(report.devices)}", stream)
    for name, value in report.differences.items():
        say(f"  {name:10s} largest relative difference {value:.1e}", stream)
    where = f", from step {report.first_step} on" if report.first_step else ""
    say(f"{report.verdict}{where} (limit {report.limit:g})", stream)
    if report.exit_code:
        hint = "draws random numbers of a sample inside the data set or from session.generator"
        say(f"check that the loop {hint}, that losses are sums with their counts, and that the session", stream)
        say(
            "is made before the models. Dropout and other draws of a model differ between ranks: set dropout to 0 for",
            stream,
        )
        say("this check, or add --reproducibility exact, which gives every rank the draws of one device", stream)
        if (report.first_step or 1) > 1:
            say("The first steps agree, so it may be rounding that grew: a smaller learning rate shows it", stream)
