"""Environment variables of commands, launchers and ranks. Importing this module imports next to nothing."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, MutableMapping
from itertools import takewhile
from pathlib import Path

#: Set in ranks that Lockstep's launcher started (see :mod:`lockstep.hardware.world`).
LAUNCHER = "LOCKSTEP_LAUNCHER"
#: The launcher's process number, for its ranks.
LAUNCHER_PID = "LOCKSTEP_LAUNCHER_PID"
#: Marks every descendant of one launch.
LAUNCH_ID = "LOCKSTEP_LAUNCH_ID"
#: The caller's ``sys.path``, as JSON: a folder's name may have a colon.
SYS_PATH = "LOCKSTEP_SYS_PATH"
#: The caller's ``OMP_NUM_THREADS``, for ranks that make the plan themselves.
NAMED_THREADS = "LOCKSTEP_OMP_NUM_THREADS"


def set_defaults(environ: MutableMapping[str, str]) -> None:
    """Set what counts when a process starts or imports torch, and the user has not set."""
    # Threads that spin while they wait for each other slow a step 10 to 100 times where other programs use the cores.
    environ.setdefault("OMP_WAIT_POLICY", "passive")
    # The order of a set of strings is the same on all ranks then, and in every attempt: a vocabulary, for example.
    environ.setdefault("PYTHONHASHSEED", "0")
    if "TORCH_DISTRIBUTED_DEBUG" not in environ:
        # Every rank's native code logs the loss of the one that failed; only that one matters.
        environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def for_launcher(
    base: Mapping[str, str], launch_id: str, caller_path: list[str], threads: int | None = None
) -> dict[str, str]:
    """Return the environment of a launcher and, through it, of its ranks.

    ``base``, ``caller_path``: environment and ``sys.path`` of the caller, so that ranks can import its modules.
    ``threads``: intra-op threads of each rank; ``None``: OMP_NUM_THREADS, or 1.
    """
    import socket

    from lockstep.hardware.network import GLOO_INTERFACE
    from lockstep.hardware.world import RANK_VARIABLES

    # Variables that an outer launcher set for the caller do not apply to the caller's ranks.
    outer = {*RANK_VARIABLES, LAUNCHER_PID, *(key for key in base if key.startswith("TORCHELASTIC_"))}
    environ = {key: value for key, value in base.items() if key not in outer}
    path = [os.path.abspath(entry or os.curdir) for entry in caller_path if isinstance(entry, str)]
    environ |= {LAUNCHER: "1", LAUNCH_ID: launch_id, SYS_PATH: json.dumps(path)}
    # PYTHONPATH stands before the folders of Python, so it gets the entries before them; it has no form for a folder
    # with a colon, which ranks read from SYS_PATH.
    first = [entry for entry in takewhile(str(Path(os.__file__).parent).__ne__, path) if os.pathsep not in entry]
    first += filter(None, base.get("PYTHONPATH", "").split(os.pathsep))
    environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(first))
    # Each rank with a thread for every core would be slower than one thread each.
    environ[NAMED_THREADS] = base.get("OMP_NUM_THREADS", "")
    environ["OMP_NUM_THREADS"] = str(threads or base.get("OMP_NUM_THREADS") or 1)
    set_defaults(environ)
    if "lo" in (name for _, name in socket.if_nameindex()):
        # All ranks are here: gloo need not find out under which address others would see this machine.
        environ.setdefault(GLOO_INTERFACE, "lo")
    return environ


def restore_sys_path(environ: Mapping[str, str]) -> None:
    """Give ``sys.path`` the caller's entries in the caller's order; others come last."""
    sys.path[:] = dict.fromkeys([*json.loads(environ.get(SYS_PATH, "[]")), *sys.path])


def set_threads(environ: Mapping[str, str]) -> None:
    """Let libraries use OMP_NUM_THREADS threads, which they read when imported: in a fork, that was before."""
    torch = sys.modules.get("torch")
    threads = environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if torch is not None and threads.isdecimal() and int(threads):
        from threadpoolctl import threadpool_limits

        torch.set_num_threads(int(threads))
        threadpool_limits(int(threads))
