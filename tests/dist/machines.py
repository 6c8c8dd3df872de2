"""Two machines for tests: network namespaces with host names of their own, joined by a cable that can be pulled.

Linux and root only; elsewhere tests skip with what is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.gloo import ROOT, clean_environment


@dataclass(frozen=True)
class Machine:
    """One network namespace; ``name`` is its host name, too."""

    space: str
    name: str
    address: str
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *command: str, cwd: Path, **environ: str) -> subprocess.Popen[str]:
        """``python *command`` there; its output is one stream."""
        cwd.mkdir(exist_ok=True)
        inside = ["ip", "netns", "exec", self.space, "unshare", "--uts", "sh", "-c", f'hostname {self.name}; exec "$@"']
        process = subprocess.Popen(
            [*inside, "sh", sys.executable, *command],
            cwd=cwd,
            env=clean_environment(PYTHONPATH=f"{ROOT / 'src'}:{ROOT}", **environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def cable(self, state: str) -> None:
        """Pull it (``down``) or plug it in again (``up``)."""
        _ip("-n", self.space, "link", "set", "cable", state)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextmanager
def two_machines() -> Iterator[Sequence[Machine]]:
    """Two of them; whatever still runs there is killed at the end."""
    for tool in ("ip", "unshare"):
        if shutil.which(tool) is None:
            pytest.skip(f"`{tool}` is not installed (Debian: iproute2, util-linux)")
    machines = [Machine(f"lockstep-{os.getpid()}-{i}", f"node{i}", f"10.77.0.{i + 1}") for i in range(2)]
    try:
        try:
            for machine in machines:
                _ip("netns", "add", machine.space)
            _ip(
                "-n",
                machines[0].space,
                "link",
                "add",
                "cable",
                "type",
                "veth",
                "peer",
                "cable",
                "netns",
                machines[1].space,
            )
            for machine in machines:
                _ip("-n", machine.space, "address", "add", f"{machine.address}/24", "dev", "cable")
                for device in ("lo", "cable"):
                    _ip("-n", machine.space, "link", "set", device, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this system makes no network namespaces for tests: {error.stderr.strip()}")
        yield machines
    finally:
        for machine in machines:
            found = subprocess.run(["ip", "netns", "pids", machine.space], capture_output=True, text=True)
            for pid in found.stdout.split():
                subprocess.run(["kill", "-9", pid], capture_output=True)
            for process in machine.started:
                process.kill()
                process.communicate()
            subprocess.run(["ip", "netns", "delete", machine.space], capture_output=True)
