"""The result of a verification as a table and as JSON."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

from lockstep.errors import ResultsDifferError
from lockstep.rundir.files import make_folders, write_json
from lockstep.telemetry.console import print_table, say
from lockstep.verification.diagnose import Cause
from lockstep.verification.experiments import Comparison
from lockstep.verification.trajectory import BUFFER, FACTOR, Floor, Gap

Outcome = Literal["identical", "equal", "equal without dropout", "equal in float32", "not finite", "different"]
#: Rounding above this could hide a real difference.
BLIND = 0.01
#: Quantities in the table of steps, by the name of their columns.
_QUANTITIES = {"loss": "loss", "grad norm": "gradient norm", "weights": "weights"}


@dataclass(frozen=True, repr=False)
class VerifyReport:
    """The verdict and its numbers; printed, it is the report. ``comparison``: the decisive one."""

    task: str
    devices: tuple[str, ...]
    strategy: str
    reproducibility: str
    global_batch: int
    outcome: Outcome
    causes: tuple[Cause, ...]
    notes: tuple[str, ...]
    comparison: Comparison
    floor: Floor
    as_configured: Gap

    def __str__(self) -> str:
        text = io.StringIO()
        print_report(self, text)
        return text.getvalue().rstrip("\n")

    def __repr__(self) -> str:
        return f"VerifyReport({self.task!r}, {', '.join(self.devices)}: {self.outcome})"

    @property
    def same(self) -> bool:
        """Whether several devices compute the same result as one."""
        return self.outcome not in {"different", "not finite"}

    @property
    def exit_code(self) -> int:
        return 0 if self.same else 1

    @property
    def verdict(self) -> str:
        """The outcome in a sentence, with the decisive numbers."""
        gap = self.comparison.gap
        devices = len(self.devices)
        configured = self.as_configured["loss"].max(initial=0)
        apart = (
            f"over {len(gap['loss'])} steps the losses of {devices} devices and one differ by at most "
            f"{gap['loss'].max(initial=0):.1e} (noise floor {self.floor['loss'].max(initial=0):.1e}), the weights by "
            f"{gap['weights'].max(initial=0):.1e} of their movement ({self.floor['weights'].max(initial=0):.1e})"
        )
        sentences: dict[Outcome, str] = {
            "identical": f"IDENTICAL: after {len(gap['loss'])} steps the weights of {devices} devices and one are "
            f"equal bit for bit (sha256 {self.comparison.one.fingerprint[:12]}…)",
            "equal": f"EQUAL to rounding: {apart}",
            "equal without dropout": f"EQUAL to rounding without dropout: {apart}; with dropout by {configured:.1e}, "
            "since in fast mode ranks draw different masks (--reproducibility exact draws the same on any devices)",
            "equal in float32": f"EQUAL to rounding in float32: {apart}; in the configured precision by "
            f"{configured:.1e}, whose rounding depends on how a batch is split",
            "not finite": "NOT COMPARABLE: the loss is not finite, on one device and on several",
        }
        return sentences.get(self.outcome) or f"DIFFERENT: {self._difference()}"

    def _difference(self) -> str:
        """Describe the first difference: in samples, between ranks, after a resume, or in a quantity."""
        single = self.comparison.one
        many = self.comparison.many
        differences = self.comparison.gap
        devices = len(self.devices)
        first_other_step = single.first_other_samples(many)
        if first_other_step is not None:
            return f"from step {first_other_step} on the samples of {devices} devices are not those of one"
        if many.divergence is not None:
            return f"the {devices} ranks do not have the same weights and buffers"
        if self.causes[0].code == "resume":
            return f"{devices} devices and one agree, but a resumed run and a whole one do not"
        quantity, index = self.floor.parting(differences) or ("weights", len(differences["loss"]) - 1)
        since = f"from step {index + 1} on"
        if quantity == "validation loss":
            since = f"in validation {index + 1}"
        elif quantity.startswith(BUFFER):
            since = f"after step {single.merged[index + 1]}"
        return (
            f"{since} the {quantity} of {devices} devices and one differs by {differences[quantity][index]:.1e} "
            f"(noise floor {self.floor[quantity][index]:.1e})"
        )

    def raise_if_different(self) -> None:
        """Raise :class:`~lockstep.errors.ResultsDifferError`, with the likeliest cause, unless the devices agree."""
        if not self.same:
            cause = next(iter(self.causes), None)
            raise ResultsDifferError(self.verdict, why=cause.what if cause else "", fix=cause.fix if cause else "")

    def as_dict(self) -> dict[str, Any]:
        names = "task devices strategy reproducibility global_batch outcome same verdict"
        single = self.comparison.one
        many = self.comparison.many
        gap = self.comparison.gap
        columns = {"samples": single.samples, "loss_one": single.loss, "loss_many": many.loss, "lr": single.lr}
        columns |= {"grad_norm_one": single.grad_norm, "grad_norm_many": many.grad_norm}
        for name, quantity in _QUANTITIES.items():
            key = name.replace(" ", "_")
            columns |= {f"{key}_gap": gap[quantity], f"{key}_noise": self.floor[quantity]}
        return {
            **{name: getattr(self, name) for name in names.split()},
            "causes": [asdict(cause) for cause in self.causes],
            "notes": list(self.notes),
            "factor": FACTOR,
            "as_configured_loss_gap": self.as_configured["loss"].tolist(),
            "switched_off": list(self.comparison.off),
            "steps": [
                {"step": index + 1, **{name: values[index].tolist() for name, values in columns.items()}}
                for index in range(len(gap["loss"]))
            ],
            "validation": [list(single.validation), list(many.validation)],
            "weights_sha256": [single.fingerprint, many.fingerprint],
        }

    def findings(self) -> list[str]:
        """Return the verdict, causes and notes, a line each."""
        lines = [self.verdict]
        for index, cause in enumerate(self.causes):
            lines.append(f"{'likely cause' if index == 0 else 'also'}: {cause.code}: {cause.what}")
            lines.append(f"fix: {cause.fix}")
        return lines + [f"note: {note}" for note in self.notes]


def print_report(report: VerifyReport, stream: TextIO) -> None:
    single = report.comparison.one
    many = report.comparison.many
    gap = report.comparison.gap
    losses = ("loss, 1 device", f"loss, {len(report.devices)} devices")
    columns = ("step", "samples", *losses, *(f"{name} {kind}" for name in _QUANTITIES for kind in ("diff", "noise")))
    differences = [of[name] for name in _QUANTITIES.values() for of in (gap, report.floor)]
    rows = [
        [
            *(str(index + 1), str(single.samples[index])),
            *(f"{run.loss[index]:.6f}" for run in (single, many)),
            *(f"{values[index]:.1e}" for values in differences),
        ]
        for index in range(len(gap["loss"]))
    ]
    print_table(columns, rows, stream)
    for alone, together in zip(single.validation, many.validation, strict=False):
        shared = alone.keys() & together.keys()
        values = ", ".join(f"{name} {alone[name]:.6g} and {together[name]:.6g}" for name in alone if name in shared)
        if values:
            say(f"validation: {values}", stream)
    for line in report.findings():
        say(line, stream)


class Writable(Protocol):
    """The report on a task or on a script."""

    def as_dict(self) -> dict[str, Any]: ...


def write_report(report: Writable, folder: Path) -> list[Path]:
    """Write ``report.json`` to ``folder``; returns the file. Raises :class:`~lockstep.errors.StorageError`."""
    make_folders(folder)
    file = folder / "report.json"
    write_json(file, report.as_dict())
    return [file]
