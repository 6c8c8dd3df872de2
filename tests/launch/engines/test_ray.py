"""Engine ``ray``: a cluster of two real node processes on this machine."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.gloo import ROOT, TOKEN_VARIABLE, clean_environment

pytest.importorskip("ray.train")
TASK = """
import time, torch
from torch import nn
from lockstep import Datasets, Loss, Task
class Toy(Task):
    def datasets(self):
        x = torch.randn(192, 8, generator=torch.Generator().manual_seed(0))
        return Datasets(train=torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long()))
    def model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 2))
    def loss(self, model, batch):
        time.sleep(SECONDS)
        x, y = batch
        return Loss(nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y))
"""
#: How long Ray may take for any of its steps, on a busy machine.
PATIENCE_S = 240.0


class Cluster:
    """Node processes of one Ray cluster; the first is the head. Each has one CPU and an address of its own."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        addresses = {"RAY_TMPDIR": str(folder), "RAY_ADDRESS": f"127.0.0.1:{self.port}"}
        environment = clean_environment(**addresses, PYTHONPATH=str(ROOT / "src"))
        # Ray's processes live as long as the module's tests: without the mark of the test that starts them.
        self.environment = {key: value for key, value in environment.items() if key != TOKEN_VARIABLE}
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self.add_node(1)

    def add_node(self, number: int) -> None:
        """Start a node and wait until it has joined the cluster."""
        role = [f"--address=127.0.0.1:{self.port}"]
        if number == 1:
            role = ["--head", f"--port={self.port}", "--include-dashboard=false"]
        words = ["start", *role, f"--node-ip-address=127.0.0.{number}", "--num-cpus=1", "--disable-usage-stats"]
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


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # the path of a socket has at most 107 bytes
    (folder / "ray").mkdir()
    nodes = Cluster(folder)
    try:
        nodes.add_node(2)
        yield nodes
    finally:
        nodes.close()
        shutil.rmtree(folder, ignore_errors=True)


def start(cluster: Cluster, folder: Path, *words: str, step_s: float = 0.0) -> subprocess.Popen[str]:
    """`lockstep train` of the toy task in ``folder``, into ``folder/run``; a micro-batch takes ``step_s`` seconds."""
    (folder / "toy.py").write_text(TASK.replace("SECONDS", str(step_s)))
    command = [sys.executable, "-m", "lockstep", "train", "toy.py:Toy", *words]
    settings = ["--save-dir", "run", "--batch-size", "8", "--reproducibility", "exact"]
    return subprocess.Popen(
        [*command, *settings],
        cwd=folder,
        env=cluster.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=PATIENCE_S)
    return process.returncode, output


def steps_of(folder: Path) -> int:
    record = folder / "run" / "heartbeat.json"
    try:
        return int(json.loads(record.read_text())["step"])
    except OSError:  # there is no run yet
        return 0


def weights(folder: Path) -> bytes:
    return (folder / "run" / "checkpoints" / "last" / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_under_ray_train_what_local_ranks_train(cluster: Cluster, tmp_path: Path) -> None:
    too_many = start(cluster, tmp_path, "--devices", "cpu", "--nodes", "3", "--on", "ray")
    code, output = finish(too_many)
    assert code == 2 and not (tmp_path / "run").exists(), output
    under_ray, local = tmp_path / "ray", tmp_path / "local"
    under_ray.mkdir()
    local.mkdir()
    code, output = finish(start(cluster, under_ray, "--devices", "cpu", "--nodes", "2", "--on", "ray", "--epochs", "2"))
    assert code == 0, output
    code, output = finish(start(cluster, local, "--devices", "cpu,cpu", "--epochs", "2"))
    assert code == 0, output
    plan = json.loads((under_ray / "run" / "plan.json").read_text())
    assert plan["decisions"]["ranks"]["value"] == 2
    assert weights(under_ray) == weights(local)


@pytest.mark.slow
def test_without_a_cluster_is_refused(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(TASK)
    environment = clean_environment(RAY_ADDRESS=f"127.0.0.1:{free_port()}", PYTHONPATH=str(ROOT / "src"))
    words = ["train", "toy.py:Toy", "--on", "ray", "--devices", "cpu", "--save-dir", "run"]
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", *words], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2 and "ray start" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.drill
@pytest.mark.timeout(1800)
def test_the_run_survives_a_lost_node_a_resize_and_a_stop(cluster: Cluster, tmp_path: Path) -> None:
    """Ends with the weights of a run on one device, bit for bit."""
    words = ("--devices", "cpu", "--on", "ray", "--nodes", "1:2", "--epochs", "40")
    elastic = (*words, "--set", "launch.max_restarts=5", "--set", "checkpoint.every_steps=20")
    process = start(cluster, tmp_path, *elastic, step_s=0.1)
    wait_until(lambda: steps_of(tmp_path) >= 30)
    cluster.kill_node(2)
    after_loss = steps_of(tmp_path)
    wait_until(lambda: steps_of(tmp_path) > after_loss + 10)
    cluster.add_node(2)
    attempts = tmp_path / "run" / "attempts"
    wait_until(lambda: len(list(attempts.iterdir())) == 3)
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 130, output
    code, output = finish(start(cluster, tmp_path, *elastic, "--resume"))
    assert code == 0, output
    cluster.kill_node(2)  # which this test has started
    single = tmp_path / "single"
    single.mkdir()
    code, output = finish(start(cluster, single, "--devices", "cpu", "--global-batch-size", "16", "--epochs", "40"))
    assert code == 0, output
    assert weights(tmp_path) == weights(single)


#: A driver of the user's: Ray's own trainer, whose function trains a task, or a loop with a session.
DRIVER = """
import os, sys
import ray.train, ray.train.torch

FOLDER = os.getcwd()

def train_on_worker(config):
    os.chdir(FOLDER)
    sys.path.insert(0, FOLDER)
    import lockstep
    if config["kind"] == "task":
        run = lockstep.train(
            FOLDER + "/toy.py:Toy", devices="cpu", batch_size=8, epochs=2, reproducibility="exact", save_dir="task"
        )
        assert run.status == "completed"
    else:
        import loop
        loop.main("cpu", "session")

for kind in ("task", "session"):
    trainer = ray.train.torch.TorchTrainer(
        train_on_worker,
        train_loop_config={"kind": kind},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(name=kind, storage_path=os.path.join(FOLDER, "ray")),
    )
    trainer.fit()
"""
LOOP = """
import sys
import torch, lockstep
from torch import nn

def main(devices, folder):
    x = torch.randn(192, 8, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    settings = {"training.reproducibility": "exact"}
    session = lockstep.Session(global_batch_size=16, seed=3, devices=devices, save_dir=folder, config=settings)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 2))
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in session.epochs(2):
        for x, y in session.batches(data):
            session.backward(nn.functional.cross_entropy(model(x), y, reduction="sum"), count=len(y))
            session.step(optimizer)
    session.close()

if __name__ == "__main__":
    main("cpu,cpu", None)
"""


@pytest.mark.drill
@pytest.mark.timeout(900)
def test_a_task_and_a_session_train_inside_a_torch_trainer(cluster: Cluster, tmp_path: Path) -> None:
    """With the weights of local ranks, bit for bit."""
    (tmp_path / "toy.py").write_text(TASK.replace("SECONDS", "0"))
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "driver.py").write_text(DRIVER)
    task = ("train", "toy.py:Toy", "--devices", "cpu,cpu", "--batch-size", "8", "--epochs", "2")
    for command in (
        ["driver.py"],
        ["-m", "lockstep", *task, "--reproducibility", "exact", "--save-dir", "local-task"],
        ["-m", "lockstep", "run", "loop.py", "--devices", "cpu,cpu", "--save-dir", "local-session"],
    ):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=cluster.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=2 * PATIENCE_S,
        )
        assert done.returncode == 0, done.stdout
    for name in ("task", "session"):
        files = [tmp_path / run / "checkpoints" / "last" / "model.safetensors" for run in (name, f"local-{name}")]
        assert files[0].read_bytes() == files[1].read_bytes()
