"""The harness itself: ranks start, fail and end as it says, and leaks are seen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import distributed

from lockstep.errors import ConfigError
from tests import leaks
from tests.gloo import run_ranks


def add(rank: int, size: int, start: int) -> float:
    value = torch.tensor(float(start + rank))
    distributed.all_reduce(value)
    return value.item()


def fail_on_one(rank: int, size: int) -> None:
    if rank == 1:
        raise ConfigError("bad", why="because", fix="mend")
    distributed.barrier()


def hang(rank: int, size: int) -> None:
    print("about to sleep", flush=True)
    time.sleep(600)


def die(rank: int, size: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.barrier()


def test_ranks_compute_together() -> None:
    assert run_ranks(add, 3, 10) == [33.0, 33.0, 33.0]


def test_the_first_error_comes_back_with_its_traceback() -> None:
    with pytest.raises(ConfigError) as caught:
        run_ranks(fail_on_one, 2)
    assert caught.value.fix == "mend"
    assert "on rank 1" in caught.value.__notes__[0]
    assert "fail_on_one" in caught.value.__notes__[0]


def test_ranks_that_hang_are_killed() -> None:
    with pytest.raises(TimeoutError, match="about to sleep"):
        run_ranks(hang, 1, timeout_s=0.5)


def test_a_killed_rank_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="rank 0 died without an error"):
        run_ranks(die, 2)


def test_leaks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "GRACE_S", 0.2)
    before = leaks.take_snapshot()
    threads = torch.get_num_threads()
    handler = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    # The child's own child is orphaned, and still found.
    orphan = [sys.executable, "-c", "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)"]
    try:
        os.environ["LEAKED"] = "1"
        torch.set_num_threads(threads + 1)
        subprocess.run(orphan, check=True)
        found = "\n".join(leaks.find_leaks(before))
    finally:
        del os.environ["LEAKED"]
        torch.set_num_threads(threads)
        signal.signal(signal.SIGUSR2, handler)
    for word in ("LEAKED", "intra-op threads", "signal", "sleep 60"):
        assert word in found
    assert leaks.find_leaks(before) == []
