"""``lockstep studio``."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

from lockstep.cli.output import DEFAULT_RUNS_DIR, flag, verb
from lockstep.errors import UnsupportedError
from lockstep.telemetry.console import say

EPILOGUE = """\
Examples:
  lockstep studio                                  # a page on this machine; Ctrl-C ends it, runs continue
  lockstep studio --task my_task.py:MyTask         # with your task
  lockstep studio --task net.py:Net+data.py:Digits # a LightningModule and its LightningDataModule
  ssh -L 8756:127.0.0.1:8756 gpu-box lockstep studio --no-browser   # then open the printed address here

The page shows every run in --runs-dir, also those started from a terminal."""


@verb("[OPTIONS]", EPILOGUE)
def studio(
    *,
    port: Annotated[
        int | None, flag("Port on 127.0.0.1; 0 lets the system choose. Default: 8756, or any if it is taken.")
    ] = None,
    runs_dir: Annotated[
        str, flag("Where runs are found and made, or a URL of mirrors to look at. Default: runs.", name="--runs-dir")
    ] = str(DEFAULT_RUNS_DIR),
    task: Annotated[
        list[str] | None,
        flag(
            "Another task to offer in the form; a LightningModule with its LightningDataModule "
            "as FILE.py:MODULE+FILE.py:DATA. May be repeated.",
            "FILE.py:CLASS",
        ),
    ] = None,
    new_token: Annotated[bool, flag("Replace the token and end every session. Default: off.")] = False,
    browser: Annotated[bool, flag("Open the page in a browser. Default: on.", negative="--no-browser")] = True,
) -> None:
    from lockstep.studio.planner import Planner

    with contextlib.closing(Planner()) as planner:
        planner.start()  # it imports torch while this process imports the server
        try:
            import websockets  # noqa: F401 - uvicorn imports it late

            from lockstep.studio.server import Options, Server
        except ImportError as error:
            raise UnsupportedError(
                "the studio needs packages that are not installed",
                why=str(error),
                fix="pip install 'lockstep-train[studio]'",
            ) from None
        from lockstep.cli.settings import flag_table
        from lockstep.hardware.detect import detect_devices
        from lockstep.rundir.copies import CopiedRuns
        from lockstep.rundir.remote import is_url
        from lockstep.studio.settings import offered_tasks

        folder = CopiedRuns(runs_dir).follow() if is_url(runs_dir) else Path(runs_dir)
        options = Options(runs_dir=folder, tasks=offered_tasks(task or ()), flags=flag_table(), planner=planner)
        server = Server(options, port=port, detect=detect_devices, new_token=new_token)
        say(f"Lockstep studio: {server.url}", sys.stdout)
        say(f"runs in {options.runs_dir.resolve()}; Ctrl-C ends the studio; runs continue", sys.stdout)
        sys.stdout.flush()
        if browser:
            import webbrowser

            webbrowser.open(server.write_door())
        server.run()
