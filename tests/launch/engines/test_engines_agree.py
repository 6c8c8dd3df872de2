"""Every engine runs the same training: equal losses, in exact mode equal bits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import cli_environment
from tests.launch.slurm_cluster import cluster as slurm_cluster
from tests.ray_cluster import free_port, running_cluster

PATIENCE_S = 400
HAR = (
    *("train", "har", "--epochs", "2", "--global-batch-size", "64", "--num-workers", "0", "--seed", "5"),
    *("--set", "debug.limit_eval_batches=4", "--max-steps", "12"),
)


def run_all(commands: Sequence[Sequence[str]], folder: Path, variables: Sequence[Mapping[str, str]]) -> None:
    """Run commands at the same time, each with its variables; all must succeed."""
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env=cli_environment(**own),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, own in zip(commands, variables, strict=True)
    ]
    try:
        outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), outputs


def train(folder: Path, *words: str, **variables: str) -> None:
    run_all([("-m", "lockstep", *words)], folder, [variables])


def on_two_agents(folder: Path, words: Sequence[str]) -> None:
    agent = ("-m", "lockstep", *words, "--devices", "cpu", "--nodes", "2", "--rdzv", f"localhost:{free_port()}")
    run_all([agent, agent], folder, [{}, {}])


def on_kubernetes(folder: Path, words: Sequence[str]) -> None:
    """Run the command of the printed manifest as Kubeflow's torch runtime would, once for each pod."""
    kubernetes = ("--on", "k8s", "--k8s-image", "registry.example.com/lockstep:1", "--k8s-volume", f"runs:{folder}")
    nodes = (*kubernetes, "--nodes", "2", "--devices", "cpu", "--print", "--save-dir", str(folder / "run"))
    printed = subprocess.run(
        [sys.executable, "-m", "lockstep", *words, *nodes],
        cwd=folder,
        env=cli_environment(),
        stdout=subprocess.PIPE,
        check=True,
    )
    trainer = yaml.safe_load(printed.stdout)["spec"]["trainer"]
    variables = {variable["name"]: variable["value"] for variable in trainer["env"]} | {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(free_port()),
    }
    pods = [{**variables, "PET_NODE_RANK": str(node)} for node in range(2)]
    run_all([trainer["command"][1:]] * 2, folder, pods)


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
    folder = {name: tmp_path / name for name in ("local", "torchrun", "slurm", "ray", "k8s")}
    for path in folder.values():
        path.mkdir()
    with_folder = (*words, "--save-dir", "run")
    on_nodes = (*with_folder, "--devices", "cpu", "--nodes", "2")
    train(folder["local"], *with_folder, "--devices", "cpu,cpu")
    on_two_agents(folder["torchrun"], with_folder)
    on_kubernetes(folder["k8s"], words)
    with slurm_cluster() as variables:
        train(folder["slurm"], *on_nodes, "--on", "slurm", **variables)
    with running_cluster(2) as nodes:
        train(folder["ray"], *on_nodes, "--on", "ray", **nodes.environment)
    local = losses(folder["local"])
    assert len(local) >= 1
    for name, path in folder.items():
        for ours, theirs in zip(losses(path), local, strict=True):
            assert ours == (theirs if mode == "exact" else pytest.approx(theirs, rel=1e-4)), name
        if mode == "exact":
            assert weights(path) == weights(folder["local"]), name
