"""``lockstep completion``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from lockstep.errors import UsageError

app = App(
    name="completion",
    usage="Usage: lockstep completion [SHELL] [OPTIONS]",
    help_epilogue="Examples:\n  source <(lockstep completion bash)\n  lockstep completion bash --install",
)

Shell = Literal["bash", "zsh", "fish"]


@app.default
def completion(
    shell: Annotated[Shell | None, Parameter(help="Which shell. Default: the one in $SHELL.")] = None,
    /,
    *,
    install: Annotated[
        bool, Parameter(negative="", help="Write the script where the shell looks for it, instead of printing it.")
    ] = False,
) -> None:
    """Print or install a completion script."""
    from lockstep.cli.main import app as root

    chosen = shell or _shell_of(os.environ.get("SHELL", ""))
    if not install:
        sys.stdout.write(root.generate_completion(prog_name="lockstep", shell=chosen) + "\n")
        return
    from lockstep.telemetry.tables import say

    try:
        written = root.install_completion(shell=chosen)
    except OSError as error:
        raise UsageError(
            "the completion script cannot be installed",
            why=str(error),
            fix="print it and put it where your shell reads it",
        ) from None
    say(f"written to {written}; open a new shell to use it", sys.stdout)


def _shell_of(path: str) -> Shell:
    match Path(path).name:
        case "bash":
            return "bash"
        case "zsh":
            return "zsh"
        case "fish":
            return "fish"
    raise UsageError("which shell is meant?", why=f"$SHELL is {path!r}", fix="lockstep completion bash, zsh or fish")
