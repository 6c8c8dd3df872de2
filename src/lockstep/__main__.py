"""The command ``lockstep``, which is also ``python -m lockstep``."""

from __future__ import annotations

import os
import sys

from lockstep.launch.process.environment import set_defaults
from lockstep.launch.process.signals import CommandInterrupt

#: Commands whose process uses the task, or whose ranks are its forks.
_WITH_TASK = frozenset({"train", "resume", "verify", "run", "evaluate", "predict", "generate", "export"})


def main() -> int:
    """Run the command of ``sys.argv``; returns its exit code.

    What counts when a process starts is settled before anything else is imported.
    """
    _open_standard_files()
    seeded = "PYTHONHASHSEED" in os.environ
    set_defaults(os.environ)
    # torch.distributed.launch gives each rank its local rank as the first argument.
    if not seeded and _WITH_TASK.intersection(sys.argv[1:3]):
        # As in ranks, which are forks: the order of a set of strings is the same on one device and on several.
        os.execv(sys.executable, sys.orig_argv)
    interrupt = CommandInterrupt().install()
    sys.unraisablehook = interrupt.report_unraisable
    try:
        from lockstep.cli.main import main

        code = main()
        interrupt.ignore()
    except KeyboardInterrupt:  # also while modules are imported
        code = 130
        interrupt.ignore()
    interrupt.has_ended = code == 130
    return code


def _open_standard_files() -> None:
    """Open /dev/null where the caller has closed a standard file (``>&-``): else the next file gets its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nothing = os.open(os.devnull, os.O_RDWR)
            if nothing != number:
                os.dup2(nothing, number)
                os.close(nothing)
            os.set_inheritable(number, True)  # programs that this one starts have it
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
