"""`lockstep compare` and `lockstep report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from lockstep.cli.output import DEFAULT_RUNS_DIR, AsJson, RunsDir, answer, flag, verb
from lockstep.errors import UsageError
from lockstep.telemetry.console import print_table, say

if TYPE_CHECKING:
    from lockstep.rundir.groups import Grouping

#: Of more runs, a table has no column for each.
MAX_COLUMNS = 8

By = Annotated[
    str | None,
    flag(
        "Group runs by these settings: the metric's mean ± standard deviation, best first. Default: for a sweep, or "
        f"more than {MAX_COLUMNS} runs, every setting that differs but the seed.",
        "KEY,...",
    ),
]
Metric = Annotated[str | None, flag("Metric of groups, such as test_accuracy. Default: the monitored one.")]


def grouped(refs: Sequence[str], runs_dir: Path, by: str | None, metric: str | None) -> Grouping | None:
    """Return the runs in groups, if groups are asked for, if a sweep is named, or if there are many runs."""
    from lockstep.lab.report.page import find_all
    from lockstep.rundir.groups import facts_of, group_runs

    runs = find_all(refs, runs_dir)
    if by is None and metric is None and len(runs) <= min(len(refs), MAX_COLUMNS):
        return None
    return group_runs(facts_of(runs), by.split(",") if by else (), metric or "")


@verb(
    "RUN RUN… [OPTIONS]",
    "Examples:\n  lockstep compare run-1a2b3c4d run-5e6f7a8b --out comparison\n"
    "  lockstep compare rates-1 --by training.seed          # a sweep",
)
def compare(
    *runs: Annotated[
        str, flag("Two runs or more: folder, id, beginning of an id, or `last`; or a tag, such as a sweep's name.")
    ],
    by: By = None,
    metric: Metric = None,
    out: Annotated[
        Path | None, flag("Also write overlaid curves there, as report.html and PNG files. Default: no.")
    ] = None,
    as_json: AsJson = False,
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
) -> None:
    from lockstep.lab.report.page import read_all, write_report
    from lockstep.lab.report.source import compared, text

    grouping = grouped(runs, runs_dir, by, metric)
    if grouping is not None:
        written = write_report(runs, runs_dir, out, grouping) if out is not None else []
        files = [str(path) for path in written]

        def show_groups(stream: TextIO) -> None:
            print_table(*grouping.table(text), stream)
            stream.writelines(f"{file}\n" for file in files)

        answer({**grouping.as_dict(), "files": files}, show_groups, as_json)
        return
    sources = read_all(runs, runs_dir)
    if len(sources) < 2:
        raise UsageError(
            "a comparison needs two runs or more",
            why=f"number of runs: {len(sources)}",
            fix="lockstep compare RUN RUN; `lockstep runs` lists them",
        )
    comparison = compared(sources)
    labels = comparison.labels
    differing = comparison.differences
    written = write_report(runs, runs_dir, out) if out is not None else []
    files = [str(path) for path in written]
    document = {
        "runs": labels,
        "summary": comparison.results,
        "differences": differing,
        "epochs": {run.label: run.epochs for run in sources},
        "evaluations": {run.label: run.evaluations for run in sources},
        "files": files,
    }

    def show(stream: TextIO) -> None:
        print_table(("", *labels), _lines(comparison.results), stream)
        say("", stream)
        if differing:
            print_table(("what differs", *labels), _lines(differing), stream)
        else:
            say("Settings and plans are the same.", stream)
        stream.writelines(f"{file}\n" for file in files)

    answer(document, show, as_json)


def _lines(table: Mapping[str, Sequence[Any]]) -> list[tuple[str, ...]]:
    from lockstep.lab.report.source import text

    return [(name, *map(text, values)) for name, values in table.items()]


@verb("RUN… [OPTIONS]", "Example:\n  lockstep report last\n  lockstep report run-1a2b3c4d run-5e6f7a8b --out page")
def report(
    *runs: Annotated[str, flag("Runs: folder, id, beginning of an id, `last`, or a tag.")],
    by: By = None,
    metric: Metric = None,
    out: Annotated[
        Path | None,
        flag("Folder for report.html and pictures, or an .html file. Default: `report` in the first one."),
    ] = None,
    as_json: AsJson = False,
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
) -> None:
    from lockstep.lab.report.page import write_report

    if not runs:
        raise UsageError("no run was named", fix="lockstep report last; `lockstep runs` lists them")
    written = write_report(runs, runs_dir, out, grouped(runs, runs_dir, by, metric))
    files = [str(path) for path in written]
    answer({"files": files}, lambda out: out.writelines(f"{file}\n" for file in files), as_json)
