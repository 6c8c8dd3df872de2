"""The result of a verification as a table, JSON, Markdown and a plot."""

from __future__ import annotations

import importlib.util
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np

from lockstep.errors import ResultsDifferError
from lockstep.telemetry.files import make_folders, write_bytes, write_json, write_text
from lockstep.telemetry.tables import aligned, print_table, say
from lockstep.verification.diagnose import FACTOR, Cause
from lockstep.verification.trajectory import Floor, Gap, Trajectory

Outcome = Literal["identical", "equal", "equal without dropout", "equal in float32", "not finite", "different"]
#: From here on rounding has grown so much that a difference in meaning could hide in it.
BLIND = 0.01
COLUMNS = (
    "step",
    "samples",
    "loss, 1 device",
    "loss, {n} devices",
    "loss diff",
    "noise floor",
    "grad norm diff",
    "weights diff",
)


@dataclass(frozen=True)
class Comparison:
    """One device and several, with the same options switched off in both."""

    off: tuple[str, ...]
    one: Trajectory
    many: Trajectory
    gap: Gap
    precision: str | None = None

    def as_dict(self, floor: Floor) -> dict[str, Any]:
        steps = [
            {
                "step": index + 1,
                "samples": int(self.one.samples[index]),
                "loss_one": float(self.one.loss[index]),
                "loss_many": float(self.many.loss[index]),
                "loss_gap": float(self.gap.loss[index]),
                "loss_noise": float(floor.values["loss"][index]),
                "grad_norm_one": float(self.one.grad_norm[index]),
                "grad_norm_many": float(self.many.grad_norm[index]),
                "grad_norm_gap": float(self.gap.grad_norm[index]),
                "grad_norm_noise": float(floor.values["gradient norm"][index]),
                "weights_gap": float(self.gap.weights[index]),
                "weights_noise": float(floor.values["weights"][index]),
                "lr": self.one.lr[index].tolist(),
            }
            for index in range(len(self.gap.loss))
        ]
        return {
            "switched_off": list(self.off),
            "steps": steps,
            "validation": [list(self.one.validation), list(self.many.validation)],
            "weights_sha256": [self.one.fingerprint, self.many.fingerprint],
        }


@dataclass(frozen=True)
class VerifyReport:
    """The verdict and the numbers behind it. ``comparison`` is the one that decided."""

    task: str
    devices: tuple[str, ...]
    strategy: str
    reproducibility: str
    global_batch: int
    outcome: Outcome
    verdict: str
    causes: tuple[Cause, ...]
    notes: tuple[str, ...]
    comparison: Comparison
    floor: Floor
    as_configured: Gap

    @property
    def same(self) -> bool:
        """Whether the devices compute what one computes."""
        return self.outcome not in {"different", "not finite"}

    @property
    def exit_code(self) -> int:
        return 0 if self.same else 1

    def raise_if_different(self) -> None:
        """Raise :class:`~lockstep.errors.ResultsDifferError`, with the likeliest cause, unless the devices agree."""
        if not self.same:
            cause = next(iter(self.causes), None)
            raise ResultsDifferError(self.verdict, why=cause.what if cause else "", fix=cause.fix if cause else "")

    def as_dict(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "devices": list(self.devices),
            "strategy": self.strategy,
            "reproducibility": self.reproducibility,
            "global_batch": self.global_batch,
            "outcome": self.outcome,
            "same": self.same,
            "verdict": self.verdict,
            "causes": [cause.as_dict() for cause in self.causes],
            "notes": list(self.notes),
            "factor": FACTOR,
            "as_configured_loss_gap": self.as_configured.loss.tolist(),
            **self.comparison.as_dict(self.floor),
        }

    def columns(self) -> list[str]:
        return [column.format(n=len(self.devices)) for column in COLUMNS]

    def rows(self) -> list[list[str]]:
        gap, one, many = self.comparison.gap, self.comparison.one, self.comparison.many
        noise = self.floor.values["loss"]
        return [
            [
                str(index + 1),
                str(one.samples[index]),
                f"{one.loss[index]:.6f}",
                f"{many.loss[index]:.6f}",
                f"{gap.loss[index]:.1e}",
                f"{noise[index]:.1e}",
                f"{gap.grad_norm[index]:.1e}",
                f"{gap.weights[index]:.1e}",
            ]
            for index in range(len(gap.loss))
        ]

    def findings(self) -> list[str]:
        """The verdict first, then causes and notes, a line each."""
        lines = [self.verdict]
        for place, cause in enumerate(self.causes):
            lines.append(f"{'likely cause' if place == 0 else 'also'}: {cause.code}: {cause.what}")
            lines.append(f"fix: {cause.fix}")
        return lines + [f"note: {note}" for note in self.notes]


def print_report(report: VerifyReport, stream: TextIO) -> None:
    print_table(report.columns(), report.rows(), stream)
    for line in _validation_lines(report):
        say(line, stream)
    for line in report.findings():
        say(line, stream)


def _validation_lines(report: VerifyReport) -> list[str]:
    pairs = zip(report.comparison.one.validation, report.comparison.many.validation, strict=False)
    lines = []
    for one, many in pairs:
        shared = [name for name in one if name in many]
        values = ", ".join(f"{name} {one[name]:.6g} and {many[name]:.6g}" for name in shared)
        if values:
            lines.append(f"validation: {values}")
    return lines


def write_report(report: VerifyReport, folder: Path) -> list[Path]:
    """``report.json``, ``report.md`` and, where matplotlib is installed, ``verify.png``; the files written.

    Raises:
        StorageError: it cannot be written.
    """
    make_folders(folder)
    files = [folder / "report.json", folder / "report.md"]
    write_json(files[0], report.as_dict())
    table = "\n".join(aligned([report.columns(), *report.rows()]))
    title = f"# {report.task}: {', '.join(report.devices)} against one device\n"
    findings = "\n\n".join(report.findings())
    write_text(files[1], f"{title}\n{findings}\n\n```\n{table}\n```\n")
    if importlib.util.find_spec("matplotlib") is not None:
        files.append(folder / "verify.png")
        _plot(report, files[-1])
    return files


def _plot(report: VerifyReport, file: Path) -> None:
    from matplotlib.figure import Figure

    gap, floor, comparison = report.comparison.gap, report.floor.values, report.comparison
    steps = np.arange(1, len(gap.loss) + 1)
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot(steps, comparison.one.loss[: len(steps)], color="0.6", linewidth=5, label="1 device")
    above.plot(steps, comparison.many.loss[: len(steps)], color="C0", label=f"{len(report.devices)} devices")
    above.set_ylabel("loss of the step")
    above.legend()
    off = f" (without {', '.join(comparison.off)})" if comparison.off else ""
    above.set_title(f"{report.task}, {', '.join(report.devices)}{off}: {report.outcome}")
    least = 1e-9  # zero has no place on a logarithmic axis
    allowed = FACTOR * floor["loss"][: len(steps)]
    below.fill_between(steps, least, allowed, color="0.9", label=f"{FACTOR:g} × noise floor of the loss")
    for name, values in (("loss", gap.loss), ("gradient norm", gap.grad_norm), ("weights", gap.weights)):
        below.plot(steps, np.maximum(values, least), marker=".", label=f"{name} difference")
    if comparison.off:
        configured = report.as_configured.loss[: len(steps)]
        below.plot(
            steps, np.maximum(configured, least), color="0.5", linestyle=":", label="loss difference, as configured"
        )
    below.set(xlabel="step", ylabel="relative difference", yscale="log", ylim=(least, 2))
    below.legend(fontsize="small", ncols=2)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    write_bytes(file, png.getvalue())
