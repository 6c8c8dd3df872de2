"""A report on disk: one HTML page, complete in one file without network or script, and PNG files beside it."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lockstep.lab.report.figures import group_pictures, pictures, require_matplotlib
from lockstep.lab.report.source import Row, RunData, compared, is_bench, read_bench, read_run, text
from lockstep.rundir.files import make_folders, write_text
from lockstep.rundir.folder import RunDir
from lockstep.rundir.groups import Grouping
from lockstep.rundir.summary import find_runs, labels


def write_report(refs: Sequence[str], runs_dir: Path, out: Path | None, grouping: Grouping | None = None) -> list[Path]:
    """Write the report on the runs and benchmarks that ``refs`` name to ``out``; returns its files, the page first.

    With a ``grouping``, curves are the means of its groups, and the table has a row for each. Of an ``out`` that ends
    in ``.html``, only the page is written. Raises :class:`RunFolderError`, :class:`UnsupportedError` without
    matplotlib, :class:`StorageError`.
    """
    require_matplotlib()
    runs, benches = read_all(refs, runs_dir, with_runs=grouping is None)
    first = next(iter(benches), None) if grouping is None else Path(grouping.groups[0].runs[0]["path"])
    folder = out or (runs[0].path if runs else first or runs_dir) / "report"
    alone = folder.suffix == ".html" and not folder.is_dir()
    file = folder if alone else folder / "report.html"
    drawn = pictures(runs) if grouping is None else group_pictures(grouping)
    found = [_bench(folder, report) for folder, report in benches.items()]
    names = [run.label for run in runs] if grouping is None else [Path(ref).name for ref in refs]
    page = render(
        __package__,
        "report.html",
        {"text": text, "base64": lambda png: base64.b64encode(png).decode()},
        title=f"Lockstep: {', '.join([*names, *(bench['title'] for bench in found)])}",
        made=datetime.now(UTC),
        runs=runs,
        comparison=compared(runs) if runs and grouping is None else None,
        groups=None if grouping is None else grouping.table(text),
        pictures=drawn,
        benches=found,
    )
    make_folders(file.parent)
    images = [] if alone else [picture.save(folder) for picture in drawn]
    write_text(file, page)
    return [file, *images]


def read_all(refs: Sequence[str], runs_dir: Path, *, with_runs: bool = True) -> tuple[list[RunData], dict[Path, Row]]:
    """The runs that ``refs`` name, each once, and the reports of benchmark folders among them."""
    runs: dict[Path, RunData] = {}
    benches: dict[Path, Row] = {}
    for ref in refs:
        bench = _bench_folder(ref, runs_dir)
        if bench is not None:
            benches[bench] = read_bench(bench)
    for run in find_all(refs, runs_dir) if with_runs else ():
        runs[run.path] = read_run(run)
    sources = ({"name": run.record.name, "location": path.name, "id": run.record.id} for path, run in runs.items())
    names = labels([*sources])
    return [replace(run, label=label) for run, label in zip(runs.values(), names, strict=True)], benches


def find_all(refs: Sequence[str], runs_dir: Path) -> list[RunDir]:
    """The runs that ``refs`` name, each once, without folders of benchmarks."""
    named = [run for ref in refs if _bench_folder(ref, runs_dir) is None for run in find_runs(ref, runs_dir)]
    return list({run.path: run for run in named}.values())


def _bench_folder(ref: str, runs_dir: Path) -> Path | None:
    return next((folder for folder in (Path(ref), runs_dir / ref) if is_bench(folder)), None)


def _bench(folder: Path, report: Row) -> Row:
    rows = [row for row in report.get("rows") or [] if isinstance(row, dict)]
    plain = [{key: value for key, value in row.items() if not isinstance(value, (dict, list))} for row in rows]
    names = list(dict.fromkeys(name for row in plain for name in row))
    machine = report.get("machine")
    about = ", ".join(map(str, machine.values())) if isinstance(machine, dict) else str(machine or "")
    return {
        "title": f"{report['kind']} of {report.get('task', '?')}",
        "about": f"{report.get('date', '')} {about}",
        "notes": _as_list(report.get("verdict")) + _as_list(report.get("notes")),
        "names": names,
        "rows": [(text(row.get(names[0])), [row.get(name) for name in names[1:]]) for row in plain] if names else [],
        "images": [(file.stem, file.read_bytes()) for file in sorted(folder.glob("*.png"))],
    }


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def render(package: str, name: str, filters: Mapping[str, Callable[..., Any]] | None = None, **values: Any) -> str:
    """Render the jinja2 template ``name`` in the folder ``html`` of ``package`` with ``values``, all escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader(package, "html")
    pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    pages.filters |= filters or {}
    return pages.get_template(name).render(**values)
