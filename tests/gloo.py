"""Real ranks for tests: run a function in N fresh processes joined by a gloo process group.

::

    from tests.gloo import run_ranks

    def add(rank: int, size: int, start: int) -> int:
        value = torch.tensor(start + rank)
        dist.all_reduce(value)
        return value.item()

    def test_add() -> None:
        assert run_ranks(add, 2, 10) == [21, 21]

Each rank is a process, forked from a server that has imported torch, as "forkserver" of multiprocessing does it: the
import takes longer than most tests. The function must be importable, or something that cloudpickle can pickle. The
rendezvous is a file: no port is taken.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import cloudpickle

ROOT = Path(__file__).resolve().parent.parent
#: What a launcher leaves in the environment; a test's ranks and commands must not inherit it.
LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_", "SLURM_", "LOCKSTEP_"),
)
#: What libraries set in this process when first used. With it, a command would need an interpreter of its own.
LIBRARY_VARIABLES = ("KMP_", "TORCHINDUCTOR_", "TRITON_", "PYTORCH_NVML_")
_BEFORE = {key: value for key, value in os.environ.items() if key.startswith(LIBRARY_VARIABLES)}
#: Marks every process that a test starts, however deep; see the leak check in conftest.py.
TOKEN_VARIABLE = "LOCKSTEP_TEST_TOKEN"
#: How long the other ranks may take to fail by themselves after the first one did.
GRACE_S = 3.0
#: How long ranks may take to import torch and find each other, on a busy machine.
START_S = 90.0
#: What ranks are forked with.
IMPORTS = [
    *("cloudpickle", "pytest", "torchmetrics", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
    # The first optimizer of a process imports the compiler, for more than a second.
    *("torch.distributed.tensor", "torch._dynamo", "lockstep.engine.attempt"),
]


def clean_environment(**changes: str) -> dict[str, str]:
    """This process's environment without variables of launchers and libraries, for one intra-op thread."""
    others = (*LAUNCHER_VARIABLES, *LIBRARY_VARIABLES)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(others)} | _BEFORE
    token = {TOKEN_VARIABLE: os.environ[TOKEN_VARIABLE]} if TOKEN_VARIABLE in os.environ else {}
    return {**kept, **token, "OMP_NUM_THREADS": "1", **changes}


#: Libraries that take long to import.
HEAVY = ("torch", "numpy", "torchmetrics", "lightning", "tensorboard", "matplotlib", "pandas", "scipy")


def heavy_after(codes: Mapping[str, str], folder: Path) -> dict[str, list[str]]:
    """Run ``codes`` one after the other in a fresh interpreter; return the heavy libraries that each loads, by name."""
    program = (
        f"import json, sys\nloaded = {{}}\nfor name, code in {dict(codes)!r}.items():\n    exec(code, {{}})\n"
        f"    new = [m for m in {HEAVY!r} if m in sys.modules and m not in sum(loaded.values(), [])]\n"
        "    loaded |= {name: new} if new else {}\nprint(json.dumps(loaded))"
    )
    environ = clean_environment(PYTHONPATH=str(ROOT / "src"))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    loaded: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return loaded


def run_ranks(
    function: Callable[..., Any], ranks: int, *args: Any, timeout_s: float = 60.0, env: dict[str, str] | None = None
) -> list[Any]:
    """Call ``function(rank, ranks, *args)`` on every rank, inside a gloo group; results by rank.

    ``timeout_s`` counts from when all ranks are there. ``env`` adds to their environment.

    Raises:
        Exception: what the first rank to fail raised, with that rank's traceback as a note.
        TimeoutError: not all ranks ended in time; they are killed, and their output is shown.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        (folder / "call.pkl").write_bytes(cloudpickle.dumps((function, args, timeout_s)))
        processes = [_start(folder, rank, ranks, env or {}) for rank in range(ranks)]
        try:
            _wait(processes, folder, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [_outcome(folder, rank)[1] for rank in range(ranks)]


def _start(folder: Path, rank: int, ranks: int, env: dict[str, str]) -> BaseProcess:
    environ = clean_environment(**env)
    if sys.platform == "linux":
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(IMPORTS)
    (folder / f"rank-{rank}.log").touch()
    process = server.Process(target=_run, args=(folder, rank, ranks, environ))
    process.start()
    return process


def _wait(processes: list[BaseProcess], folder: Path, timeout_s: float) -> None:
    """Until all ranks have ended well; raises as soon as it is clear that they will not."""
    deadline = time.monotonic() + START_S
    started = False
    failed: list[int] = []
    while True:
        if not started and all((folder / f"started-{rank}").exists() for rank in range(len(processes))):
            started, deadline = True, time.monotonic() + timeout_s
        codes = [process.exitcode for process in processes]  # once: a rank may end between two looks
        for rank, code in enumerate(codes):
            if code not in (None, 0) and rank not in failed:
                if not failed:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                failed.append(rank)
        running = [rank for rank, code in enumerate(codes) if code is None]
        if not running or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    if failed:
        _raise(folder, failed)
    if running:
        logs = "\n".join(f"--- rank {rank}\n{_log(folder, rank)}" for rank in range(len(processes)))
        limit = f"end within {timeout_s} s" if started else f"start within {START_S} s"
        raise TimeoutError(f"ranks {running} did not {limit}\n{logs}")


def _raise(folder: Path, failed: list[int]) -> None:
    """Raise the error of the rank that failed first: the others are usually collateral."""
    silent = [rank for rank in failed if not (folder / f"outcome-{rank}.pkl").exists()]
    if silent:
        raise RuntimeError(f"rank {silent[0]} died without an error of its own\n{_log(folder, silent[0])}")
    first = min(failed, key=lambda rank: _outcome(folder, rank)[2])
    error, _, _, text = _outcome(folder, first)
    if error is None:
        raise RuntimeError(f"rank {first} failed after its function had returned\n{_log(folder, first)}")
    error.add_note(f"on rank {first}:\n{text}")
    raise error


def _outcome(folder: Path, rank: int) -> tuple[Exception | None, Any, float, str]:
    """(error, result, time of the end, traceback) of a rank."""
    outcome: tuple[Exception | None, Any, float, str] = pickle.loads((folder / f"outcome-{rank}.pkl").read_bytes())
    return outcome


def _log(folder: Path, rank: int) -> str:
    return (folder / f"rank-{rank}.log").read_text(errors="replace")[-4000:]


def _run(folder: Path, rank: int, ranks: int, environ: dict[str, str]) -> None:
    """The process of a rank."""
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(ROOT)
    with (folder / f"rank-{rank}.log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    exit_code = _main(folder, rank, ranks)
    # Native threads of torch may outlive the group, and abort the process while the interpreter ends.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _main(folder: Path, rank: int, ranks: int) -> int:
    """One rank: join the group, call the function, leave the outcome in a file."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    error, result, text = None, None, ""
    try:
        function, args, timeout_s = pickle.loads((folder / "call.pkl").read_bytes())
        store = distributed.FileStore(str(folder / "store"), ranks)
        distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout_s)
        )
        warnings.simplefilter("error")
        (folder / f"started-{rank}").touch()
        result = function(rank, ranks, *args)
    except Exception as caught:
        error, text = caught, traceback.format_exc()
    outcome = folder / f"outcome-{rank}.pkl"
    try:
        content = cloudpickle.dumps((error, result, time.monotonic(), text))
        pickle.loads(content)
    except Exception as unpicklable:
        error = RuntimeError(f"the outcome of rank {rank} cannot be pickled: {unpicklable}")
        content = cloudpickle.dumps((error, None, time.monotonic(), text))
    outcome.with_suffix(".part").write_bytes(content)
    outcome.with_suffix(".part").replace(outcome)
    if error is not None:
        return 1
    if distributed.is_initialized():
        distributed.barrier()
        distributed.destroy_process_group()
    return 0
