"""One HTML page about runs and benchmarks that needs nothing else: no network, no script."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from lockstep.report.figures import Picture
from lockstep.report.source import Row, RunData, differences

STYLE = """
:root { color-scheme: light dark; --line: #d7dbe0; --soft: #667085; --back: #ffffff; --text: #1a1d21; }
@media (prefers-color-scheme: dark) { :root { --line: #3a3f46; --soft: #9aa4b2; --back: #16181c; --text: #e6e8eb; } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem;
       background: var(--back); color: var(--text); }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .9rem .25rem 0; text-align: left; vertical-align: top; }
th { font-weight: 600; } td.number { text-align: right; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: 1rem; }
figure { margin: 0; background: #fff; border: 1px solid var(--line); border-radius: 6px; padding: .4rem; }
figure svg, figure img { width: 100%; height: auto; }
.error { border-left: 3px solid #c0392b; padding-left: .8rem; white-space: pre-wrap; font-family: monospace; }
.soft { color: var(--soft); } summary { cursor: pointer; margin: .6rem 0; }
"""

Cells = Sequence[Any]


def page(
    runs: Sequence[RunData],
    pictures: Sequence[Picture],
    benches: Mapping[Path, Row],
    *,
    made: datetime,
) -> str:
    """The whole document.

    Args:
        benches: reports of benchmarks by their folder, whose pictures are taken in.
        made: when; stands in the page.
    """
    names = [run.label for run in runs] + [
        f"{report['kind']} of {report.get('task', '?')}" for report in benches.values()
    ]
    title = f"Lockstep: {', '.join(names)}"
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="soft">Made {made:%Y-%m-%d %H:%M %Z}.</p>']
    if runs:
        parts += ["<h2>Runs</h2>", _summary(runs), *map(_troubles, runs)]
    if pictures:
        figures = (
            f'<figure role="img" aria-label="{escape(picture.title)}">{picture.svg()}</figure>' for picture in pictures
        )
        parts += ["<h2>Curves</h2>", f'<div class="pictures">{"".join(figures)}</div>']
    parts += [_drawn(run) for run in runs if run.drawn]
    if len(runs) > 1:
        parts += ["<h2>What differs</h2>", differing(runs)]
    parts += [_bench(folder, report) for folder, report in benches.items()]
    parts += [_details(run) for run in runs]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def summary_rows(runs: Sequence[RunData]) -> list[tuple[str, list[Any]]]:
    """What every run is and came to: a name and a value for each run. Names that no run has are left out."""
    rows: list[tuple[str, list[Any]]] = [
        ("run", [run.record.id for run in runs]),
        ("task", [run.record.task for run in runs]),
        ("status", [run.status for run in runs]),
        ("devices", [", ".join((run.record.placement or {}).get("devices", ())) for run in runs]),
        ("strategy", [(run.record.placement or {}).get("strategy") for run in runs]),
        ("global batch", [run.plan.get("batch.global_batch") for run in runs]),
        ("steps", [run.epochs[-1].get("step") if run.epochs else None for run in runs]),
        ("samples/s", [_median([row.get("samples_per_s") for row in run.epochs]) for run in runs]),
        ("forecast", [run.forecast for run in runs]),
        ("best epoch", [run.record.best_epoch for run in runs]),
    ]
    for prefix, of in (("best", "best_metric"), ("final", "final_metrics")):
        found = [getattr(run.record, of) or {} for run in runs]
        rows += [
            (f"{prefix} {name}", [one.get(name) for one in found])
            for name in dict.fromkeys(n for one in found for n in one)
        ]
    return [(name, values) for name, values in rows if any(value not in (None, "") for value in values)]


def difference_rows(runs: Sequence[RunData]) -> list[tuple[str, list[Any]]]:
    """Settings and decisions that are not the same in all ``runs``."""
    of = {"": [run.config for run in runs], "plan: ": [_decisions(run.plan) for run in runs]}
    return [(f"{prefix}{key}", values) for prefix, all_of in of.items() for key, values in differences(all_of).items()]


def _decisions(plan: Row) -> Row:
    """A plan without what the configuration says already, and without its reasons."""
    left_out = ("config", "reasons", "notes", "decisions", "task.")
    return {key: value for key, value in plan.items() if not key.startswith(left_out) and ".reasons." not in key}


def _median(values: Sequence[Any]) -> float | None:
    found = sorted(value for value in values if isinstance(value, int | float))
    return found[len(found) // 2] if found else None


def text(value: Any) -> str:
    """A value as people read it."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(text, value))
    return str(value)


def table(head: Sequence[str], rows: Sequence[tuple[str, Cells]]) -> str:
    """An HTML table: ``head`` over rows of a name and its cells."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>' + "".join(_cell(value) for value in cells) + "</tr>"
        for name, cells in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any) -> str:
    kind = ' class="number"' if isinstance(value, int | float) and not isinstance(value, bool) else ""
    return f"<td{kind}>{escape(text(value))}</td>"


def _summary(runs: Sequence[RunData]) -> str:
    return table(["", *(run.label for run in runs)], summary_rows(runs))


def differing(runs: Sequence[RunData]) -> str:
    rows = difference_rows(runs)
    if not rows:
        return "<p>Nothing: settings and plans are the same.</p>"
    return table(["", *(run.label for run in runs)], rows)


def _troubles(run: RunData) -> str:
    parts = [f'<p class="error">{escape(f"{run.label}: {run.record.error}")}</p>'] if run.record.error else []
    parts += [f'<p class="soft">{escape(f"{run.label}: {problem}")}</p>' for problem in run.problems]
    return "\n".join(parts)


def _details(run: RunData) -> str:
    command = escape(" ".join(run.record.command))
    settings = table(["setting", "value"], [(key, [value]) for key, value in run.config.items() if value is not None])
    versions = ", ".join(f"{name} {version}" for name, version in run.record.versions.items())
    return (
        f"<details><summary>Settings of {escape(run.label)}</summary>"
        f"<p><code>{command}</code></p>{settings}<p class='soft'>{escape(versions)}</p></details>"
    )


def _bench(folder: Path, report: Row) -> str:
    rows = [row for row in report.get("rows") or [] if isinstance(row, dict)]
    plain = [{key: value for key, value in row.items() if not isinstance(value, (dict, list))} for row in rows]
    names = list(dict.fromkeys(name for row in plain for name in row))
    body = [(text(row.get(names[0])), [row.get(name) for name in names[1:]]) for row in plain] if names else []
    machine = report.get("machine")
    about = ", ".join(map(str, machine.values())) if isinstance(machine, dict) else str(machine or "")
    images = "".join(_image(file.stem, file.read_bytes()) for file in sorted(folder.glob("*.png")))
    notes = "".join(
        f"<p>{escape(str(note))}</p>" for note in _as_list(report.get("verdict")) + _as_list(report.get("notes"))
    )
    return (
        f"<h2>{escape(str(report['kind']))} of {escape(str(report.get('task', '')))}</h2>"
        f'<p class="soft">{escape(str(report.get("date", "")))} {escape(about)}</p>'
        f'{notes}{table(names, body) if body else ""}<div class="pictures">{images}</div>'
    )


def _drawn(run: RunData) -> str:
    """What the run's task drew of the newest validation."""
    images = "".join(_image(name, png) for name, png in run.drawn.items())
    return f'<h2>Drawn by {escape(run.label)}</h2><div class="pictures">{images}</div>'


def _image(name: str, png: bytes) -> str:
    content = base64.b64encode(png).decode()
    return f'<figure><img alt="{escape(name)}" src="data:image/png;base64,{content}"></figure>'


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]
