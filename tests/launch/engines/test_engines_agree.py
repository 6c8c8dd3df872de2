"""Every engine runs the same training: equal losses, in exact mode equal bits, also after it has lost nodes.

The long forms train the built-in task under each engine. The short forms train it on fewer windows; torchrun and Ray
lose nodes meanwhile.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from lockstep.rundir.folder import RunDir
from tests import s3
from tests.e2e.test_train import finish, start
from tests.launch.slurm_cluster import cluster as slurm_cluster
from tests.ray_cluster import free_port, running_cluster, wait_until
from tests.samples import audit_samples

PATIENCE_S = 400
HAR = (
    *("train", "har", "--epochs", "2", "--global-batch-size", "64", "--num-workers", "0", "--seed", "5"),
    *("--set", "debug.limit_eval_batches=4", "--max-steps", "12"),
)
#: The built-in task, as slowly as a test needs it.
TASK = """
import time
from lockstep.tasks.har.task import HarConfig, HarTask

class Config(HarConfig):
    pause_s: float = 0.0

class Har(HarTask):
    Config = Config

    def loss(self, model, batch):
        time.sleep(self.config.pause_s)
        return super().loss(model, batch)
"""
STEPS = 24
SHORT = (
    *("train", "har.py:Har", "--epochs", "2", "--global-batch-size", "16", "--num-workers", "0", "--seed", "5"),
    *("--set", "task.source=synthetic", "--set", "task.synthetic_samples=192", "--set", "task.synthetic_shape=[3,16]"),
    *("--set", "debug.limit_eval_batches=2", "--set", "checkpoint.every_steps=2", "--reproducibility", "exact"),
    *("--set", "telemetry.record_samples=true", "--set", "telemetry.tensorboard=off"),
)
SLOWLY = ("--set", "task.pause_s=0.1")
TWO_NODES = ("--devices", "cpu", "--nodes", "2")
IN_RUN = ("--save-dir", "run")


def run_all(commands: Sequence[Sequence[str]], folder: Path, **variables: str) -> None:
    """Run commands of Lockstep at the same time; all must succeed."""
    finish_all([start(*command, cwd=folder, env=variables) for command in commands])


def finish_all(processes: Sequence[subprocess.Popen[str]]) -> None:
    try:
        for process in processes:
            finish(process, timeout_s=PATIENCE_S)
    finally:
        for process in processes:
            process.kill()


def on_local_ranks(folder: Path, words: Sequence[str]) -> None:
    run_all([(*words, *IN_RUN, "--devices", "cpu,cpu")], folder)


def on_two_agents(folder: Path, words: Sequence[str]) -> None:
    agent = (*words, *IN_RUN, *TWO_NODES, "--rdzv", f"localhost:{free_port()}")
    run_all([agent, agent], folder)


def on_slurm(folder: Path, words: Sequence[str]) -> None:
    with slurm_cluster() as variables:
        run_all([(*words, *IN_RUN, *TWO_NODES, "--on", "slurm")], folder, **variables)


def on_ray(folder: Path, words: Sequence[str]) -> None:
    with running_cluster(2) as nodes:
        run_all([(*words, *IN_RUN, *TWO_NODES, "--on", "ray")], folder, **nodes.variables)


def on_kubernetes(folder: Path, words: Sequence[str]) -> None:
    """Run the command of the printed manifest as Kubeflow's torch runtime would, once for each pod."""
    kubernetes = ("--on", "k8s", "--k8s-image", "registry.example.com/lockstep:1", "--k8s-volume", f"runs:{folder}")
    printing = start(*words, *kubernetes, *TWO_NODES, "--print", "--save-dir", str(folder / "run"), cwd=folder)
    trainer = yaml.safe_load(finish(printing))["spec"]["trainer"]
    variables = {variable["name"]: variable["value"] for variable in trainer["env"]} | {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(free_port()),
    }
    python, *command = trainer["command"]
    assert python == "python"
    finish_all(
        [start(*command, module=(), cwd=folder, env={**variables, "PET_NODE_RANK": str(node)}) for node in range(2)]
    )


ENGINES: Mapping[str, Callable[[Path, Sequence[str]], None]] = {
    "torchrun": on_two_agents,
    "slurm": on_slurm,
    "ray": on_ray,
    "k8s": on_kubernetes,
}


def losses(folder: Path) -> list[dict[str, Any]]:
    epochs = json.loads((folder / "run" / "metrics.json").read_text())["epochs"]
    names = ("train_loss", "val_loss", "val_accuracy", "lr")
    return [{name: epoch[name] for name in names} for epoch in epochs]


def weights(folder: Path) -> bytes:
    return (folder / "run" / "checkpoints" / "last" / "model.safetensors").read_bytes()


@pytest.mark.drill
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_engines_agree(mode: str, tmp_path: Path) -> None:
    words = (*HAR, "--reproducibility", mode)
    for name, train in {"local": on_local_ranks, **ENGINES}.items():
        (tmp_path / name).mkdir()
        train(tmp_path / name, words)
    local = losses(tmp_path / "local")
    assert len(local) >= 1
    for name in ENGINES:
        for ours, theirs in zip(losses(tmp_path / name), local, strict=True):
            assert ours == (theirs if mode == "exact" else pytest.approx(theirs, rel=1e-4)), name
        if mode == "exact":
            assert weights(tmp_path / name) == weights(tmp_path / "local"), name


# --- short forms -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the short run on two local ranks."""
    folder = tmp_path_factory.mktemp("local")
    (folder / "har.py").write_text(TASK)
    on_local_ranks(folder, SHORT)
    return folder


def assert_same_run(folder: Path, local: Path) -> None:
    """Assert that the run trained what the local one has trained: equal bits, every sample once."""
    assert losses(folder) == losses(local)
    assert weights(folder) == weights(local)
    audit = [(epoch.epoch, epoch.repeated, epoch.unused) for epoch in audit_samples(RunDir.open(folder / "run"))]
    assert audit == [(1, (), ()), (2, (), ())]


@pytest.mark.parametrize("engine", ["slurm", "k8s"])
def test_a_short_run_agrees(engine: str, local: Path, tmp_path: Path) -> None:
    (tmp_path / "har.py").write_text(TASK)
    ENGINES[engine](tmp_path, SHORT)
    assert RunDir.open(tmp_path / "run").plan()["placement"]["nodes"] == 2
    assert_same_run(tmp_path, local)


def kill_all(process: subprocess.Popen[str]) -> None:
    """Kill a command and all that it has started, as when its machine is switched off."""
    command = psutil.Process(process.pid)
    for victim in [command, *command.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    process.communicate()


def step_of(run: RunDir) -> int:
    beat = run.progress()
    return 0 if beat is None else beat.step


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


def test_a_short_run_agrees_after_torchrun_has_lost_a_node_that_returns(local: Path, tmp_path: Path) -> None:
    (tmp_path / "har.py").write_text(TASK)
    port = free_port()
    node = (*SHORT, *SLOWLY, *IN_RUN, *TWO_NODES, "--rdzv", f"localhost:{port}", "--set", "launch.max_restarts=3")
    first = start(*node, cwd=tmp_path)
    wait_until(lambda: listens(port))  # it serves the store, which the other one must not take along
    second = start(*node, cwd=tmp_path)
    run = RunDir(tmp_path / "run")
    wait_until(lambda: step_of(run) >= 3)
    kill_all(second)
    finish_all([first, start(*node, cwd=tmp_path)])
    assert run.read().attempt == 2
    assert_same_run(tmp_path, local)


def mirrored_step(storage: s3.Storage) -> int:
    """The newest step whose checkpoint is complete at the mirror."""
    names = [name.split("/") for name, _ in storage.puts if name.endswith("manifest.json")]
    return max((int(step.removeprefix("step-")) for *_, step, _ in names), default=0)


@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.parametrize("node_returns", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_short_run_agrees_after_ray_has_lost_all_nodes(node_returns: bool, local: Path, tmp_path: Path) -> None:
    """The mirror is cut, then every process of the run dies. One CPU without Ray goes on from the mirror.

    ``node_returns``: before that, one node is lost and returns.
    """
    lost = tmp_path / "lost"
    resumed = tmp_path / "resumed"
    for folder in (lost, resumed):
        folder.mkdir()
        (folder / "har.py").write_text(TASK)
    run = RunDir(lost / "run")
    with s3.serve() as storage:
        mirror = ("--mirror", f"s3://{s3.BUCKET}/run", "--set", "launch.max_restarts=3")
        with running_cluster(2, **storage.environment) as cluster:
            on_nodes = (*SHORT, *SLOWLY, *IN_RUN, *TWO_NODES, "--on", "ray", *mirror)
            command = start(*on_nodes, cwd=lost, env=cluster.variables)
            if node_returns:
                wait_until(lambda: step_of(run) >= 3)
                cluster.kill_node(2)
                cluster.add_node(2)
                wait_until(lambda: run.read().attempt == 2)
            wait_until(lambda: step_of(run) > mirrored_step(storage) > 0)
            storage.status = 503
            before = mirrored_step(storage)
            wait_until(lambda: storage.refused > 0 and step_of(run) > before + 2)
            storage.status = 0
            wait_until(lambda: mirrored_step(storage) > before)
            kill_all(command)
        mirrored = mirrored_step(storage)
        assert mirrored < STEPS
        lost.rename(tmp_path / "gone")
        run_all([(*SHORT, *IN_RUN, "--devices", "cpu", *mirror, "--resume")], resumed, **storage.environment)
    resumed_from = RunDir(resumed / "run").resumed_from()
    assert max(resumed_from) == 2 + node_returns
    assert resumed_from[2 + node_returns] == mirrored
    assert_same_run(resumed, local)
