"""Where the page is tried: a network without a way out, the studio's own command, and a browser."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.gloo import ROOT, clean_environment

#: What Debian's browser needs to run as root, without a display, and to stay silent.
BROWSER_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_LOOPBACK_UP = """
import fcntl, socket, struct, sys
SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
print("up", flush=True)
sys.stdin.read()
"""


def find_browser() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Network:
    """A network namespace with nothing but its loopback, if this kernel and user may have one."""

    def __init__(self, holder: subprocess.Popen[str] | None) -> None:
        self._holder = holder

    @property
    def is_closed(self) -> bool:
        """Nothing outside this machine can be reached from it."""
        return self._holder is not None

    def inside(self, *command: str) -> list[str]:
        """``command`` as it is run in this network."""
        return ["nsenter", f"--net=/proc/{self._holder.pid}/ns/net", "--", *command] if self._holder else [*command]

    def program(self, folder: Path, path: str) -> str:
        """A program that runs ``path`` in this network, for those who take a path only."""
        wrapper = folder / "in-network"
        wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(self.inside(path))} "$@"\n')
        wrapper.chmod(0o755)
        return str(wrapper)


@contextlib.contextmanager
def closed_network() -> Iterator[Network]:
    """A :class:`Network` that is closed where that can be had, else the usual one."""
    can = os.geteuid() == 0 and shutil.which("unshare") and shutil.which("nsenter")
    if not can:
        yield Network(None)
        return
    holder = subprocess.Popen(
        ["unshare", "--net", "--", sys.executable, "-c", _LOOPBACK_UP],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert holder.stdin is not None and holder.stdout is not None
    try:
        yield Network(holder if holder.stdout.readline() == "up\n" else None)
    finally:
        holder.stdin.close()
        holder.wait()
        holder.stdout.close()


class Studio:
    """``lockstep studio`` as a process of its own, which can be killed and started again on its port."""

    def __init__(self, folder: Path, network: Network, *arguments: str) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self._network = network
        self._arguments = arguments
        self._port = "0"
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    def start(self) -> None:
        """Raises AssertionError with what it said when it ends instead."""
        command = (sys.executable, "-m", "lockstep", "studio", "--port", self._port, "--runs-dir", str(self.runs))
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        process = subprocess.Popen(
            self._network.inside(*command, "--no-browser", *self._arguments),
            cwd=self.folder,
            env=clean_environment(PYTHONPATH=path, NO_COLOR="1", COLUMNS="200", CUDA_VISIBLE_DEVICES=""),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            found = re.search(r"http://127\.0\.0\.1:(\d+)/#token=\S+", line)
            if found:
                break
        else:
            process.stdout.close()
            raise AssertionError(f"the studio ended with {process.wait()}: {''.join(said)}")
        self._process, self.url, self._port = process, found.group(), found.group(1)
        # What it says later must not fill the pipe.
        threading.Thread(target=_drain, args=(process,), daemon=True).start()

    def kill(self) -> None:
        """``kill -9`` of the server alone; its helpers see that by themselves."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait()
            self._process = None

    def end_runs(self) -> None:
        """Kill the runs that a failed test left behind: those of this test's folder."""
        for process in psutil.process_iter(["cmdline", "environ"]):
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and str(self.folder) in " ".join(process.info["cmdline"] or ()):
                    process.kill()


def _drain(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for _ in process.stdout:
            pass
