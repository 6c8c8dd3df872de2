"""``lockstep run``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from lockstep.config.load import nested
from lockstep.errors import UsageError

EPILOGUE = """\
The script makes a lockstep.Session; every rank runs all of it. What is not one of these options is passed to the
script, in order; what follows -- always is. A single device needs no `lockstep run`: python script.py.

  --devices DEVICE,...   as in `lockstep train`; cpu,cpu: two CPU ranks
  --strategy S, --precision P, --name TEXT, --set KEY=VALUE   as in `lockstep train`
  --save-dir DIR, --runs-dir DIR   the run folder, or where a new one is made
  --resume               resume the unfinished run in --save-dir, if there is one

Examples:
  lockstep run script.py --devices gpu:0,gpu:1
  lockstep run script.py --lr 0.1 --devices cpu,cpu --save-dir runs/mine   # --lr is the script's
  lockstep run script.py --save-dir runs/mine --resume --devices cpu       # on another number of ranks
  torchrun --nproc_per_node=2 script.py                                    # the same, each process is a rank

Ctrl-C once ends the run with a checkpoint; `lockstep resume last` resumes it."""

app = App(name="run", usage="Usage: lockstep run SCRIPT [ARGUMENTS] [OPTIONS]", help_epilogue=EPILOGUE)

#: Options with a value, and their settings.
_VALUES = {
    "--devices": "hardware.selected_devices",
    "--strategy": "hardware.strategy",
    "--precision": "hardware.precision",
    "--save-dir": "save_dir",
    "--runs-dir": "runs_dir",
    "--name": "name",
}


@app.default
def run(
    script: Annotated[str, Parameter(help="A Python file that makes a lockstep.Session.")],
    /,
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True, help="Of the script, and these options.")],
) -> int:
    """Run a script with a lockstep.Session on one or several devices.

    ``--devices LIST``, ``--strategy S``, ``--precision P``, ``--save-dir DIR``, ``--runs-dir DIR``, ``--name TEXT``,
    ``--set KEY=VALUE`` (may be given again), ``--resume``: as for ``lockstep train``.
    """
    own, given, sets, resume = _parsed(arguments)
    from lockstep.config import load

    settings = load(sets=sets, overrides=nested(given))
    from lockstep.launch.session.script import run_script

    return run_script(Path(script).expanduser(), own, settings, resume=resume)[1]


def _parsed(arguments: tuple[str, ...]) -> tuple[list[str], dict[str, Any], list[str], bool]:
    """The script's arguments, settings by key, those of ``--set``, and whether to resume."""
    own: list[str] = []
    given: dict[str, Any] = {}
    sets: list[str] = []
    resume, rest = False, list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if word == "--":
            own += rest
            break
        if word == "--resume":
            resume = True
        elif name in _VALUES or name == "--set":
            if not equals:
                if not rest:
                    raise UsageError(f"{name} needs a value", fix="`lockstep run --help` lists what is possible")
                value = rest.pop(0)
            if name == "--set":
                sets.append(value)
            else:
                given[_VALUES[name]] = value
        else:
            own.append(word)
    return own, given, sets, resume
