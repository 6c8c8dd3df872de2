"""`lockstep audit`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from lockstep.cli.output import flag, verb
from lockstep.errors import UsageError
from lockstep.telemetry.console import say

AUDIT = """\
The script is run unchanged, on one rank and on several, and observed from inside its processes. Its training passes end
after --steps optimizer steps, the script itself in its third epoch.

Examples:
  lockstep audit train.py --epochs 1
  lockstep audit --ranks 1,2 --steps 20 --json report.json train.py
  lockstep audit -m package.module --config small.yaml
  lockstep audit -- torchrun --nproc_per_node 4 train.py --steps 5   # what follows -- is the script's
  lockstep audit --fail-on error train.py                             # in CI

Exit codes: 0 no finding of that severity, 1 findings, 2 wrong usage, or the script fails without Lockstep too."""


@verb("[OPTIONS] SCRIPT [ARGUMENTS]", AUDIT)
def audit(
    script: Annotated[str, flag("A script, or a command of torchrun or accelerate.", allow_leading_hyphen=True)],
    /,
    *arguments: Annotated[str, flag("Of the script.", allow_leading_hyphen=True)],
    ranks: Annotated[str, flag("Numbers of ranks, comma-separated. Default: 1,2.", "N,...")] = "1,2",
    steps: Annotated[int, flag("Optimizer steps after which an epoch is ended. Default: 50.")] = 50,
    timeout: Annotated[float, flag("Seconds for each run of the script. Default: 900.")] = 900.0,
    module: Annotated[bool, flag("SCRIPT is the name of a module, as for python -m.", name=("-m", "--module"))] = False,
    json: Annotated[Path | None, flag("Write the report to FILE as JSON.", "FILE")] = None,
    markdown: Annotated[Path | None, flag("Write the report to FILE as Markdown.", "FILE")] = None,
    fail_on: Annotated[
        Literal["note", "warning", "error", "never"],
        flag("Least severity of a finding for exit code 1. Default: warning."),
    ] = "warning",
) -> int:
    sizes = _sizes(ranks)
    if steps < 1 or timeout <= 0:
        raise UsageError("--steps and --timeout are positive numbers", fix="--steps 50 --timeout 900")
    from lockstep.audit.examine import audit as examine
    from lockstep.audit.launcher import read_command
    from lockstep.rundir.files import write_json, write_text

    command = read_command(script, arguments, is_module=module)
    report = examine(command, sizes, steps=steps, timeout_s=timeout)
    say(report.as_markdown(), sys.stdout)
    if json is not None:
        write_json(json, report.as_dict())
    if markdown is not None:
        write_text(markdown, report.as_markdown())
    for path in filter(None, (json, markdown)):
        say(f"report: {path}", sys.stdout)
    return report.exit_code(fail_on)


def _sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts) or len(set(parts)) < len(parts):
        raise UsageError(f"invalid --ranks {text!r}", fix="write numbers of ranks: --ranks 1,2")
    return sorted(map(int, parts))
