"""The launcher as a process: what it takes from its caller, and what its end means."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from threadpoolctl import threadpool_info

from lockstep.launch.local import launcher
from lockstep.launch.local.on_ranks import RankLimits, launch, run_on_ranks
from lockstep.launch.local.worker import Rank
from lockstep.rundir.folder import RunDir
from tests.conftest import RunCli
from tests.gloo import ROOT, clean_environment
from tests.launch.conftest import FORK_AHEAD, STUB, Caller, wait_for


def see(rank: Rank, name: str) -> tuple[str, str, str, int, set[int], int]:
    """The process's name, its folder, a variable, the threads of torch and of NumPy, and its process group."""
    import torch

    torch.ones(300, 300) @ torch.ones(300, 300)  # a fork of a process that has computed would block
    numpy = {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}
    process = psutil.Process()
    return process.name(), process.cwd(), os.environ[name], torch.get_num_threads(), numpy, os.getpgrp() - os.getpid()


@pytest.mark.slow
def test_each_launch_has_the_folder_variables_and_threads_of_its_call(
    run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value, threads in (("one", 1), ("two", 2)):
        folder = tmp_path / value
        folder.mkdir()
        monkeypatch.chdir(folder)
        monkeypatch.setenv("SEEN", value)
        found = run_on_ranks(see, "SEEN", folder=run_dir, ranks=2, limits=RankLimits(threads=threads))
        assert found == [(f"rank-{number}", str(folder), value, threads, {threads}, 0) for number in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("fresh", [False, True])
def test_a_killed_launcher_ends_its_ranks(caller: Caller, fresh: bool) -> None:
    process = caller.start("ignore", "ignore", fresh=fresh)
    caller.wait_until_ready()
    started = psutil.Process(process.pid).children(recursive=True)
    assert [child.name() for child in started] == [launcher.NAME, "rank-0", "rank-1"]
    os.kill(started[0].pid, signal.SIGKILL)
    code, _, err = caller.finish()
    assert (code, err) == (1, "")
    wait_for(lambda: not any(child.is_running() for child in started))


UNUSED = """
import os
from lockstep.launch.local import launcher_process
launcher_process.fork_launcher_ahead()
print(launcher_process._forked_ahead[0].process.pid, flush=True)
input()
"""


@pytest.mark.slow
def test_a_launcher_that_was_forked_for_nothing_ends_with_its_command() -> None:
    command = [sys.executable, "-c", UNUSED]
    with subprocess.Popen(command, env=clean_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        unused = psutil.Process(int(process.stdout.readline()))
        wait_for(lambda: unused.name() == launcher.NAME)
        process.kill()
    wait_for(lambda: not unused.is_running())


#: A fork of the caller, which has the caller's open files, and outlives it.
FORKING = """
import os, threading, time
from pathlib import Path
def fork():
    while not Path({path!r}, "ready-1").exists():
        time.sleep(0.01)
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    Path({path!r}, "forked").touch()
threading.Thread(target=fork, daemon=True).start()
"""


@pytest.mark.slow
def test_a_launcher_ends_with_its_caller_though_a_fork_of_that_has_its_socket(caller: Caller, run_dir: RunDir) -> None:
    caller.start("ignore", "ignore", prepare=FORKING.format(path=str(run_dir.path)), stop_grace_s=0.5)
    caller.wait_until_ready()
    wait_for((run_dir.path / "forked").exists)
    assert caller.process is not None
    caller.process.kill()
    wait_for(lambda: len(caller.descendants()) == 1)


@pytest.mark.slow
def test_a_caller_may_have_more_files_open_than_select_takes(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB", "end,end")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        assert launch(run_dir, 2, STUB) == 0
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_a_caller_that_ignores_the_end_of_children(caller: Caller) -> None:
    caller.start("end", prepare="import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n" + FORK_AHEAD)
    assert caller.finish()[::2] == (0, "")


ORDERED = """
from pathlib import Path
import torch
import lockstep

class Words(lockstep.Task):
    def datasets(self):
        vocabulary = list({f"word {i}" for i in range(100)})
        Path("order.txt").write_text("\\n".join(vocabulary))
        return lockstep.Datasets(torch.utils.data.TensorDataset(torch.randn(32, 4), torch.zeros(32, dtype=torch.long)))

    def model(self):
        return torch.nn.Linear(4, 2)

    def loss(self, model, batch):
        inputs, labels = batch
        return lockstep.Loss(torch.nn.functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels))
"""


@pytest.mark.slow
def test_sets_have_one_order_on_one_device_and_on_several(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text(ORDERED)
    orders = []
    for devices in ("cpu", "cpu,cpu"):
        ended = run_cli("train", "words.py:Words", "--devices", devices, "--epochs", "1", "--save-dir", devices)
        assert ended.code == 0, ended.err
        orders.append((tmp_path / "order.txt").read_text())
    assert orders[0] == orders[1]


#: Loaded by each interpreter: a machine with one GPU, and a file with the process of every question to the GPU.
SITE = """
import os, sys, torch
from lockstep.hardware import detect
from tests.hardware.machines import machine

def noted(name, function):
    def call(*args, **kwargs):
        with open(os.environ["ASKED"], "a") as file, open("/proc/self/comm") as comm:
            file.write(f"{comm.read().strip()} {name}\\n")
        return function(*args, **kwargs)
    return call

for module in (torch.cuda, torch.accelerator):
    for name in ("init", "_lazy_init", "is_available", "device_count", "current_device", "set_device", "mem_get_info",
                 "get_device_properties", "get_device_name", "get_device_capability"):
        if hasattr(module, name):
            setattr(module, name, noted(name, getattr(module, name)))
detect._detected = lambda: tuple(machine(1))
"""


def with_site(folder: Path, text: str) -> dict[str, str]:
    (folder / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "src"), str(ROOT)]), "ASKED": str(folder / "asked")}


@pytest.mark.slow
def test_only_ranks_ask_the_gpu(run_cli: RunCli, tmp_path: Path) -> None:
    """CUDA cannot be used in a fork of a process that has asked."""
    ended = run_cli("train", "tests.toys:Toy", "--devices", "gpu:0,gpu:0", env=with_site(tmp_path, SITE), fresh=True)
    assert re.search(r"^error: gpu:0 .*\brank\b", ended.err, re.MULTILINE)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked
    assert all(line.startswith("rank-") for line in asked), asked
