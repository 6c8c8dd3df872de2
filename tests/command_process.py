"""What :mod:`tests.commands` runs in a fork of its server; importing this module imports what commands need."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import signal
import sys
import tempfile
import threading
import types
from pathlib import Path

# What most commands import, before there are forks; the command line itself reads variables when it is imported.
import cyclopts
import torch
import torchmetrics

import lockstep.launch.api
from lockstep.launch.process import environment, signals

with contextlib.suppress(ImportError):
    import torch.utils.tensorboard

__all__ = ["cyclopts", "lockstep", "main", "torch", "torchmetrics"]

#: ``sys.path`` without what PYTHONPATH added.
_OWN = [entry for entry in sys.path if entry not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]


def main() -> int:
    """Be the process that the request on standard input describes; its exit code."""
    with open(0, closefd=False, encoding="utf-8") as given:
        request = json.load(given)
    _be_given(request["stdin"])
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["cwd"])
    tempfile.tempdir = None  # it was found for the variables of the server
    environment.set_threads(os.environ)
    arguments: list[str] = request["arguments"]
    sys.orig_argv = [sys.executable, *arguments]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # the command may have its own
    sys.modules["__main__"] = types.ModuleType("__main__")
    kind = arguments[0] if arguments[0] in ("-m", "-c") else ""
    sys.argv = [kind, *arguments[2:]] if kind else list(arguments)
    first = str(Path.cwd()) if kind or arguments[0] == "-" else str(Path(arguments[0]).resolve().parent)
    sys.path[:] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *_OWN]
    signals.accept()
    try:
        script = sys.modules["__main__"]
        if kind == "-m":
            runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
        elif kind == "-c":
            exec(compile(arguments[1], "<string>", "exec"), script.__dict__)
        elif arguments[0] == "-":
            exec(compile(sys.stdin.read(), "<stdin>", "exec"), script.__dict__)
        else:
            script.__file__ = arguments[0]
            exec(compile(Path(arguments[0]).read_bytes(), arguments[0], "exec"), script.__dict__)
        code: object = 0
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        code = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return code or 0


def _be_given(text: str) -> None:
    """Let standard input have ``text``."""
    reading, writing = os.pipe()
    os.dup2(reading, 0)
    os.close(reading)
    with open(writing, "w", encoding="utf-8") as file:
        file.write(text)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
