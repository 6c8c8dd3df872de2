"""How a session's run was started: its script, for a resume."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.config import RunConfig
from lockstep.errors import RunFolderError
from lockstep.launch.run_claim import SCRIPT, create_folder
from lockstep.telemetry.rundir import RunDir, read_json, write_json


@dataclass(frozen=True)
class Script:
    """A script and how it is called.

    Attributes:
        folder: the working folder.
        given: the settings of the command line, nested.
    """

    path: str
    arguments: tuple[str, ...]
    folder: str
    given: Mapping[str, Any]

    def keep(self, run: RunDir) -> None:
        """Write it to the run's folder."""
        write_json(run.path / SCRIPT, asdict(self))


def script_of(run: RunDir) -> Script | None:
    """The script of a session's run; ``None`` of other runs. Raises :class:`RunFolderError`: the file is damaged."""
    file = run.path / SCRIPT
    if not file.exists():
        return None
    content = read_json(file)
    try:
        return Script(content["path"], tuple(content["arguments"]), content["folder"], dict(content["given"]))
    except (KeyError, TypeError, ValueError) as error:
        raise RunFolderError(f"{file} is damaged", why=f"{type(error).__name__}: {error}") from None


def new_folder(config: RunConfig, run_id: str | None = None) -> RunDir:
    """The folder of a new run of this process's script."""
    run, path = create_folder(config, run_id), Path(sys.argv[0])
    if path.is_file():
        Script(str(path.resolve()), tuple(sys.argv[1:]), str(Path.cwd()), {}).keep(run)
    return run
