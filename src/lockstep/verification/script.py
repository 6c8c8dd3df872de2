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

from lockstep.checkpoint.content import Place, walked
from lockstep.checkpoint.store import CheckpointStore
from lockstep.config.load import merge
from lockstep.launch.session.script import run_script, several_devices
from lockstep.rundir.folder import RunDir
from lockstep.telemetry.console import say
from lockstep.verification.report import BLIND
from lockstep.verification.trajectory import FACTOR, ROUNDING, Gap, floor_over, order_effect, relative

#: By ``debug.trace`` of another run on one device: its description, and the meaning of a difference beyond rounding.
_DEPENDS = (
    "it depends on their order (on values kept from batch to batch, or drawn by place), so that run does not measure "
    "rounding"
)
_REPEATS = {
    "off": ("again", "the loop draws random numbers that no seed determines"),
    "reversed": ("samples reversed", _DEPENDS),
    "shuffled": ("samples shuffled", _DEPENDS),
}

_ADVICE = """\
check that the loop draws random numbers of a sample inside the data set or from session.generator, that losses are
sums over rows with their counts (a contrastive loss, Dice and the root of a mean depend on the rest of the batch), that
the session is made before the models, and that values kept from one batch to the next (a counter, a list, an average
of weights) change once a step: `if session.step(...)`"""
_ADVICE_FAST = """
Dropout and other draws of a model differ between ranks: set dropout to 0 for this check, or add
--reproducibility exact, which gives every rank the draws of one device"""
_COLUMNS = ("loss", "grad_norm")


@dataclass(frozen=True)
class ScriptReport:
    """The differences between two runs of a script, over the ``steps`` that both have taken.

    ``differences`` are the largest relative ones of losses, gradient norms and weights; ``noise`` those between runs on
    one device that differ by rounding alone. ``first_step`` differs by more than ``factor`` times the noise until then.
    ``identical``: all of it is equal bit for bit, as it must be in exact mode; ``noise`` and ``factor`` are 0 there.
    """

    script: str
    devices: tuple[str, ...]
    steps: int
    differences: Mapping[str, float]
    noise: Mapping[str, float]
    first_step: int | None
    notes: tuple[str, ...] = ()
    factor: float = FACTOR
    reproducibility: str = "fast"
    identical: bool = False

    @property
    def exit_code(self) -> int:
        return int(self.first_step is not None)

    @property
    def verdict(self) -> str:
        if self.exit_code:
            return "different"
        return "identical" if self.identical else "equal to rounding"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


class _Run(NamedTuple):
    """Losses and gradient norms of the steps; final weights, and other tensors of the last checkpoint."""

    reproducibility: str
    rows: list[dict[str, Any]]
    weights: dict[str, Tensor]

    @property
    def steps(self) -> list[tuple[Any, ...]]:
        return [tuple(row[name] for name in _COLUMNS) for row in self.rows]


def verify_script(
    path: Path, arguments: Sequence[str], overrides: Mapping[str, Any], *, steps: int, say: Callable[[str], None]
) -> ScriptReport:
    """Run ``steps`` steps of a script on the first of the devices in ``overrides`` and on all, and compare.

    The effect of rounding is measured as for a task: on one device, again and with the samples of each micro-batch in
    other orders. In exact mode there is none, so the runs must be equal bit for bit.
    Raises :class:`LockstepError`: fewer than two devices, or a run failed.
    """
    names = several_devices(overrides, "one device cannot differ from itself")
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as folder:

        def run(devices: Sequence[str], trace: str, change: str) -> _Run:
            say(f"{path.name} on {', '.join(devices)}{change}")
            changes = {
                "hardware": {"selected_devices": devices},
                "training": {"max_steps": steps},
                "telemetry": {"log_interval": 1, "progress": "silent"},
                "storage": {"mirror": None},
                "debug": {"trace": trace},
                "save_dir": tempfile.mkdtemp(dir=folder) + "/run",
            }
            return _measured(run_script(path, arguments, merge(overrides, changes), needs_session=True)[0])

        single = run(names[:1], "off", "")
        many = run(names, "off", "")
        gap = _gap(single, many)
        identical = _is_identical(single, many)
        is_exact = many.reproducibility == "exact"
        gaps = list[Gap]()
        notes = list[str]()
        for trace, (change, reason) in {} if identical or is_exact else _REPEATS.items():
            other = _gap(single, run(names[:1], trace, f", {change}"))
            effect = order_effect(other)
            if effect is None:
                gaps.append(other)
            else:
                notes.append(f"{change}, the loss of step {effect[0]} differs by {effect[1]:.1e}: {reason}")
    rounding, factor = (0.0, 0.0) if is_exact else (ROUNDING, FACTOR)
    floor = floor_over(gaps, {name: np.full(len(values), rounding) for name, values in gap.items()})
    blind = np.flatnonzero(floor["loss"] * factor > BLIND)
    if blind.size:
        notes.append(f"from step {int(blind[0]) + 1} on rounding errors have grown too large to compare losses")
    parting = floor.parting(gap, factor)
    first = None if parting is None else parting[1] + 1
    if first is None and (len(single.rows) != len(many.rows) or (is_exact and not identical)):
        first = len(gap["loss"]) + (len(single.rows) != len(many.rows))
    differences, noise = ({name: float(v.max(initial=0)) for name, v in of.items()} for of in (gap, floor))
    return ScriptReport(
        path.name,
        tuple(names),
        len(gap["loss"]),
        differences,
        noise,
        first,
        tuple(notes),
        factor=factor,
        reproducibility=many.reproducibility,
        identical=identical,
    )


def _measured(run: RunDir) -> _Run:
    store = CheckpointStore(run.checkpoints)
    tensors = dict[str, Tensor]()
    step = store.step_of("last")
    if step is not None:
        saved = store.load(step)

        def keep(value: Any, path: Place) -> None:
            if isinstance(value, Tensor):
                tensors["/".join(map(str, path))] = value

        walked({"model": saved.model, "registered": saved.trainer["task"]}, keep)
    return _Run(run.plan()["decisions"]["reproducibility"]["value"], run.steps(), tensors)


def _is_identical(first: _Run, second: _Run) -> bool:
    """Return whether all steps and final tensors are equal bit for bit."""
    return (
        repr(first.steps) == repr(second.steps)  # NaN equals itself here
        and first.weights.keys() == second.weights.keys()
        and all(_same_bits(value, second.weights[name]) for name, value in first.weights.items())
    )


def _same_bits(first: Tensor, second: Tensor) -> bool:
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(*(value.contiguous().flatten().view(torch.uint8) for value in (first, second)))


def _gap(first: _Run, second: _Run) -> Gap:
    """Return relative differences of each step; those of the weights, relative to their size, at the last one."""
    steps = min(len(first.rows), len(second.rows))
    columns = {
        name: [np.array([row[name] for row in run.rows[:steps]], dtype=np.float64) for run in (first, second)]
        for name in _COLUMNS
    }
    weights = np.zeros(steps)
    weights[-1:] = _distance(first.weights, second.weights)
    return {**{name: relative(*pair) for name, pair in columns.items()}, "weights": weights}


def _distance(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Return the distance of floating-point tensors, relative to their size; infinite for different shapes."""
    apart = scale = 0.0
    for name, value in first.items():
        if not torch.is_floating_point(value):
            continue
        if name not in second or second[name].shape != value.shape:
            return math.inf
        apart += (value.double() - second[name].double()).square().sum().item()
        scale += value.double().square().sum().item()
    return math.sqrt(apart / scale) if apart else 0.0


def print_script_report(report: ScriptReport, stream: TextIO) -> None:
    say(f"{report.script}, {report.steps} steps on {report.devices[0]} and on {', '.join(report.devices)}", stream)
    for name, value in report.differences.items():
        say(f"  {name:10s} largest relative difference {value:.1e} (noise floor {report.noise[name]:.1e})", stream)
    first_step = f", from step {report.first_step} on" if report.first_step else ""
    is_exact = report.reproducibility == "exact"
    limit = "exact mode: equal bit for bit" if is_exact else f"limit: {report.factor:g} × noise floor"
    say(f"{report.verdict}{first_step} ({limit})", stream)
    for note in report.notes:
        say(note, stream)
    if report.exit_code:
        say(_ADVICE if is_exact else _ADVICE + _ADVICE_FAST, stream)
        if not is_exact and (report.first_step or 1) > 1:
            say("The first steps agree, so it may be rounding that grew: a smaller learning rate shows it", stream)
