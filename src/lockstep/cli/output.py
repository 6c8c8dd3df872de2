"""Output of commands: one JSON document or a table on standard output, errors on standard error."""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from cyclopts import App, Parameter

from lockstep.errors import LockstepError, StorageError
from lockstep.telemetry.console import is_terminal, print_table, say, value_text

if TYPE_CHECKING:
    from lockstep.rundir.folder import RunDir

RunRef = Annotated[
    str, Parameter(help="The run: its folder, id, the beginning of its id, `last`, or the URL of its mirror.")
]
RunsDir = Annotated[Path, Parameter(name="--runs-dir", help="Where runs are looked for. Default: runs.")]
RunsPlace = Annotated[
    str, Parameter(name="--runs-dir", help="Where runs are looked for: a folder, or a URL of mirrors. Default: runs.")
]
AsJson = Annotated[bool, Parameter(name="--json", negative="", help="Print one JSON document instead of tables.")]

DEFAULT_RUNS_DIR = Path("runs")


def flag(help: str, metavar: str | None = None, **more: Any) -> Parameter:
    """Make a parameter with its text on the help page; a switch has no ``--no-`` form."""
    return Parameter(help=help, metavar=metavar, **{"negative": "", **more})


def print_json(document: Mapping[str, Any]) -> None:
    """Print one document; numbers that JSON does not have become null."""
    from lockstep.rundir.files import plain

    sys.stdout.write(json.dumps(plain(document), indent=2) + "\n")


def answer(document: Mapping[str, Any], show: Callable[[TextIO], object], as_json: bool) -> None:
    """Print ``document`` as JSON, or let ``show`` print it for people, on standard output."""
    if as_json:
        print_json(document)
    else:
        show(sys.stdout)


def print_values(values: Iterable[tuple[str, object]], stream: TextIO, *, title: str = "") -> None:
    """Print a table of names and values."""
    print_table((title, ""), [(name, value_text(value)) for name, value in values], stream)


def report_folder(mapping: dict[str, Any], kind: str) -> Path:
    """Return the folder of a measuring verb's report: ``save_dir``, taken out of the settings, or a new one."""
    from lockstep.rundir.files import check_place

    runs_dir = Path(mapping.get("runs_dir", DEFAULT_RUNS_DIR))
    chosen = mapping.pop("save_dir", None)
    check_place(Path(chosen) if chosen else runs_dir)
    return Path(chosen) if chosen else runs_dir / f"{kind}-{uuid.uuid4().hex[:8]}"


def deliver(
    report: Any,
    folder: Path,
    *,
    write: Callable[[Any, Path], list[Path]],
    show: Callable[[Any, TextIO], None],
    as_json: bool,
) -> int:
    """Call ``write`` to write a report to ``folder``; print it as JSON or ``show`` it. Returns its exit code.

    Raises:
        StorageError: it could not be written; it was printed all the same.
    """
    files: list[Path] = []
    failure: StorageError | None = None
    try:
        files = write(report, folder)
    except StorageError as error:
        failure = error
    answer({**report.as_dict(), "files": [str(file) for file in files]}, partial(show, report), as_json)
    if failure is not None:
        raise failure
    if not as_json:
        say(f"report: {folder}", sys.stdout)
    return int(report.exit_code)


def progress(line: str, doing: str = "measuring") -> None:
    """Print a line of progress on standard error."""
    say(f"{doing}: {line}", sys.stderr)


def print_error(error: LockstepError, stream: TextIO, *, rank: str = "0") -> None:
    """Print what, why and fix. Under torchrun or srun every rank fails alike: all but the first print one line."""
    if rank != "0":
        fix = f" (fix: {error.fix})" if error.fix else ""  # the first rank may be ended before it prints
        say(f"rank {rank}: error: {' '.join(error.what.split())}{fix}", stream)
        return
    coloured = is_terminal(stream) and not os.environ.get("NO_COLOR")
    say(f" {error}", stream, styled="\x1b[1;31merror:\x1b[0m" if coloured else "error:")


def verb(usage: str, epilogue: str | None = None) -> Callable[[Callable[..., Any]], App]:
    """Make the app of a command from the function of that name; the line under ``usage`` is in ``cli/main.py``."""

    def made(function: Callable[..., Any]) -> App:
        name = function.__name__
        app = App(name=name, usage=f"Usage: lockstep {name} {usage}", help_epilogue=epilogue)
        app.default(function)
        return app

    return made


def find(ref: str, runs_dir: Path) -> RunDir:
    """Find the run that ``ref`` means. Raises :class:`~lockstep.errors.RunFolderError`."""
    from lockstep.rundir.summary import find_run

    return find_run(ref, runs_dir)
