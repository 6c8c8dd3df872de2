"""What the ranks of these tests run: the real worker around a body that does what the test says.

The variable STUB holds one action for each rank, separated by commas.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from lockstep.errors import DataError
from lockstep.hardware import parent_death
from lockstep.hardware.world import World
from lockstep.launch.local import worker
from lockstep.launch.process.signals import Stopped, StopRequest


def rank_main(rank: worker.Rank) -> None:
    action = os.environ["STUB"].split(",")[rank.world.rank]
    code: int = globals()[action.replace("-", "_")](rank.folder.path, rank.world)
    if code:
        raise Stopped(code)


def ready(folder: Path, world: World) -> None:
    (folder / f"ready-{world.rank}").touch()


def end(folder: Path, world: World) -> int:
    print(f"rank {world.rank} of {world.size} speaks")
    return 0


def fail(folder: Path, world: World) -> int:
    print("one\ntwo\nlast words")
    raise ValueError("the cat sat on the keyboard")


def fail_late_in_group(folder: Path, world: World) -> int:
    join_group()
    return fail(folder, world)


def refuse(folder: Path, world: World) -> int:
    raise DataError("label 7 is out of range", why="there are 7 classes", fix="count from 0")


def die(folder: Path, world: World) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def leave(folder: Path, world: World) -> int:
    sys.exit(7)


def stop(folder: Path, world: World) -> int:
    """Train until told to stop, then save for a while, as the loop does; counts what it is told."""
    told = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    signal.signal(signal.SIGINT, lambda number, _: told.append(number))
    if sys.stdout.isatty():
        print(f"rank {world.rank} sees a terminal")
    ready(folder, world)
    while not told:
        time.sleep(0.01)
    time.sleep(0.5)
    (folder / f"told-{world.rank}").write_text(",".join(map(str, told)))
    return 143


def stop_at_once(folder: Path, world: World) -> int:
    with StopRequest() as request:
        ready(folder, world)
        while request.requested is None:
            time.sleep(0.01)
    return 128 + request.requested


def end_by_signal(folder: Path, world: World) -> int:
    """A rank that no longer handles stops: it is ending."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ready(folder, world)
    time.sleep(600)
    return 0


def ignore(folder: Path, world: World) -> int:
    """Stuck in a collective: hears nothing."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready(folder, world)
    time.sleep(600)
    return 0


def with_children(folder: Path, world: World) -> int:
    """Loader workers, and a process that knows nothing of Lockstep."""
    for method in ("fork", "spawn", "forkserver"):
        multiprocessing.get_context(method).Process(target=load, daemon=True).start()
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    return stop_at_once(folder, world)


def load() -> None:
    parent_death.bind_loader_worker()
    time.sleep(600)


def lose_peer(folder: Path, world: World) -> int:
    join_group()
    from torch import distributed

    distributed.barrier()  # in which the other rank never arrives
    return 0


def die_in_group(folder: Path, world: World) -> int:
    join_group()
    return die(folder, world)


def join_group() -> None:
    from torch import distributed

    distributed.init_process_group("gloo")
    distributed.barrier()


def fail_once(folder: Path, world: World) -> int:
    """Fail on the first start of all ranks, not on the second."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        wait_for_others(folder, world)
        if world.rank == 1:
            raise ValueError("first start")
        return stop_at_once(folder, world)
    (folder / f"restarted-{world.rank}").touch()
    return 0


def wait_for_others(folder: Path, world: World) -> None:
    ready(folder, world)
    while len(list(folder.glob("ready-*"))) < world.size:
        time.sleep(0.01)
