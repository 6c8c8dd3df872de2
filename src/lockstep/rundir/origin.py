"""Code that a resume of a run folder would start, and its refusal unless the user has named it.

The rule is :mod:`lockstep.config.named`'s; the command line, the library and the page ask it through these functions.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.config.named import Reference, code_in, named, references_in, script_reference
from lockstep.errors import RunFolderError
from lockstep.rundir.files import check_own_files, damaged, read_json, write_json
from lockstep.rundir.folder import RunDir

#: In the run folder of a script with a session.
SCRIPT = "script.json"


class Script(NamedTuple):
    """A script and how it is called, for a resume: its working folder, and the settings of the command line."""

    path: str
    arguments: Sequence[str]
    folder: str
    given: Mapping[str, Any]

    @property
    def references(self) -> list[Reference]:
        """The script and what its settings name."""
        return [script_reference(self.path, self.arguments, self.folder), *references_in(self.given)]

    def keep(self, run: RunDir) -> None:
        """Write it to ``run``, which the user has started with it."""
        named.add(self.references)
        write_json(run.path / SCRIPT, self._asdict())


def script_of(run: RunDir) -> Script | None:
    """Return the script of a session's run; ``None`` of others. Raises :class:`RunFolderError`: a damaged file."""
    file = run.path / SCRIPT
    if not file.exists():
        return None
    content = read_json(file)
    try:
        path = content["path"]
        arguments = content["arguments"]
        folder = content["folder"]
        if not all(isinstance(text, str) for text in (path, folder, *arguments)):
            raise TypeError("path, folder and arguments must be texts")
        return Script(path, tuple(arguments), folder, dict(content["given"]))
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(file, f"{type(error).__name__}: {error}") from None


def note_named(config: Mapping[str, Any]) -> None:
    """Note that the user has named all that ``config``, nested settings, names."""
    named.add(references_in(config))


def require_code_named(run: RunDir) -> None:
    """Raise :class:`TaskError` unless the user has named all code that the configuration of ``run`` would import."""
    named.require(code_in(run.config().model_dump(mode="json")), f"run {run.read().id}")


def require_named(
    run: RunDir, config: Mapping[str, Any], changes: Mapping[str, Any], *, task_is_given: bool = False
) -> None:
    """Raise :class:`TaskError` unless the user has named all that training ``run`` with ``config`` would use.

    Args:
        changes: settings that the user gives now, and so names.
        task_is_given: whether the task is the user's, not the one that ``config`` names.
    """

    def command(missing: Sequence[Reference]) -> str:
        words = [word for reference in missing for word in reference.words]
        return shlex.join(["lockstep", "resume", str(run.path), *words])

    references = references_in(config)
    if task_is_given:
        references = [reference for reference in references if reference.setting != "task.name"]
    named.require(references, f"run {run.read().id}", references_in(changes), command=command)


def require_script_named(run: RunDir, script: Script, changes: Mapping[str, Any]) -> None:
    """Raise :class:`LockstepError` unless the user has named ``script`` and what its settings name, as above."""
    if Path(script.path).resolve().is_relative_to(run.path.resolve()):
        raise RunFolderError(
            f"{SCRIPT} of run {run.read().id} names {script.path[:200]}, inside the run folder",
            why="code in a run folder is not run",
            fix="keep the script elsewhere, and start it: lockstep run SCRIPT --save-dir RUN --resume",
        )

    def command(missing: Sequence[Reference]) -> str:
        words = [word for reference in missing if reference.setting != SCRIPT for word in reference.words]
        arguments = ["--", *script.arguments] if script.arguments else []
        call = ["lockstep", "run", script.path, "--save-dir", str(run.path), "--resume", *words, *arguments]
        return f"cd {shlex.quote(script.folder)} && {shlex.join(call)}"

    named.require(script.references, f"run {run.read().id}", references_in(changes), command=command)


def require_resumable(run: RunDir) -> None:
    """Raise :class:`LockstepError` unless the user has named all that a resume of ``run`` would use."""
    check_own_files(run.path)
    script = script_of(run)
    if script is not None:
        require_script_named(run, script, {})
    else:
        require_named(run, run.config().model_dump(mode="json"), {})
