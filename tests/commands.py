"""``python …`` for tests, as a process forked from a server that has imported torch and the command line.

Importing them takes longer than most commands do; Lightning takes as long again, and is in a server of its own.
All else is as in a process that was started: arguments, working folder, environment, ``sys.path``, ``__main__``,
standard files, session, signals and exit. Where a variable differs that counts when Python starts, it is a process that
was started.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.fork_server import ForkServer, RemoteChild

ROOT = Path(__file__).resolve().parent.parent

#: What commands are forked from, by the module that it has imported.
_servers: dict[str, ForkServer] = {}
#: Variables that torch, and the libraries of object stores, read when they are imported.
_OF_TORCH = ("TORCH", "PYTORCH", "CUDA", "NCCL", "GLOO", "FSSPEC", "AWS")


@atexit.register
def _end_servers() -> None:
    for server in _servers.values():
        server.close()


class _Forked(subprocess.Popen[str]):
    """A child of the server, for code that has a :class:`subprocess.Popen`."""

    def __init__(self, arguments: list[str], child: RemoteChild, stdout: int, stderr: int | None) -> None:
        self._child = child
        self.args, self.pid, self.returncode = arguments, child.pid, None
        self.stdin = None
        self.stdout = os.fdopen(stdout, encoding="utf-8")
        self.stderr = None if stderr is None else os.fdopen(stderr, encoding="utf-8")
        # What communicate() needs, and the end of this object.
        self.text_mode, self.encoding, self.errors = True, "utf-8", None
        self._communication_started, self._input, self._child_created = False, None, False

    def _internal_poll(self, *_: object, **__: object) -> int | None:
        return self._wait(0.0, expires=False)

    def _wait(self, timeout: float | None, *, expires: bool = True) -> int | None:
        if self.returncode is None:
            self.returncode = self._child.wait(timeout)
            if self.returncode is None and expires:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode


def start(
    *arguments: str | Path,
    cwd: Path,
    env: Mapping[str, str],
    stdin: str = "",
    merged: bool = False,
    fresh: bool = False,
    lightning: bool = False,
    script: bool = False,
) -> subprocess.Popen[str]:
    """``python ARGUMENTS`` in a session of its own; ``stdout`` and ``stderr`` are pipes.

    Args:
        arguments: ``-m`` and a module, ``-c`` and code, a script, or ``-`` for what it reads; then its own.
        stdin: what the process reads.
        merged: standard error goes to ``stdout``.
        fresh: start an interpreter, for a test of how a process starts.
        lightning: Lightning is imported already.
        script: torch's compiler is, which a script's own optimizers import.
    """
    command = [str(argument) for argument in arguments]
    environ = {"PYTHONHASHSEED": "0", **env}
    imported = f"tests.{'lightning' if lightning else 'script' if script else 'command'}_process"
    # Others, such as unittest, look at the interpreter.
    other = command[0] == "-m" and command[1] not in ("lockstep", "lightning_trainer", "torch.distributed.run")
    server = None if fresh or other else _server_for(imported, environ)
    if server is None:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        if process.stdin is not None:
            with process.stdin as file:
                file.write(stdin)
            process.stdin = None
        return process
    reading, request = os.pipe()
    out, stdout = os.pipe()
    err, stderr = (None, stdout) if merged else os.pipe()
    child = server.start(f"{imported}:main", (reading, stdout, stderr))
    for fd in {reading, stdout, stderr}:
        os.close(fd)
    content = json.dumps({"arguments": command, "cwd": str(cwd), "environ": environ, "stdin": stdin}).encode()
    with open(request, "wb") as file:
        file.write(content)
    return _Forked([sys.executable, *command], child, out, err)


def _server_for(imported: str, environ: Mapping[str, str]) -> ForkServer | None:
    if imported not in _servers:
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        _servers[imported] = ForkServer({**environ, "PYTHONPATH": path}, imported)
    server = _servers[imported]
    return server if server.serves(environ) and not any(name.startswith(_OF_TORCH) for name in environ) else None
