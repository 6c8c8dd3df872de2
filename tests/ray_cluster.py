"""A Ray cluster of real node processes on this machine."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tests.gloo import ROOT, TOKEN_VARIABLE, clean_environment

#: How long Ray may take for any of its steps, on a busy machine.
PATIENCE_S = 240.0
#: For each line that it reads, writes the living nodes: ids by address. Importing Ray for each question takes seconds.
NODES = """
import json, sys
from ray._raylet import GcsClient
client = None
for _ in sys.stdin:
    try:
        client = client or GcsClient(address=sys.argv[1])
        nodes = client.get_all_node_info(timeout=10).values()
    except Exception:  # the head is not ready
        client = None
        nodes = ()
    alive = {node.node_manager_address: node.node_id.hex() for node in nodes if node.state == 0}
    print(json.dumps(alive), flush=True)
"""


class Cluster:
    """Node processes of one Ray cluster, each with a separate address; the first that is added is the head, number 1.

    Args:
        folder: for Ray's files.
        cpus: of each node.
        variables: environment of Ray's processes, and of the ranks in them.
    """

    def __init__(self, folder: Path, cpus: int = 1, **variables: str) -> None:
        self.port = free_port()
        self._cpus = cpus
        #: Variables with which a command finds the cluster.
        self.variables = {"RAY_TMPDIR": str(folder), "RAY_ADDRESS": f"127.0.0.1:{self.port}", **variables}
        environment = clean_environment(PYTHONPATH=str(ROOT / "src"), **self.variables)
        # Ray's processes live as long as the module's tests: without the mark of the test that starts them.
        self.environment = {key: value for key, value in environment.items() if key != TOKEN_VARIABLE}
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._asked = subprocess.Popen(
            [sys.executable, "-c", NODES, f"127.0.0.1:{self.port}"],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def add_node(self, number: int) -> None:
        """Start a node and wait until it has joined the cluster."""
        address = f"127.0.0.{number}"
        before = {*self._alive().values()} if self._nodes else set()  # a node that was killed may still count
        role = [f"--address=127.0.0.1:{self.port}"]
        if number == 1:
            role = ["--head", f"--port={self.port}", "--include-dashboard=false"]
        words = [
            "start",
            *role,
            f"--node-ip-address={address}",
            f"--num-cpus={self._cpus}",
            "--disable-usage-stats",
        ]
        self._nodes[number] = subprocess.Popen(
            [ray_program(), *words, "--object-store-memory=100000000", "--include-log-monitor=false", "--block"],
            env={key: value for key, value in self.environment.items() if key != "RAY_ADDRESS"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait_until(lambda: bool({*self._alive().values()} - before))

    def kill_node(self, number: int) -> None:
        """Kill a node's processes, as a power failure would."""
        node = self._nodes.pop(number)
        for process in [*psutil.Process(node.pid).children(recursive=True), psutil.Process(node.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        node.wait()

    def drain_node(self, number: int, within_s: int) -> None:
        """Tell Ray that a node is taken away in ``within_s`` seconds."""
        words = [
            "drain-node",
            f"--node-id={self._alive()[f'127.0.0.{number}']}",
            "--reason=DRAIN_NODE_REASON_PREEMPTION",
            "--reason-message=test",
            f"--deadline-remaining-seconds={within_s}",
        ]
        subprocess.run([ray_program(), *words], env=self.environment, check=True, capture_output=True)

    def close(self) -> None:
        for number in sorted(self._nodes, reverse=True):
            self.kill_node(number)
        self._asked.communicate()

    def _alive(self) -> dict[str, str]:
        """Ids of the living nodes by address."""
        assert self._asked.stdin is not None and self._asked.stdout is not None
        self._asked.stdin.write("\n")
        self._asked.stdin.flush()
        alive: dict[str, str] = json.loads(self._asked.stdout.readline())
        return alive


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def ray_program() -> str:
    return str(Path(sys.executable).with_name("ray"))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)


@contextlib.contextmanager
def running_cluster(nodes: int, cpus: int = 1, **variables: str) -> Iterator[Cluster]:
    """A cluster of ``nodes``, until the end of the block; see :class:`Cluster`."""
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # the path of a socket has at most 107 bytes
    (folder / "ray").mkdir()
    cluster = Cluster(folder, cpus, **variables)
    try:
        for number in range(1, nodes + 1):
            cluster.add_node(number)
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)
