"""``lockstep compare``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from lockstep.cli.output import DEFAULT_RUNS_DIR, AsJson, RunsDir, print_json

app = App(
    name="compare",
    usage="Usage: lockstep compare RUN RUN… [OPTIONS]",
    help_epilogue="Example:\n  lockstep compare run-1a2b3c4d run-5e6f7a8b --out comparison",
)


@app.default
def compare(
    *runs: Annotated[str, Parameter(help="Two runs or more: folder, id, beginning of an id, or `last`.")],
    out: Annotated[
        Path | None, Parameter(help="Also write overlaid curves there, as report.html and PNG files. Default: no.")
    ] = None,
    as_json: AsJson = False,
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
) -> None:
    """Compare the results, settings and plans of runs."""
    from lockstep.errors import UsageError
    from lockstep.report.source import compared
    from lockstep.report.write import read_all, write_report
    from lockstep.telemetry.tables import print_table, say

    found, benches = read_all(runs, runs_dir)
    if len(found) < 2 or benches:
        raise UsageError(
            "a comparison needs two runs or more",
            why="benchmarks cannot be compared with runs" if benches else f"{len(found)} was given",
            fix="lockstep compare RUN RUN; `lockstep runs` lists them, `lockstep report` accepts benchmarks",
        )
    comparison = compared(found)
    labels, differing = comparison.labels, comparison.differences
    written = write_report(runs, runs_dir, out) if out is not None else []
    if as_json:
        document = {
            "runs": labels,
            "summary": comparison.results,
            "differences": differing,
            "epochs": {run.label: run.epochs for run in found},
            "evaluations": {run.label: run.evaluations for run in found},
            "files": [str(path) for path in written],
        }
        print_json(document, sys.stdout)
        return
    print_table(("", *labels), _lines(comparison.results), sys.stdout)
    say("", sys.stdout)
    if differing:
        print_table(("what differs", *labels), _lines(differing), sys.stdout)
    else:
        say("Settings and plans are the same.", sys.stdout)
    sys.stdout.writelines(f"{path}\n" for path in written)


def _lines(table: Mapping[str, Sequence[Any]]) -> list[tuple[str, ...]]:
    from lockstep.report.source import text

    return [(name, *map(text, values)) for name, values in table.items()]
