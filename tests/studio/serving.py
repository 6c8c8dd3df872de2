"""A studio for tests: in this process (with devices of the test's choice), or as the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from websockets.sync.client import ClientConnection, connect

from lockstep.cli.settings import flag_table
from lockstep.hardware.detect import Device, detect_devices
from lockstep.studio.server import Options, Server
from lockstep.studio.settings import offered_tasks
from tests.gloo import ROOT, clean_environment

TOY = f"{ROOT / 'tests' / 'toys.py'}:Toy"
WAIT_S = 90.0


@dataclass(frozen=True)
class Address:
    """Where a studio answers. ``url`` holds the token."""

    url: str

    @property
    def base(self) -> str:
        return self.url.partition("/#")[0]

    @property
    def token(self) -> str:
        return self.url.partition("token=")[2]

    @property
    def port(self) -> int:
        return urlsplit(self.base).port or 0

    def call(self, method: str, path: str, status: int = 200, **more: Any) -> Any:
        """``data`` of an answer, or the whole of it where a refusal is expected."""
        headers = {"Authorization": f"Bearer {self.token}"}
        answer = httpx.request(method, self.base + path, headers=headers, timeout=WAIT_S, trust_env=False, **more)
        assert answer.status_code == status, answer.text
        return answer.json()["data"] if status < 400 else answer.json()

    def get(self, path: str, **more: Any) -> Any:
        return self.call("GET", path, **more)

    def post(self, path: str, body: Any = None, status: int = 200) -> Any:
        return self.call("POST", path, status, json=body)

    def live(self, **more: Any) -> ClientConnection:
        """A WebSocket, as the page opens it."""
        headers = {"Authorization": f"Bearer {self.token}"}
        return connect(
            f"ws://127.0.0.1:{self.port}/api/live",
            additional_headers=headers,
            proxy=None,
            max_size=None,
            open_timeout=WAIT_S,
            **more,
        )

    def wait_until(self, run: str, what: str, done: Callable[[dict[str, Any]], bool]) -> Any:
        """The page of a run, as soon as it is ``done``; ``what`` names that."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            found = self.get(f"/api/runs/{run}")
            if done(found):
                return found
            time.sleep(0.1)
        raise AssertionError(f"{run} did not become {what}: {found['status']}\n{found['start_output']}")

    def wait_for(self, run: str, *statuses: str) -> Any:
        """The page of a run, as soon as it has one of these statuses (and its start is over)."""
        done = lambda found: found["status"] in statuses and not found["starting"]  # noqa: E731
        return self.wait_until(run, " or ".join(statuses), done)

    def wait_for_step(self, run: str, step: int) -> None:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            found = self.get(f"/api/runs/{run}")
            if (found["step"] or 0) >= step and found["status"] == "running":
                return
            assert found["status"] in {"pending", "running"}, found["start_output"]
            time.sleep(0.1)
        raise AssertionError(f"{run} did not reach step {step}")


@contextmanager
def studio(
    folder: Path,
    devices: Sequence[Device] | None = None,
    tasks: Sequence[str] = (),
    kill_after_s: float = 60.0,
    **more: Any,
) -> Iterator[Address]:
    """A real server on a free port, in a thread; runs are in ``folder / "runs"``."""
    options = Options(folder / "runs", offered_tasks(tasks), flag_table(), kill_after_s, **more)
    detect = detect_devices if devices is None else lambda refresh=False: list(devices)
    server = Server(options, port=0, detect=detect)
    thread = threading.Thread(target=server.run, name="studio")
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield Address(server.url)
    finally:
        server.stop()
        thread.join()


class Command:
    """``lockstep studio`` in a process of its own, with ``folder`` as the current one."""

    def __init__(self, folder: Path, *arguments: str, port: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lockstep", "studio", "--no-browser", "--port", str(port), *arguments],
            cwd=folder,
            env=clean_environment(PYTHONPATH=os.pathsep.join([str(ROOT / "src"), str(ROOT)])),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "http://" in line, line + self.process.stdout.read()
        self.address = Address(line[line.index("http://") :].strip())
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            try:
                self.address.get("/api/studio")
                return
            except httpx.TransportError:
                time.sleep(0.05)
        raise AssertionError("the studio does not answer")

    def kill(self) -> None:
        self.end(signal.SIGKILL)

    def end(self, signum: signal.Signals = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            os.kill(self.process.pid, signum)
        self.process.communicate(timeout=WAIT_S)
        return self.process.returncode


@contextmanager
def start_studio(folder: Path, *arguments: str, port: int = 0) -> Iterator[Command]:
    """The command, until the block ends."""
    command = Command(folder, *arguments, port=port)
    try:
        yield command
    finally:
        command.end()
