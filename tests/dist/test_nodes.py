"""Training on two machines: network namespaces joined by a cable, one gloo rank on each."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.launch.local.fork_server import LAUNCHER
from lockstep.rundir.folder import RunDir
from tests.dist.machines import Machine, two_machines
from tests.e2e.test_faults import TASK as FAULTY
from tests.e2e.test_train import SAME, TOY, assert_close, finish, losses, train, wait_for_step
from tests.samples import audit_samples

#: Six processes import torch for each start of two nodes: minutes on a busy machine.
pytestmark = pytest.mark.timeout(600)

SAMPLES, EPOCHS = 200, 2
RDZV = "10.77.0.1:29400"
AUDITED = (*SAME, "--set", "telemetry.record_samples=true", "--set", "checkpoint.every_steps=2")
SLOWLY = ("--set", "task.pause_s=0.3")
#: So slowly that a node has time to start before the run ends.
CRAWLING = ("--set", "task.pause_s=4")
#: Generous: it only bounds a failure.
PATIENCE_S = 240.0


@pytest.fixture
def machines() -> Iterator[Sequence[Machine]]:
    with two_machines() as made:
        yield made


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with two ranks on one machine."""
    folder = tmp_path_factory.mktemp("reference")
    train(folder, "--devices", "cpu,cpu", *SAME)
    return folder / "run"


def command(*arguments: str, nodes: str = "2", rdzv: str = RDZV, task: str = TOY) -> tuple[str, ...]:
    own = ("--devices", "cpu", "--save-dir", "run")
    return ("-m", "lockstep", "train", task, "--nodes", nodes, "--rdzv", rdzv, *own, *AUDITED, *arguments)


def restarting(*arguments: str, nodes: str = "2") -> tuple[str, ...]:
    return command("--set", "launch.max_restarts=3", *SLOWLY, *arguments, nodes=nodes)


def start_all(
    machines: Sequence[Machine], folder: Path, arguments: Sequence[str], *, shared: bool = False
) -> list[subprocess.Popen[str]]:
    """The same command on each machine, in one folder or in one of its own."""
    return [machine.start(*arguments, cwd=folder if shared else folder / machine.name) for machine in machines]


def launcher_on(machine: Machine) -> psutil.Process:
    found = subprocess.run(["ip", "netns", "pids", machine.space], capture_output=True, text=True, check=True)
    for pid in found.stdout.split():
        process = psutil.Process(int(pid))
        if process.name() == LAUNCHER:
            return process
    raise AssertionError(f"no launcher on {machine.name}")


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.05)


def assert_every_sample_once(folder: Path, *others: Path) -> None:
    """``folder`` is the run's; what was recorded in the folders of others that did not come to its end counts, too."""
    for number, other in enumerate(others):
        target = folder / "nodes" / f"lost-{number}"
        target.mkdir(parents=True)
        for file in other.glob("samples-rank*.jsonl"):
            shutil.copy(file, target)
    found = [(epoch.epoch, epoch.used, epoch.repeated, epoch.unused) for epoch in audit_samples(RunDir.open(folder))]
    assert found == [(epoch, SAMPLES, (), ()) for epoch in range(1, EPOCHS + 1)]


def assert_same_losses(run: Path, reference: Path, **tolerance: Any) -> None:
    for ours, theirs in zip(losses(run), losses(reference), strict=True):
        for name in ("train_loss", "val_loss", "val_accuracy", "lr"):
            assert ours[name] == pytest.approx(theirs[name], **tolerance), name


@pytest.mark.slow
def test_two_nodes_without_a_common_disk(machines: Sequence[Machine], reference: Path, tmp_path: Path) -> None:
    processes = start_all(machines, tmp_path, command())
    outputs = [finish(process, timeout_s=PATIENCE_S) for process in processes]
    assert [output.count("summary") for output in outputs] == [1, 0], "rank 0 alone speaks"
    ours, copy = (tmp_path / machine.name / "run" for machine in machines)
    assert_same_losses(ours, reference)
    assert_close(ours, reference)
    assert_every_sample_once(ours)
    assert "begins as rank 1" in (ours / "nodes" / "node1" / "logs" / "rank-1.log").read_text()
    assert RunDir.open(ours).plan()["placement"]["by_node"] == {"node0": ["cpu"], "node1": ["cpu"]}
    # The other node could go on with the run by itself.
    assert RunDir.open(copy).read().id == RunDir.open(ours).read().id
    assert_close(copy, ours, tolerance=1e-12)
    assert_same_losses(copy, ours)


@pytest.mark.slow
def test_a_killed_node_returns(machines: Sequence[Machine], reference: Path, tmp_path: Path) -> None:
    """Its whole launcher is killed; it comes back with the same command and an empty disk."""
    first, second = start_all(machines, tmp_path, restarting())
    run = tmp_path / "node0" / "run"
    wait_for_step(run, 3, first)
    launcher_on(machines[1]).kill()
    killed = time.monotonic()
    finish(second, code=1, timeout_s=PATIENCE_S)
    lost = (tmp_path / "node1" / "run").rename(tmp_path / "lost")
    returned = machines[1].start(*restarting(), cwd=tmp_path / "node1")
    wait_until(lambda: RunDir(run).read().attempt == 2, "the second attempt")
    print(f"the run goes on {time.monotonic() - killed:.1f} s after a node was killed and started again")
    output = finish(first, timeout_s=PATIENCE_S)
    finish(returned, timeout_s=PATIENCE_S)
    assert RunDir.open(run).read().attempt == 2
    assert "started again (1 of 3) from the checkpoint of step " in output
    assert [restart["lost_steps"] <= 2 for restart in RunDir.open(run).read().restarts] == [True]
    assert_every_sample_once(run, lost)
    assert_close(run, reference)
    assert_close(tmp_path / "node1" / "run", run, tolerance=1e-12)


@pytest.mark.drill
def test_a_common_disk(machines: Sequence[Machine], reference: Path, tmp_path: Path) -> None:
    for process in start_all(machines, tmp_path, command(), shared=True):
        finish(process, timeout_s=PATIENCE_S)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert_same_losses(tmp_path / "run", reference)
    assert (tmp_path / "run" / "logs" / "rank-1.log").exists()
    assert_every_sample_once(tmp_path / "run")


@pytest.mark.drill
@pytest.mark.parametrize("how", ["c10d", "static"])
def test_torchrun(machines: Sequence[Machine], reference: Path, tmp_path: Path, how: str) -> None:
    processes = []
    for number, machine in enumerate(machines):
        meeting = {
            "c10d": ("--rdzv-backend=c10d", "--rdzv-endpoint=10.77.0.1:29400", f"--local-addr={machine.address}"),
            "static": ("--master_addr=10.77.0.1", "--master_port=29400", f"--node_rank={number}"),
        }[how]
        if how == "c10d":
            meeting += (f"--rdzv-conf=is_host={'true' if number == 0 else 'false'}",)
        arguments = ("torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *meeting, "-m", "lockstep", "train")
        own = (TOY, "--devices", "cpu", "--save-dir", "run", *AUDITED)
        processes.append(machine.start("-m", *arguments, *own, cwd=tmp_path / machine.name))
    for process in processes:
        finish(process, timeout_s=PATIENCE_S)
    runs = [tmp_path / machine.name / "run" for machine in machines]
    ours = next(run for run in runs if (run / "nodes").exists())  # with c10d either node may hold rank 0
    assert_same_losses(ours, reference)
    assert_close(ours, reference)
    assert_every_sample_once(ours)


@pytest.mark.drill
def test_the_cable_is_pulled_and_plugged_in_again(machines: Sequence[Machine], reference: Path, tmp_path: Path) -> None:
    first, second = start_all(machines, tmp_path, restarting())
    run = tmp_path / "node0" / "run"
    wait_for_step(run, 5, first)
    machines[1].cable("down")
    ranks = [rank for machine in machines for rank in launcher_on(machine).children()]
    assert len(ranks) == 2
    pulled = time.monotonic()
    wait_until(lambda: not any(alive(rank) for rank in ranks), "the ranks of both nodes are given up")
    print(f"ranks given up {time.monotonic() - pulled:.1f} s after the cable was pulled")
    machines[1].cable("up")
    for process in (first, second):
        finish(process, timeout_s=PATIENCE_S)
    print(f"whole run ended {time.monotonic() - pulled:.1f} s after the cable was pulled")
    assert_every_sample_once(run)
    assert_close(run, reference)


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.drill
def test_fewer_nodes_are_enough(machines: Sequence[Machine], reference: Path, tmp_path: Path) -> None:
    """``1:2``: the run goes on alone, with the same global batch, and takes the other node in when it comes back."""
    first, second = start_all(machines, tmp_path, restarting(*CRAWLING, nodes="1:2"))
    run = RunDir(tmp_path / "node0" / "run")
    wait_for_step(run.path, 3, first)
    launcher_on(machines[1]).kill()
    killed = time.monotonic()
    finish(second, code=1, timeout_s=PATIENCE_S)
    wait_until(lambda: run.read().attempt == 2 and run.plan()["placement"]["world_size"] == 1, "the run shrinks")
    print(f"one node goes on alone {time.monotonic() - killed:.1f} s after the other was killed")
    assert run.plan()["batch"]["global_batch"] == 32
    wait_for_step(run.path, 4, first)
    lost = (tmp_path / "node1" / "run").rename(tmp_path / "lost")
    returned = machines[1].start(*restarting(*CRAWLING, nodes="1:2"), cwd=tmp_path / "node1")
    for process in (first, returned):
        finish(process, timeout_s=PATIENCE_S)
    assert run.read().attempt == 3
    assert run.plan()["placement"]["world_size"] == 2
    assert_every_sample_once(run.path, lost)
    assert_close(run.path, reference)


@pytest.mark.drill
def test_nodes_that_want_different_things(machines: Sequence[Machine], tmp_path: Path) -> None:
    processes = [
        machine.start(*command("--lr", lr), cwd=tmp_path / machine.name)
        for machine, lr in zip(machines, ("0.01", "0.02"), strict=True)
    ]
    for process in processes:
        output = finish(process, code=2, timeout_s=PATIENCE_S)
        assert "rank 1 on node node1 would train something else than rank 0 on node node0" in output or (
            "rank 1 on node node0 would train something else than rank 0 on node node1" in output
        )
        assert "setting optimizer.lr is 0.0" in output
        assert "Traceback" not in output
    assert not list(tmp_path.glob("*/run"))


@pytest.mark.drill
def test_the_wrong_host(machines: Sequence[Machine], tmp_path: Path) -> None:
    """An address that nobody has, and one where nobody listens."""
    for address in ("10.77.0.9:29400", "10.77.0.1:29401"):
        alone = command("--set", "launch.join_timeout_s=3", rdzv=address)
        output = finish(machines[1].start(*alone, cwd=tmp_path), code=1, timeout_s=PATIENCE_S)
        assert f"no answer from {address} within 3 s" in output
        assert "fix: start the same command there" in output
        assert "Traceback" not in output


@pytest.mark.drill
def test_a_node_that_waits_for_a_save_is_not_blamed_and_a_hang_is_told_on_both(
    machines: Sequence[Machine], tmp_path: Path
) -> None:
    """Rank 0 saves for longer than ranks may stand still; rank 1, on the other node, hangs two steps later."""
    hang = ("--set", "launch.hang_timeout_s=4", "--set", "task.save_s=8", "--set", "task.fault=sleep")
    arguments = command(*hang, task=FAULTY)
    outputs = [
        finish(process, code=1, timeout_s=PATIENCE_S)
        for process in start_all(machines, tmp_path, arguments, shared=True)
    ]
    for output in outputs:
        assert re.search(r"rank 1 on node1 has made no progress for \d+ s, in step 4: .*faulty.py:\d+ in sleep", output)
        assert "rank 0 on node0: silent for " in output
        assert "stack of rank 0 on node0, innermost call first" in output
    assert RunDir.open(tmp_path / "run").progress().step == 3, "it went on after the save of step 2"


@pytest.mark.drill
def test_a_hang_costs_every_node_a_restart(machines: Sequence[Machine], tmp_path: Path) -> None:
    """The task hangs again on a node that has counted none."""
    hang = ("--set", "launch.hang_timeout_s=4", "--set", "launch.max_restarts=1", "--set", "task.fault=sleep")
    processes = start_all(machines, tmp_path, command(*hang, task=FAULTY), shared=True)
    for process in processes:
        finish(process, timeout_s=PATIENCE_S)
    (restart,) = RunDir.open(tmp_path / "run").read().restarts
    assert restart["reason"].startswith("rank 1 on node1 has made no progress for ")
    assert_every_sample_once(tmp_path / "run")


@pytest.mark.drill
def test_ctrl_c_on_one_node_stops_both_and_the_same_command_goes_on(
    machines: Sequence[Machine], reference: Path, tmp_path: Path
) -> None:
    first, second = start_all(machines, tmp_path, command("--resume", *SLOWLY))
    run = tmp_path / "node0" / "run"
    wait_for_step(run, 3, first)
    first.send_signal(signal.SIGINT)
    finish(first, code=130, timeout_s=PATIENCE_S)
    finish(second, code=143, timeout_s=PATIENCE_S)
    assert [RunDir.open(tmp_path / machine.name / "run").read().status for machine in machines] == ["stopped"] * 2
    for process in start_all(machines, tmp_path, command("--resume")):
        finish(process, timeout_s=PATIENCE_S)
    assert_every_sample_once(run)
    assert_close(run, reference)


@pytest.mark.drill
def test_a_failure_on_one_node_is_told_on_the_other(machines: Sequence[Machine], tmp_path: Path) -> None:
    processes = start_all(machines, tmp_path, command("--set", "task.fail_at=3"))
    outputs = [finish(process, code=1, timeout_s=PATIENCE_S) for process in processes]
    for output in outputs:
        assert "the toy broke" in output
        assert "in _misbehave" in output
