"""A report on disk: one HTML page, complete in one file without network or script, and PNG files beside it."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lockstep.lab.report.figures import group_pictures, pictures, require_matplotlib
from lockstep.lab.report.source import RunData, compared, read_run, text
from lockstep.rundir.files import make_folders, write_text
from lockstep.rundir.folder import RunDir
from lockstep.rundir.groups import Grouping
from lockstep.rundir.summary import find_runs, labels


def write_report(refs: Sequence[str], runs_dir: Path, out: Path | None, grouping: Grouping | None = None) -> list[Path]:
    """Write the report on the runs that ``refs`` name to ``out``; returns its files, the page first.

    With a ``grouping``, curves are the means of its groups, and the table has a row for each. Of an ``out`` that ends
    in ``.html``, only the page is written. Raises :class:`RunFolderError`, :class:`UnsupportedError` without
    matplotlib, :class:`StorageError`.
    """
    require_matplotlib()
    runs = read_all(refs, runs_dir) if grouping is None else []
    folder = out or (runs[0].path if grouping is None else Path(grouping.groups[0].runs[0]["path"])) / "report"
    alone = folder.suffix == ".html" and not folder.is_dir()
    file = folder if alone else folder / "report.html"
    drawn = pictures(runs) if grouping is None else group_pictures(grouping)
    names = [run.label for run in runs] if grouping is None else [Path(ref).name for ref in refs]
    page = render(
        __package__,
        "report.html",
        {"text": text, "base64": lambda png: base64.b64encode(png).decode()},
        title=f"Lockstep: {', '.join(names)}",
        made=datetime.now(UTC),
        runs=runs,
        comparison=compared(runs) if grouping is None else None,
        groups=None if grouping is None else grouping.table(text),
        pictures=drawn,
    )
    make_folders(file.parent)
    images = [] if alone else [picture.save(folder) for picture in drawn]
    write_text(file, page)
    return [file, *images]


def read_all(refs: Sequence[str], runs_dir: Path) -> list[RunData]:
    """Read the runs that ``refs`` name, each once."""
    runs = [read_run(run) for run in find_all(refs, runs_dir)]
    names = labels([{"name": run.record.name, "location": run.path.name, "id": run.record.id} for run in runs])
    return [replace(run, label=label) for run, label in zip(runs, names, strict=True)]


def find_all(refs: Sequence[str], runs_dir: Path) -> list[RunDir]:
    """Find the runs that ``refs`` name, each once."""
    return list({run.path: run for ref in refs for run in find_runs(ref, runs_dir)}.values())


def render(package: str, name: str, filters: Mapping[str, Callable[..., Any]] | None = None, **values: Any) -> str:
    """Render the jinja2 template ``name`` in the folder ``html`` of ``package`` with ``values``, all escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader(package, "html")
    pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    pages.filters |= filters or {}
    return pages.get_template(name).render(**values)
