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


class Cluster:
    """Node processes of one Ray cluster; the first is the head. Each has a separate address.

    Args:
        folder: for Ray's files.
        cpus: of each node.
        variables: environment of Ray's processes, and of the ranks in them.
    """

    def __init__(self, folder: Path, cpus: int = 1, **variables: str) -> None:
        self.port = free_port()
        self._cpus = cpus
        addresses = {"RAY_TMPDIR": str(folder), "RAY_ADDRESS": f"127.0.0.1:{self.port}"}
        environment = clean_environment(**addresses, PYTHONPATH=str(ROOT / "src"), **variables)
        # Ray's processes live as long as the module's tests: without the mark of the test that starts them.
        self.environment = {key: value for key, value in environment.items() if key != TOKEN_VARIABLE}
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self.add_node(1)

    def add_node(self, number: int) -> None:
        """Start a node and wait until it has joined the cluster."""
        role = [f"--address=127.0.0.1:{self.port}"]
        if number == 1:
            role = ["--head", f"--port={self.port}", "--include-dashboard=false"]
        words = [
            "start",
            *role,
            f"--node-ip-address=127.0.0.{number}",
            f"--num-cpus={self._cpus}",
            "--disable-usage-stats",
        ]
        self._nodes[number] = subprocess.Popen(
            [ray_program(), *words, "--object-store-memory=100000000", "--block"],
            env={key: value for key, value in self.environment.items() if key != "RAY_ADDRESS"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait_until(lambda: self._alive() == len(self._nodes))

    def kill_node(self, number: int) -> None:
        """Kill a node's processes, as a power failure would."""
        node = self._nodes.pop(number)
        for process in [*psutil.Process(node.pid).children(recursive=True), psutil.Process(node.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        node.wait()

    def drain_node(self, number: int, within_s: int) -> None:
        """Tell Ray that a node is taken away in ``within_s`` seconds."""
        code = "import json, ray; ray.init(log_to_driver=False); print(json.dumps(ray.nodes()))"
        printed = subprocess.run([sys.executable, "-c", code], env=self.environment, capture_output=True, text=True)
        node_ids = {node["NodeManagerAddress"]: node["NodeID"] for node in json.loads(printed.stdout)}
        words = [
            "drain-node",
            f"--node-id={node_ids[f'127.0.0.{number}']}",
            "--reason=DRAIN_NODE_REASON_PREEMPTION",
            "--reason-message=test",
            f"--deadline-remaining-seconds={within_s}",
        ]
        subprocess.run([ray_program(), *words], env=self.environment, check=True, capture_output=True)

    def close(self) -> None:
        for number in sorted(self._nodes, reverse=True):
            self.kill_node(number)

    def _alive(self) -> int:
        code = "import ray; ray.init(log_to_driver=False); print(sum(node['Alive'] for node in ray.nodes()))"
        done = subprocess.run([sys.executable, "-c", code], env=self.environment, capture_output=True, text=True)
        return int(done.stdout or 0) if done.returncode == 0 else 0


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
        for number in range(2, nodes + 1):
            cluster.add_node(number)
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)
