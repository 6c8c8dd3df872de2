"""Faults of real runs, one at a time: how they end, what they say, who is left, and that the run goes on."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.checkpoint.store import CheckpointStore
from lockstep.rundir.folder import RunDir
from tests.disks import make_read_only, small_disk
from tests.e2e import faulty
from tests.e2e.test_train import finish, start, wait_for_step
from tests.gloo import ROOT
from tests.samples import audit_samples

TASK = f"{ROOT / 'tests' / 'e2e' / 'faulty.py'}:Faulty"
#: 2 epochs × 7 steps, of which each takes a moment, with a loader worker for each rank.
QUIET = ("--set", "telemetry.tensorboard=off", "--set", "telemetry.progress=plain")
SLOW = (*QUIET, "--set", "task.dataset=plain", "--set", "task.pause_s=0.01", "--num-workers", "1")
SAVING = ("--set", "checkpoint.every_steps=2", "--set", "telemetry.record_samples=true")


class Drive:
    """A run on two ranks, and everything that it started."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        run: Path | None = None,
        devices: str = "cpu,cpu",
        torchrun: bool = False,
        **how: bool,
    ) -> None:
        self.folder = folder
        self.run = RunDir(run or folder / "run")
        before = ("torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m") if torchrun else ()
        self.process = start(
            *("train", TASK, "--save-dir", str(self.run.path), "--devices", devices, *arguments),
            module=(*before, "lockstep"),
            cwd=folder,
            **how,
        )
        self.family: list[psutil.Process] = []
        self.ports: set[int] = set()

    @property
    def launcher(self) -> Any:
        return json.loads((self.run.logs / "launcher.json").read_text())

    def rank(self, number: int) -> psutil.Process:
        return psutil.Process(self.launcher["pids"][str(number)])

    def worker(self) -> psutil.Process:
        """A loader worker of rank 1."""
        return next(child for child in self.rank(1).children() if child.name().startswith("pt_data_worker"))

    def wait(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError, ValueError, KeyError, StopIteration, psutil.NoSuchProcess):
                if reached():
                    return
            time.sleep(0.02)
        raise AssertionError(f"waited in vain: {self.process.communicate(timeout=30)[0]}")

    def wait_for_step(self, step: int) -> None:
        wait_for_step(self.run.path, step, self.process)
        self.look_around()

    def look_around(self) -> None:
        """Who belongs to the run now, and where they listen."""
        self.family = [self.process_tree, *self.process_tree.children(recursive=True)]
        for process in self.family:
            with contextlib.suppress(psutil.Error):
                self.ports |= {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}

    @property
    def process_tree(self) -> psutil.Process:
        return psutil.Process(self.process.pid)

    def finish(self, code: int) -> str:
        """The command's output; asserts that nobody is left and no port is taken."""
        output = finish(self.process, code, timeout_s=100)
        self.assert_nobody_left()
        return output

    def assert_nobody_left(self) -> None:
        assert psutil.wait_procs(self.family, timeout=20)[1] == []
        listening = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        assert not self.ports & listening

    def resume(self) -> str:
        """The run goes on from its newest good checkpoint and sees every sample once."""
        assert CheckpointStore(self.run.checkpoints).newest_verified(lambda message: None)
        self.cure()
        output = finish(start("resume", str(self.run.path), cwd=self.folder), timeout_s=100)
        self.assert_complete()
        return output

    def cure(self) -> None:
        """Without the task's fault from now on, which a resume could not change."""
        for file in self.run.path.glob("**/config.yaml"):  # of the run, and of its attempts
            file.write_text(re.sub(r"fault: \w+", "fault: none", file.read_text()))

    def assert_complete(self) -> None:
        assert self.run.status() == "completed"
        found = [(epoch.epoch, epoch.used, epoch.repeated, epoch.unused) for epoch in audit_samples(self.run)]
        assert found == [(epoch, 200, (), ()) for epoch in (1, 2)]


@contextmanager
def drive(folder: Path, *arguments: str, **options: Any) -> Iterator[Drive]:
    made = Drive(folder, *arguments, **options)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()
        assert made.process.stdout is not None
        made.process.stdout.close()
        for process in made.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def line_of(function: str, text: str) -> int:
    """The line of ``text`` in a function of the faulty task."""
    lines = Path(str(faulty.__file__)).read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if f"def {function}(" in line)
    return next(number for number, line in enumerate(lines[first:], first + 1) if text in line)


# Restarts.


@pytest.mark.slow
def test_a_run_survives_a_killed_rank_a_killed_loader_worker_and_a_stopped_rank(tmp_path: Path) -> None:
    limits = ("--set", "launch.max_restarts=3", "--set", "launch.hang_timeout_s=4")
    with drive(tmp_path, *SLOW, *SAVING, *limits, "--set", "task.pause_s=0.04") as run:
        for restart, (step, strike) in enumerate(
            [
                (3, lambda: run.rank(1).kill()),
                (5, lambda: run.wait(lambda: run.worker().kill() is None)),  # between two epochs there is none
                (9, lambda: run.rank(0).send_signal(signal.SIGSTOP)),
            ]
        ):
            run.wait(lambda: run.launcher["starts"] == restart + 1)  # noqa: B023
            run.wait_for_step(step)
            if restart == 0:
                asked = run.run.config_file.read_text()
                run.run.config_file.write_text(re.sub(r"(?m)^(  lr:) .*", r"\1 0.5", asked))
                assert run.run.config_file.read_text() != asked
            strike()
        run.wait(lambda: run.launcher["starts"] == 4)
        run.look_around()
        output = run.finish(0)
    run.assert_complete()
    assert output.count("was edited while the run trained") == 1 and run.run.config_file.read_text() == asked
    restarts = run.run.read().restarts
    killed, data, stopped = (restart["reason"] for restart in restarts)
    assert killed.startswith("rank 1 ") and "SIGKILL" in killed
    assert data.startswith("rank 1 ") and "DataLoader" in data
    assert stopped.startswith("rank 0 ") and "heartbeat" in stopped
    for number, restart in enumerate(restarts, 1):
        assert restart["from_step"] % 2 == 0 or restart["from_step"] == 7
        assert 0 <= restart["lost_steps"] <= 3
        assert re.search(rf"\({number} of 3\).* step {restart['from_step']}: ", output)


# Hangs.


@pytest.mark.slow
def test_a_barrier_on_one_rank_is_named_with_its_line(tmp_path: Path) -> None:
    with drive(tmp_path, *QUIET, "--set", "task.fault=hook", "--set", "launch.hang_timeout_s=3") as run:
        output = run.finish(1)
    place = f"{faulty.__file__}:{line_of('lonely', 'dist.barrier()')} in lonely, in barrier"
    assert re.search(rf"rank 0 .* 3 s, .* step 4: {place}", output)
    assert re.search(r"rank 1: .* 3 s in step 5", output)
    assert "stack of rank 1," in output
    assert "launch.hang_timeout_s" in output
    assert output.count("error: ") == 1
    assert run.run.status() == "failed"


@pytest.mark.drill
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("sleep", r"rank 1 .* 3 s, in step 4: {file}:{line} in sleep"),
        ("barrier", r"rank 0 .* 3 s, in step 4: {file}:{line} in barrier, in barrier"),
    ],
)
def test_a_rank_that_hangs_in_its_loss(tmp_path: Path, fault: str, says: str) -> None:
    settings = (*QUIET, *SAVING, "--set", f"task.fault={fault}", "--set", "launch.hang_timeout_s=3")
    with drive(tmp_path, *settings, fresh=True) as run:  # of a fork, the tests' own frames are in the stacks
        output = run.finish(1)
    call = {"sleep": "time.sleep", "barrier": "dist.barrier"}[fault]
    assert re.search(says.format(file=faulty.__file__, line=line_of(fault, call)), output)
    run.resume()


@pytest.mark.slow
@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.drill)])
def test_a_loaders_worker_that_hangs_is_named_with_the_line_that_it_is_at(tmp_path: Path, torchrun: bool) -> None:
    arguments = (*QUIET, *SAVING, "--num-workers", "1", "--set", "task.fault=data", "--set", "launch.hang_timeout_s=3")
    with drive(tmp_path, *arguments, torchrun=torchrun) as run:
        output = run.finish(1)
    line = f"{faulty.__file__}:{line_of('__getitem__', 'of the disk')} in __getitem__"
    assert re.search(rf"rank 1 .* in step \d, .* data: .* worker \d+ .*{line}", output), output
    assert re.search(r"^fix: .*--num-workers 0", output, re.MULTILINE)
    run.resume()


@pytest.mark.drill
def test_a_barrier_on_one_rank_is_named_where_no_launcher_watches(tmp_path: Path) -> None:
    arguments = (*QUIET, *SAVING, "--set", "task.fault=hook", "--set", "launch.hang_timeout_s=3")
    with drive(tmp_path, *arguments, torchrun=True) as run:
        run.wait_for_step(4)
        output = run.finish(1)
    place = f"{faulty.__file__}:{line_of('lonely', 'dist.barrier()')} in "
    assert re.search(rf"^error: rank 0 .* hooks .* step 4: {place}", output, re.MULTILINE)
    assert re.search(r"rank 1: .* s in (step 5|hooks .*); ", output)
    assert "stack of rank 1," in output
    assert output.count("error: rank 0 ") == 1
    assert f"{place}lonely" in (run.run.logs / "rank-1.log").read_text()
    assert run.run.status() == "failed"
    assert str(run.run.read().error).startswith("rank 0 ")


@pytest.mark.slow
def test_a_hang_is_not_replaced_by_the_lost_connection_that_follows_it(tmp_path: Path) -> None:
    arguments = (*QUIET, "--set", "task.fault=hook", "--set", "launch.hang_timeout_s=3")
    with drive(tmp_path, *arguments, torchrun=True) as run:
        run.wait_for_step(4)
        other = rank_process(run, 1)
        run.wait(lambda: run.run.read().status == "failed")
        other.kill()  # rank 0 loses its connection while it stays for the others
        output = run.finish(1)
    place = f"{faulty.__file__}:{line_of('lonely', 'dist.barrier()')} in "
    error = str(run.run.read().error)
    assert error.startswith("rank 0 ") and place in error
    assert output.count("error: rank 0 ") == 1
    assert "RuntimeError" not in output


@pytest.mark.drill
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_missed_where_no_launcher_watches(tmp_path: Path, rank: int) -> None:
    arguments = (*SLOW, *SAVING, "--set", "task.pause_s=0.04", "--set", "launch.hang_timeout_s=6")
    with drive(tmp_path, *arguments, torchrun=True) as run:
        run.wait_for_step(4)
        stopped = rank_process(run, rank)
        stopped.send_signal(signal.SIGSTOP)
        output = run.finish(1)
    # "in step 5", or an activity between two steps: "in hooks and logging after step 5".
    assert re.search(rf"^error: rank {rank} .* heartbeat .*, in .*\bstep \d", output, re.MULTILINE), output
    assert f"rank {rank} (stopped): " in output
    assert str(run.run.read().error).startswith(f"rank {rank} ")
    run.resume()


def rank_process(run: Drive, rank: int) -> psutil.Process:
    """The process of a rank under torchrun."""
    for process in run.process_tree.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.environ().get("LOCAL_RANK") == str(rank) and process.ppid() == run.process.pid:
                return process
    raise AssertionError(f"no rank {rank}")


@pytest.mark.drill
@pytest.mark.parametrize("torchrun", [False, True])
def test_a_long_evaluation_a_long_save_and_a_slow_first_step_are_no_hang(tmp_path: Path, torchrun: bool) -> None:
    """Each takes longer than the time without progress that counts as a hang."""
    arguments = ("--set", "task.slow=true", "--set", "launch.hang_timeout_s=4", "--set", "validation.batch_size=8")
    with drive(tmp_path, *QUIET, *arguments, "--set", "task.save_s=6", "--epochs", "1", torchrun=torchrun) as run:
        run.finish(0)
    assert run.run.status() == "completed"


# Too little memory.


@pytest.mark.drill
def test_a_rank_without_memory_is_told_with_a_batch_that_fits(tmp_path: Path) -> None:
    with drive(tmp_path, *QUIET, *SAVING, "--set", "task.fault=gpu_memory", "--batch-size", "16") as run:
        output = run.finish(1)
    assert re.search(r"^error: rank 1 .*: torch\.OutOfMemoryError: ", output, re.MULTILINE)
    assert "--set training.batch_size=N" in output
    run.cure()
    finish(start("resume", "run", "--set", "training.batch_size=8", cwd=tmp_path), timeout_s=100)
    run.assert_complete()
    batch = run.run.plan()["batch"]
    assert (batch["global_batch"], batch["batch_size"], batch["accumulate"]) == (32, 8, 2)


@pytest.mark.drill
def test_a_rank_whose_memory_is_limited_fails_in_an_evaluation(tmp_path: Path) -> None:
    """The system itself refuses the memory (RLIMIT_AS), on one of two ranks."""
    fault = ("--set", "task.fault=memory", "--set", "task.evaluating=true", "--set", "task.at=7")
    with drive(tmp_path, *QUIET, *SAVING, *fault, "--batch-size", "16") as run:
        output = run.finish(1)
    assert re.search(r"^error: rank 1 .*: RuntimeError: .*DefaultCPUAllocator", output, re.MULTILINE)
    assert "--set validation.batch_size=N" in output


@pytest.mark.slow
def test_one_device_without_memory_is_told_the_same(tmp_path: Path) -> None:
    with drive(tmp_path, *QUIET, *SAVING, "--set", "task.fault=memory", devices="cpu") as run:
        output = run.finish(1)
    assert re.search(r"^error: .*: RuntimeError: .*DefaultCPUAllocator", output, re.MULTILINE)
    assert output.count("error: ") == 1
    record = run.run.read()
    assert record.status == "failed"
    assert "--set training.batch_size=N" in str(record.error)


# The run folder.


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_keeps_the_newest_checkpoint(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk:
        with drive(tmp_path, *SLOW, *SAVING, run=disk / "run") as run:
            run.wait_for_step(4)
            ballast = disk / "ballast"
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            output = run.finish(1)
        assert re.search(r"^error: rank 0 .* space .*^fix: ", output, re.MULTILINE | re.DOTALL)
        assert "Traceback" not in output
        ballast.unlink()
        make_read_only(disk)
        refused = finish(start("resume", str(run.run.path), cwd=tmp_path), 1)
        assert "read-only" in refused
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        run.resume()


@pytest.mark.drill
def test_a_vanished_run_folder_ends_the_run(tmp_path: Path) -> None:
    with drive(tmp_path, *SLOW, *SAVING) as run:
        run.wait_for_step(4)
        run.run.path.rename(tmp_path / "elsewhere")
        output = run.finish(1)
    assert re.search(rf"^error: rank [01] .*{run.run.path}", output, re.MULTILINE)
    assert "Traceback" not in output
    assert not run.run.path.exists(), "what is gone is not made anew"
    (tmp_path / "elsewhere").rename(run.run.path)
    run.resume()


# Signals and kills.


def kill_launcher(run: Drive) -> int:
    os.kill(run.launcher["pid"], signal.SIGKILL)
    return 1


def kill_command(run: Drive) -> int:
    run.process.kill()
    return -signal.SIGKILL


def terminate(run: Drive) -> int:
    run.process.terminate()
    return 143


def interrupt_twice(run: Drive) -> int:
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    run.process.send_signal(signal.SIGINT)
    return 130


@pytest.mark.drill
@pytest.mark.parametrize("strike", [kill_launcher, kill_command, terminate, interrupt_twice])
def test_a_run_that_is_killed_or_stopped_goes_on(tmp_path: Path, strike: Callable[[Drive], int]) -> None:
    with drive(tmp_path, *SLOW, *SAVING, "--set", "task.pause_s=0.02") as run:
        run.wait_for_step(4)
        code = strike(run)
        output = run.finish(code)
    assert "Traceback" not in output
    run.resume()


@pytest.mark.parametrize(
    ("place", "does", "limit", "torchrun"),
    [
        pytest.param("prepare", "stands_still", "distributed.timeout_s", False, marks=pytest.mark.slow),
        pytest.param("model", "stands_still", "distributed.timeout_s", False, marks=pytest.mark.slow),
        ("compute", "stands_still", "distributed.timeout_s", False),
        pytest.param("compute", "stands_still", "distributed.timeout_s", True, marks=pytest.mark.slow),
        pytest.param("compute", "calls_alone", "launch.hang_timeout_s", False, marks=pytest.mark.slow),
    ],
)
def test_the_rank_that_the_others_wait_for_is_named_with_its_line(
    place: str, does: str, limit: str, torchrun: bool, tmp_path: Path
) -> None:
    before = ("torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m") if torchrun else ()
    limit_s = 8 if torchrun else 2  # under torchrun the ranks import torch in it, too
    process = start(
        *("train", f"{ROOT / 'tests' / 'e2e' / 'waiting.py'}:Waiting", "--devices", "cpu,cpu", "--save-dir", "run"),
        *("--set", f"task.at={place}", "--set", f"task.does={does}", "--set", f"{limit}={limit_s}"),
        module=(*before, "lockstep"),
        cwd=tmp_path,
    )
    output = finish(process, 1)
    rank = 1 if place == "model" else 0
    assert re.search(rf"error: rank {rank} .*waiting\.py:\d+ in {does}", output)
    assert f"raise {limit} (now {limit_s})" in output
    assert does in (RunDir.open(tmp_path / "run").read().error or "")


@pytest.mark.slow
def test_a_closed_terminal_stops_a_run_with_a_checkpoint(tmp_path: Path) -> None:
    """SIGHUP goes to all processes of a terminal, loader workers included."""
    with drive(tmp_path, *SLOW, devices="cpu") as run:
        run.wait_for_step(2)
        for process in reversed(run.family):
            process.send_signal(signal.SIGHUP)
        run.finish(143)
        assert run.run.status() == "stopped"
        assert CheckpointStore(run.run.checkpoints).newest_verified(lambda message: None)


@pytest.mark.drill
def test_a_run_killed_while_it_starts_goes_on_at_once(tmp_path: Path) -> None:
    with drive(tmp_path, *QUIET, *SAVING) as run:
        run.wait(lambda: bool(run.launcher["pids"]))
        run.look_around()
        for process in reversed(run.family):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        run.process.communicate(timeout=60)
        run.assert_nobody_left()
    assert run.run.status() == "lost"
    finish(start("resume", "run", cwd=tmp_path), timeout_s=100)
    run.assert_complete()


def interrupt(folder: Path, number: int) -> None:
    """Two or three Ctrl-C within a second, at a random time of a run on one or two ranks."""
    rng = random.Random(f"interrupt {number}")
    devices, pause = rng.choice(("cpu", "cpu,cpu")), ("--set", "task.pause_s=0.1")
    drive = Drive(folder, *SLOW, *SAVING, *pause, devices=devices)
    if rng.random() < 0.5:
        drive.wait_for_step(rng.randrange(1, 6))
    else:
        drive.wait(lambda: drive.run.run_file.exists())
        drive.look_around()
    time.sleep(rng.uniform(0, 0.5))
    for _ in range(rng.choice((2, 3))):
        drive.process.send_signal(signal.SIGINT)
        time.sleep(rng.uniform(0, 0.4))
    output = drive.finish(130)
    assert "Traceback" not in output, output
    assert output.count("interrupted") <= 1, output
    assert drive.run.read().status != "running"


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_an_impatient_hand_leaves_a_clean_end(number: int, tmp_path: Path) -> None:
    interrupt(tmp_path, number)


@pytest.mark.drill
@pytest.mark.parametrize("number", range(100, 200))
def test_many_impatient_hands(number: int, tmp_path: Path) -> None:
    interrupt(tmp_path, number)
