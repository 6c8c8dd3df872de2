"""A run folder, a process that launches it, and a look at who is left of it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.config import RunConfig
from lockstep.launch.local.worker import pack_call
from lockstep.rundir.folder import RunDir
from tests.gloo import ROOT, clean_environment
from tests.launch.stub_worker import rank_main

MARK = "LAUNCH_TEST_MARK"
STUB = pack_call(rank_main, [])
SCRIPT = """
import os, sys
from pathlib import Path
from lockstep.launch.local.on_ranks import RankLimits, launch
from lockstep.launch.local.worker import pack_call
from lockstep.rundir.folder import RunDir
from tests.launch.stub_worker import rank_main
{prepare}
os.environ["STUB"] = {actions!r}
limits = RankLimits(**{options!r})
code = launch(RunDir(Path({path!r})), {ranks}, pack_call(rank_main, []), limits)
print("code", code)
sys.exit(code)
"""

FORK_AHEAD = "from lockstep.launch.local import launcher_process\nlauncher_process.fork_launcher_ahead()"


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", RunConfig(), run_id="run-00000000", command=["test"])


@dataclass
class Caller:
    """A process of its own that calls ``launch`` in a script read from standard input."""

    run_dir: RunDir
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: subprocess.Popen[str] | None = None

    def start(
        self, *actions: str, terminal: int | None = None, fresh: bool = False, prepare: str = "", **options: Any
    ) -> subprocess.Popen[str]:
        """Launch a rank for each action of the stub.

        Args:
            terminal: a descriptor; the caller runs there as a user would start it.
            prepare: lines of the caller before the launch.
            fresh: the launcher is a new interpreter, as a library's caller gets it; else a fork, which is faster.
        """
        script = SCRIPT.format(
            path=str(self.run_dir.path),
            ranks=len(actions),
            actions=",".join(actions),
            options=options,
            prepare=prepare or ("" if fresh else FORK_AHEAD),
        )
        self.process = subprocess.Popen(
            [sys.executable, "-"],
            cwd=ROOT,
            env=clean_environment(**{MARK: self.mark, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if terminal is None else terminal,
            stderr=subprocess.PIPE if terminal is None else terminal,
            text=True,
            start_new_session=True,
            preexec_fn=None if terminal is None else lambda: fcntl.ioctl(terminal, termios.TIOCSCTTY, 0),
        )
        assert self.process.stdin is not None
        self.process.stdin.write(script)
        self.process.stdin.close()
        self.process.stdin = None
        return self.process

    def wait_until_ready(self, ranks: int = 2) -> None:
        wait_for(lambda: all((self.run_dir.path / f"ready-{rank}").exists() for rank in range(ranks)))
        wait_for(lambda: len(self.launcher()["pids"]) == ranks)  # forked ranks may be faster than their launcher

    def launcher(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.run_dir.logs / "launcher.json").read_text())
        return content

    def descendants(self) -> list[int]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return [pid for pid in found if self.process is None or pid != self.process.pid]

    def finish(self) -> tuple[int, str, str]:
        """Exit code, standard output and standard error, once the caller has ended."""
        assert self.process is not None
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err

    def assert_nobody_left(self) -> None:
        wait_for(lambda: not self.descendants())


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def caller(run_dir: RunDir) -> Iterator[Caller]:
    made = Caller(run_dir)
    yield made
    for pid in made.descendants():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if made.process is not None:
        made.process.kill()
        made.process.communicate()
