"""A report on disk: ``report.html`` and PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from lockstep.report.figures import pictures, require_matplotlib
from lockstep.report.page import page
from lockstep.report.source import Row, RunData, is_bench, read_bench, read_run
from lockstep.telemetry.comparison import labels
from lockstep.telemetry.files import make_folders, write_text
from lockstep.telemetry.lookup import find_run


def write_report(refs: Sequence[str], runs_dir: Path, out: Path | None) -> list[Path]:
    """Write the report on the runs and benchmarks that ``refs`` name to ``out``; returns its files, the page first.

    Files of an earlier report in the same folder are replaced.

    Raises:
        RunFolderError: no such run. UnsupportedError: no matplotlib. StorageError: ``out`` cannot be written.
    """
    require_matplotlib()
    runs, benches = read_all(refs, runs_dir)
    folder = out or (runs[0].path if runs else next(iter(benches))) / "report"
    drawn = pictures(runs)
    make_folders(folder)
    images = [picture.save(folder) for picture in drawn]
    write_text(folder / "report.html", page(runs, drawn, benches, made=datetime.now(UTC)))
    return [folder / "report.html", *images]


def read_all(refs: Sequence[str], runs_dir: Path) -> tuple[list[RunData], dict[Path, Row]]:
    """The runs that ``refs`` name, each once, and the reports of benchmark folders among them.

    Raises:
        RunFolderError: there is no such run.
    """
    runs: dict[Path, RunData] = {}
    benches: dict[Path, Row] = {}
    for ref in refs:
        for folder in (Path(ref), runs_dir / ref):
            if is_bench(folder):
                benches[folder] = read_bench(folder)
                break
        else:
            run = find_run(ref, runs_dir)
            runs.setdefault(run.path, read_run(run))
    names = labels([{"name": run.record.name, "id": run.record.id} for run in runs.values()])
    return [replace(run, label=label) for run, label in zip(runs.values(), names, strict=True)], benches
