"""Training on two nodes by ``lockstep train --nodes``: two commands on this machine, or in two network namespaces.

The namespaces are joined by a cable and have host names of their own. The file system is one.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.rundir.folder import RunDir
from tests.dist.machines import Machine, two_machines
from tests.e2e.test_faults import TASK as FAULTY
from tests.e2e.test_train import SAME, TOY, assert_close, finish, losses, start, train
from tests.samples import audit_samples

#: Many processes import torch for each start of two nodes: minutes on a busy machine.
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


def options(*arguments: str, nodes: str = "2", rdzv: str = RDZV, save_dir: str = "run") -> tuple[str, ...]:
    return ("--nodes", nodes, "--rdzv", rdzv, "--devices", "cpu", "--save-dir", save_dir, *AUDITED, *arguments)


def command(*arguments: str, nodes: str = "2", rdzv: str = RDZV, task: str = TOY) -> tuple[str, ...]:
    return ("-m", "lockstep", "train", task, *options(*arguments, nodes=nodes, rdzv=rdzv))


def restarting(*arguments: str, nodes: str = "2") -> tuple[str, ...]:
    return command("--set", "launch.max_restarts=3", *SLOWLY, *arguments, nodes=nodes)


def start_all(machines: Sequence[Machine], folder: Path, arguments: Sequence[str]) -> list[subprocess.Popen[str]]:
    """The same command on each machine, in one folder."""
    return [machine.start(*arguments, cwd=folder) for machine in machines]


def ranks_in(folder: Path) -> dict[int, psutil.Process]:
    """The ranks that agents have started in ``folder``, by number."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            environ = process.environ() if process.cwd() == str(folder) else {}
            leads = process.pid == os.getpgid(process.pid)  # not a loader worker
            if leads and environ.get("LOCKSTEP_LAUNCHER") == "nodes":
                found[int(environ["RANK"])] = process
    return found


def agent_on(machine: Machine, folder: Path) -> psutil.Process:
    pids = subprocess.run(["ip", "netns", "pids", machine.space], capture_output=True, text=True, check=True)
    (rank,) = [process for process in ranks_in(folder).values() if str(process.pid) in pids.stdout.split()]
    agent = rank.parent()
    assert agent is not None
    return agent


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.05)


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    def reached() -> bool:
        assert process.poll() is None, process.communicate(timeout=PATIENCE_S)[0]
        beat = RunDir(run).progress()
        return beat is not None and beat.step >= step

    wait_until(reached, f"step {step}")


def assert_every_sample_once(folder: Path) -> None:
    found = [(epoch.epoch, epoch.used, epoch.repeated, epoch.unused) for epoch in audit_samples(RunDir.open(folder))]
    assert found == [(epoch, SAMPLES, (), ()) for epoch in range(1, EPOCHS + 1)]


def assert_same_losses(run: Path, reference: Path, **tolerance: Any) -> None:
    for ours, theirs in zip(losses(run), losses(reference), strict=True):
        for name in ("train_loss", "val_loss", "val_accuracy", "lr"):
            assert ours[name] == pytest.approx(theirs[name], **tolerance), name


@pytest.mark.slow
def test_a_killed_rank_of_two_nodes_is_restarted(reference: Path, tmp_path: Path) -> None:
    """Two agents of this machine: the losses are those of one node, and every sample counts once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        rdzv = f"127.0.0.1:{free.getsockname()[1]}"
    arguments = options("--set", "launch.max_restarts=3", *SLOWLY, rdzv=rdzv)
    processes = [start("train", TOY, *arguments, cwd=tmp_path) for _ in range(2)]
    run = tmp_path / "run"
    wait_for_step(run, 3, processes[0])
    ranks_in(tmp_path)[1].kill()
    outputs = [finish(process, timeout_s=PATIENCE_S) for process in processes]
    print(*outputs, sep="\n=====\n")
    assert sorted("best val_loss" in output for output in outputs) == [False, True], "rank 0 alone speaks"
    record, plan = RunDir.open(run).read(), RunDir.open(run).plan()
    assert (record.status, record.attempt, plan["placement"]["nodes"]) == ("completed", 2, 2)
    assert [(restart["number"], restart["lost_steps"] <= 2) for restart in record.restarts] == [(1, True)]
    assert_same_losses(run, reference)
    assert_close(run, reference)
    assert_every_sample_once(run)
    assert "rank 1" in (run / "logs" / "rank-1.log").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.drill
def test_a_killed_agent_takes_its_ranks_along_and_the_run_resumes_when_it_returns(
    machines: Sequence[Machine], reference: Path, tmp_path: Path
) -> None:
    first, second = start_all(machines, tmp_path, restarting())
    run = tmp_path / "run"
    wait_for_step(run, 3, first)
    agent = agent_on(machines[1], tmp_path)
    (rank,) = agent.children()
    agent.kill()
    killed = time.monotonic()
    wait_until(lambda: not alive(rank), "the rank ends with its agent")
    finish(second, code=1, timeout_s=PATIENCE_S)
    returned = machines[1].start(*restarting(), cwd=tmp_path)
    wait_until(lambda: RunDir(run).read().attempt == 2, "the second attempt")
    print(f"the run goes on {time.monotonic() - killed:.1f} s after an agent was killed and started again")
    output = "".join(finish(process, timeout_s=PATIENCE_S) for process in (first, returned))
    assert RunDir.open(run).read().attempt == 2
    assert re.search(r"\(1 of 3\) .*checkpoint", output)
    assert [restart["lost_steps"] <= 2 for restart in RunDir.open(run).read().restarts] == [True]
    assert_every_sample_once(run)
    assert_close(run, reference)


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
        processes.append(machine.start("-m", *arguments, *own, cwd=tmp_path))
    for process in processes:
        finish(process, timeout_s=PATIENCE_S)
    assert_same_losses(tmp_path / "run", reference)
    assert_close(tmp_path / "run", reference)
    assert_every_sample_once(tmp_path / "run")


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.drill
def test_fewer_nodes_are_enough(machines: Sequence[Machine], reference: Path, tmp_path: Path) -> None:
    """``1:2``: the run goes on alone, with the same global batch, and takes the other node in when it comes back."""
    first, second = start_all(machines, tmp_path, restarting(*CRAWLING, nodes="1:2"))
    run = RunDir(tmp_path / "run")
    wait_for_step(run.path, 3, first)
    agent_on(machines[1], tmp_path).kill()
    killed = time.monotonic()
    finish(second, code=1, timeout_s=PATIENCE_S)
    wait_until(lambda: run.read().attempt == 2 and run.plan()["placement"]["world_size"] == 1, "the run shrinks")
    print(f"one node goes on alone {time.monotonic() - killed:.1f} s after the other was killed")
    assert run.plan()["batch"]["global_batch"] == 32
    wait_for_step(run.path, 4, first)
    returned = machines[1].start(*restarting(*CRAWLING, nodes="1:2"), cwd=tmp_path)
    for process in (first, returned):
        finish(process, timeout_s=PATIENCE_S)
    assert run.read().attempt == 3
    assert run.plan()["placement"]["world_size"] == 2
    assert_every_sample_once(run.path)
    assert_close(run.path, reference)


@pytest.mark.drill
def test_nodes_that_want_different_things(machines: Sequence[Machine], tmp_path: Path) -> None:
    processes = [
        machine.start(*command("--lr", lr), cwd=tmp_path)
        for machine, lr in zip(machines, ("0.01", "0.02"), strict=True)
    ]
    for process in processes:
        output = finish(process, code=2, timeout_s=PATIENCE_S)
        assert re.search(r"^error: rank 1 .*\bnode(\d) .*rank 0 .*\bnode(?!\1)\d", output, re.MULTILINE)
        assert re.search(r"optimizer\.lr .*\b0\.0", output)
        assert "Traceback" not in output
    assert not (tmp_path / "run").exists()


@pytest.mark.drill
def test_nodes_that_see_different_folders(machines: Sequence[Machine], tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    processes = [
        machine.start("-m", "lockstep", "train", TOY, *options(save_dir=save_dir), cwd=tmp_path)
        for machine, save_dir in zip(machines, ("one/run", "two/run"), strict=True)
    ]
    for process in processes:
        output = finish(process, code=2, timeout_s=PATIENCE_S)
        assert "storage that all nodes share" in output
        assert "Traceback" not in output
    assert not list(tmp_path.glob("*/*"))


@pytest.mark.drill
def test_the_wrong_host(machines: Sequence[Machine], tmp_path: Path) -> None:
    """An address that nobody has, and one where nobody listens."""
    for address in ("10.77.0.9:29400", "10.77.0.1:29401"):
        alone = command("--set", "launch.join_timeout_s=3", rdzv=address)
        output = finish(machines[1].start(*alone, cwd=tmp_path), code=1, timeout_s=PATIENCE_S)
        assert re.search(rf"^error: .*{address} .*\b3 s", output, re.MULTILINE)
        assert "\nfix: " in output
        assert "Traceback" not in output


@pytest.mark.drill
def test_a_node_that_waits_for_a_save_is_not_blamed_and_a_hang_is_told_on_both(
    machines: Sequence[Machine], tmp_path: Path
) -> None:
    """Rank 0 saves for longer than ranks may stand still; rank 1, on the other node, hangs two steps later."""
    hang = ("--set", "launch.hang_timeout_s=4", "--set", "task.save_s=8", "--set", "task.fault=sleep")
    arguments = command(*hang, task=FAULTY)
    outputs = [finish(process, code=1, timeout_s=PATIENCE_S) for process in start_all(machines, tmp_path, arguments)]
    for output in outputs:
        assert re.search(r"rank 1 .*\bnode1 .* 4: .*faulty\.py:\d+ in sleep", output)
        assert re.search(r"rank 0 .*\bnode0: ", output)
        assert re.search(r"stack .*rank 0 .*\bnode0,", output)
    assert RunDir.open(tmp_path / "run").progress().step == 3, "it went on after the save of step 2"


@pytest.mark.drill
def test_a_hang_costs_every_node_a_restart(machines: Sequence[Machine], tmp_path: Path) -> None:
    """The task hangs again on a node that has counted none."""
    hang = ("--set", "launch.hang_timeout_s=4", "--set", "launch.max_restarts=1", "--set", "task.fault=sleep")
    processes = start_all(machines, tmp_path, command(*hang, task=FAULTY))
    for process in processes:
        finish(process, timeout_s=PATIENCE_S)
    (restart,) = RunDir.open(tmp_path / "run").read().restarts
    assert re.match(r"rank 1 .*\bnode1 ", restart["reason"])
    assert_every_sample_once(tmp_path / "run")


@pytest.mark.drill
def test_ctrl_c_on_one_node_stops_both_and_the_same_command_goes_on(
    machines: Sequence[Machine], reference: Path, tmp_path: Path
) -> None:
    first, second = start_all(machines, tmp_path, command("--resume", *SLOWLY))
    run = tmp_path / "run"
    wait_for_step(run, 3, first)
    first.send_signal(signal.SIGINT)
    finish(first, code=130, timeout_s=PATIENCE_S)
    finish(second, code=143, timeout_s=PATIENCE_S)
    assert RunDir.open(run).read().status == "stopped"
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
