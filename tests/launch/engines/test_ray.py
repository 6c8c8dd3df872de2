"""Engine ``ray``: a cluster of two real node processes on this machine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.errors import UsageError
from lockstep.launch.engines.spec import Job, NodeRange, find_engine
from lockstep.rundir.folder import RunDir
from tests import s3
from tests.gloo import ROOT, clean_environment
from tests.ray_cluster import PATIENCE_S, Cluster, free_port, running_cluster, wait_until
from tests.samples import audit_samples, samples_by_step

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


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(2) as nodes:
        yield nodes


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
@pytest.mark.parametrize("demand", [("--nodes", "3"), ("--ray-resource", "CPU=2")])
def test_a_cluster_that_is_too_small_is_refused(cluster: Cluster, tmp_path: Path, demand: tuple[str, ...]) -> None:
    """For more ranks than CPUs, and for a rank that needs more CPUs than one node has."""
    code, output = finish(start(cluster, tmp_path, "--devices", "cpu", "--on", "ray", *demand))
    assert (code, output.count("error:"), output.count("fix:")) == (2, 1, 1), output
    assert "CPU" in output
    assert not (tmp_path / "run").exists()


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


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    job = Job(command=(), run_folder=tmp_path / "run", nodes=NodeRange(1, 1))
    with pytest.raises(UsageError) as refusal:
        find_engine("ray").make().check(job)
    assert refusal.value.exit_code == 2
    assert "lockstep-train[ray]" in str(refusal.value.fix)


@pytest.mark.drill
@pytest.mark.timeout(1200)
def test_stops_from_outside_end_with_a_checkpoint_and_free_the_cluster(cluster: Cluster, tmp_path: Path) -> None:
    """`lockstep stop` is not answered by a new start; SIGTERM at the driver leaves nothing reserved."""
    words = ("--devices", "cpu", "--on", "ray", "--nodes", "2", "--epochs", "40", "--resume")
    restarting = (*words, "--set", "launch.max_restarts=3")
    run = RunDir(tmp_path / "run")
    for attempt in (1, 2):
        before = steps_of(tmp_path)
        process = start(cluster, tmp_path, *restarting, step_s=0.1)
        wait_until(lambda before=before: steps_of(tmp_path) > before + 10)
        if attempt == 1:
            stop = [sys.executable, "-m", "lockstep", "stop", "run"]
            subprocess.run(stop, cwd=tmp_path, env=cluster.environment, check=True, capture_output=True)
        else:
            process.send_signal(signal.SIGTERM)
        code, output = finish(process)
        assert code == 143, output
        assert (run.read().status, run.read().attempt) == ("stopped", attempt)
        assert saved_step(run) == steps_of(tmp_path)
        wait_until(lambda: free_cpus(cluster) == 2)


@pytest.mark.drill
@pytest.mark.timeout(600)
def test_a_failure_is_one_report_with_the_line_of_the_task(cluster: Cluster, tmp_path: Path) -> None:
    process = start(cluster, tmp_path, "--devices", "cpu", "--on", "ray", "--nodes", "2", step_s=-1.0)
    code, output = finish(process)
    assert code == 1, output
    errors = [line for line in output.splitlines() if line.startswith("error:")]
    assert errors == ["error: ValueError: sleep length must be non-negative"], output
    assert "toy.py" in output and "time.sleep(-1.0)" in output, output
    assert "(pid=" not in output and "ray.train" not in output, output


def saved_step(run: RunDir) -> int:
    """The step of the newest checkpoint."""
    return int((run.checkpoints / "last").resolve().name.removeprefix("step-"))


def free_cpus(cluster: Cluster) -> float:
    """CPUs that nothing has reserved."""
    code = "import ray; ray.init(log_to_driver=False); print(ray.available_resources().get('CPU', 0))"
    done = subprocess.run([sys.executable, "-c", code], env=cluster.environment, capture_output=True, text=True)
    return float(done.stdout or 0)


@pytest.mark.drill
@pytest.mark.timeout(1200)
def test_a_run_that_lost_its_cluster_resumes_from_its_mirror(tmp_path: Path) -> None:
    """Storage is cut for 30 s, then every process of the run dies; one CPU without Ray ends with the same bits."""
    settings = ("--epochs", "40", "--set", "checkpoint.every_steps=20", "--set", "telemetry.record_samples=true")
    lost, resumed, single = (tmp_path / name for name in ("lost", "resumed", "single"))
    for folder in (lost, resumed, single):
        folder.mkdir()
    with s3.serve() as storage, running_cluster(2, **storage.environment) as cluster:
        mirror = f"s3://{s3.BUCKET}/run"
        words = ("--devices", "cpu", "--on", "ray", "--nodes", "2", "--mirror", mirror, *settings)
        process = start(cluster, lost, *words, step_s=0.2)
        wait_until(lambda: bool(saved_steps(storage)))
        storage.status = 503
        before = max(saved_steps(storage)), steps_of(lost)
        time.sleep(30)
        assert process.poll() is None and steps_of(lost) > before[1] + 20, "the run continues without its mirror"
        assert storage.refused and max(saved_steps(storage)) == before[0]
        storage.status = 0
        wait_until(lambda: max(saved_steps(storage)) > before[1])
        for node in (2, 1):
            cluster.kill_node(node)
        process.kill()
        process.communicate()
        newest = max(saved_steps(storage))
        assert steps_of(lost) < 480
        lost.rename(tmp_path / "gone")
        environment = clean_environment(**storage.environment, PYTHONPATH=str(ROOT / "src"))
        train(single, environment, "--devices", "cpu", "--global-batch-size", "16", *settings)
        train(resumed, environment, "--devices", "cpu", "--mirror", mirror, "--resume", *settings)
        fetched = RunDir(resumed / "run")
        assert fetched.resumed_from() == {1: 0, 2: newest}
        assert weights(resumed) == weights(single)
        assert samples_by_step(fetched) == samples_by_step(RunDir(single / "run"))
        assert all(not epoch.repeated and not epoch.unused for epoch in audit_samples(fetched))
        copies = dict(storage.puts)
        assert copies[f"run/checkpoints/step-{480:08}/model.safetensors"] == weights(single)


def saved_steps(storage: s3.Storage) -> list[int]:
    """The steps of complete checkpoints at the mirror."""
    names = [name.split("/") for name, _ in storage.puts if name.endswith("manifest.json")]
    return [int(step.removeprefix("step-")) for *_, step, _ in names]


def train(folder: Path, environment: dict[str, str], *words: str) -> None:
    """Train the toy task in ``folder/run`` without Ray."""
    (folder / "toy.py").write_text(TASK.replace("SECONDS", "0"))
    settings = ("--save-dir", "run", "--batch-size", "8", "--reproducibility", "exact")
    command = [sys.executable, "-m", "lockstep", "train", "toy.py:Toy", *words, *settings]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr


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


@pytest.mark.drill
@pytest.mark.timeout(1200)
def test_a_drained_node_is_left_with_a_checkpoint(tmp_path: Path) -> None:
    """The run continues on the other node, from the last step that both have done."""
    words = ("--devices", "cpu", "--on", "ray", "--nodes", "1:2", "--epochs", "80", "--log-interval", "1")
    run = RunDir(tmp_path / "run")
    with running_cluster(2) as cluster:
        process = start(cluster, tmp_path, *words, step_s=0.1)
        wait_until(lambda: steps_of(tmp_path) >= 30)
        cluster.drain_node(2, within_s=25)
        wait_until(lambda: len(run.resumed_from()) == 2)
        process.send_signal(signal.SIGINT)
        code, output = finish(process)
    assert code == 130, output
    assert run.plan()["placement"]["world_size"] == 1
    rows = [json.loads(line) for line in (run.path / "steps.jsonl").read_text().splitlines()]
    assert run.resumed_from()[2] == max(row["step"] for row in rows if row["attempt"] == 1) >= 30


@pytest.mark.drill
@pytest.mark.timeout(1800)
def test_the_run_survives_a_lost_node_a_resize_and_a_stop(cluster: Cluster, tmp_path: Path) -> None:
    """Ends with the weights of a run on one device, bit for bit. The last test here: the cluster loses a node."""
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
