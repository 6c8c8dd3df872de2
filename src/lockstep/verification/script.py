"""``lockstep verify script.py --devices cpu,cpu``: the steps of a loop with a session on one device and on several."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch
from torch import Tensor

from lockstep.checkpoint.store import CheckpointStore
from lockstep.config.load import merge
from lockstep.launch.session.script import run_script, several_devices
from lockstep.rundir.files import make_folders, write_json
from lockstep.rundir.folder import RunDir
from lockstep.telemetry.console import say
from lockstep.verification.trajectory import FACTOR, NOT_ROUNDING, ROUNDING, Gap, floor_over, relative

#: By the ``debug.trace`` of another run on one device: what it is, and what it shows where not only rounding differs.
_DEPENDS = "it depends on their order, so that run says nothing about rounding"
_REPEATS = {
    "off": ("again", "the loop draws random numbers that no seed determines"),
    "reversed": ("samples reversed", _DEPENDS),
    "shuffled": ("samples shuffled", _DEPENDS),
}


@dataclass(frozen=True)
class ScriptReport:
    """How far two runs of a script are apart, over the ``steps`` that both have taken.

    ``differences`` are the largest relative ones of losses, gradient norms and weights; ``noise`` those between runs on
    one device that differ by rounding alone. ``first_step`` differs by more than ``factor`` times the noise until then.
    """

    script: str
    devices: tuple[str, ...]
    steps: int
    differences: Mapping[str, float]
    noise: Mapping[str, float]
    first_step: int | None
    notes: tuple[str, ...] = ()
    factor: float = FACTOR

    @property
    def exit_code(self) -> int:
        return int(self.first_step is not None)

    @property
    def verdict(self) -> str:
        return "equal to rounding" if self.exit_code == 0 else "different"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


class _Run(NamedTuple):
    """Losses and gradient norms of the steps, and the final weights."""

    rows: list[dict[str, Any]]
    weights: dict[str, Tensor]


def verify_script(
    path: Path, arguments: Sequence[str], given: Mapping[str, Any], *, steps: int, say: Callable[[str], None]
) -> ScriptReport:
    """Run ``steps`` steps of a script on the first of the devices in ``given`` and on all, and compare.

    What rounding alone changes is measured as for a task: on one device, again and with the samples of each
    micro-batch in other orders. Raises :class:`LockstepError`: fewer than two devices, or a run failed.
    """
    names = several_devices(given, "one device cannot differ from itself")
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as folder:

        def run(devices: Sequence[str], trace: str, what: str) -> _Run:
            say(f"{path.name} on {', '.join(devices)}{what}")
            changes = {
                "hardware": {"selected_devices": devices},
                "training": {"max_steps": steps},
                "telemetry": {"log_interval": 1, "progress": "silent"},
                "debug": {"trace": trace},
                "save_dir": tempfile.mkdtemp(dir=folder) + "/run",
            }
            return _measured(run_script(path, arguments, merge(given, changes), redirect=True)[0])

        one, many = run(names[:1], "off", ""), run(names, "off", "")
        gap, notes, gaps = _gap(one, many), [], list[Gap]()
        if any(values.any() for values in gap.values()):
            for trace, (what, reason) in _REPEATS.items():
                other = _gap(one, run(names[:1], trace, f", {what}"))
                if other["loss"][:1].max(initial=0) <= NOT_ROUNDING:
                    gaps.append(other)
                else:
                    notes.append(f"{what}, the first loss differs by {other['loss'][0]:.1e}: {reason}")
    floor = floor_over(gaps, {name: np.full(len(values), ROUNDING) for name, values in gap.items()})
    parting = floor.parting(gap)
    first = min(len(one.rows), len(many.rows)) + 1 if len(one.rows) != len(many.rows) else None
    differences, noise = ({name: float(v.max(initial=0)) for name, v in of.items()} for of in (gap, floor))
    place = first if parting is None else parting[1] + 1
    return ScriptReport(path.name, tuple(names), len(gap["loss"]), differences, noise, place, tuple(notes))


def _measured(run: RunDir) -> _Run:
    store = CheckpointStore(run.checkpoints)
    step = store.step_of("last")
    saved = {} if step is None else store.load(step).model
    return _Run(run.steps(), {name: value.double() for name, value in saved.items() if torch.is_floating_point(value)})


def _gap(one: _Run, other: _Run) -> Gap:
    """Relative differences of each step; those of the weights, relative to their size, at the last one."""
    steps = min(len(one.rows), len(other.rows))
    columns = {
        name: [np.array([row[name] for row in run.rows[:steps]], dtype=np.float64) for run in (one, other)]
        for name in ("loss", "grad_norm")
    }
    apart = math.sqrt(sum((one.weights[name] - other.weights[name]).square().sum().item() for name in one.weights))
    scale = math.sqrt(sum(value.square().sum().item() for value in one.weights.values()))
    weights = np.zeros(steps)
    weights[-1:] = apart / scale if apart else 0.0
    return {**{name: relative(*pair) for name, pair in columns.items()}, "weights": weights}


def write_script_report(report: ScriptReport, folder: Path) -> list[Path]:
    """``report.json`` in ``folder``. Raises :class:`StorageError`."""
    make_folders(folder)
    write_json(folder / "report.json", report.as_dict())
    return [folder / "report.json"]


def print_script_report(report: ScriptReport, stream: TextIO) -> None:
    say(f"{report.script}, {report.steps} steps on {report.devices[0]} and on {', '.join(report.devices)}", stream)
    for name, value in report.differences.items():
        say(f"  {name:10s} largest relative difference {value:.1e} (noise floor {report.noise[name]:.1e})", stream)
    where = f", from step {report.first_step} on" if report.first_step else ""
    say(f"{report.verdict}{where} (limit: {report.factor:g} × noise floor)", stream)
    for note in report.notes:
        say(note, stream)
    if report.exit_code:
        say(
            "check that the loop draws random numbers of a sample inside the data set or from session.generator, that\n"
            "losses are sums with their counts, and that the session is made before the models. Dropout and other\n"
            "draws of a model differ between ranks: set dropout to 0 for this check, or add --reproducibility exact,\n"
            "which gives every rank the draws of one device",
            stream,
        )
        if (report.first_step or 1) > 1:
            say("The first steps agree, so it may be rounding that grew: a smaller learning rate shows it", stream)
