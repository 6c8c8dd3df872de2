"""The environment variables of the launcher and the ranks."""

from __future__ import annotations

import json
import os
import socket
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from threadpoolctl import threadpool_limits

from lockstep.hardware.network import GLOO_INTERFACE
from lockstep.hardware.world import SEVERAL_NODES
from lockstep.launch.local.process_start import set_defaults

#: Set in ranks that Lockstep's launcher started (see :mod:`lockstep.hardware.world`).
LAUNCHER = "LOCKSTEP_LAUNCHER"
#: The launcher's process number, for its ranks.
LAUNCHER_PID = "LOCKSTEP_LAUNCHER_PID"
#: Marks every descendant of one launch.
LAUNCH_ID = "LOCKSTEP_LAUNCH_ID"
#: One start of several nodes, restarts included (see :mod:`lockstep.launch.nodes.run_owner`).
JOB = "LOCKSTEP_JOB"
#: The caller's ``sys.path``, as JSON: a folder's name may have a colon.
SYS_PATH = "LOCKSTEP_SYS_PATH"
#: Intra-op threads of each rank.
THREADS = "LOCKSTEP_THREADS"

#: What an outer launcher set for the caller does not apply to the caller's ranks.
_OTHER_LAUNCHERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
)


def for_launcher(
    base: Mapping[str, str], launch_id: str, caller_path: list[str], *, several: bool = False
) -> dict[str, str]:
    """The environment of a launcher and, through it, of its ranks.

    Args:
        base: the caller's environment.
        launch_id: a mark that no other launch has.
        caller_path: the caller's ``sys.path``: ranks import what the caller can import.
        several: whether its ranks are some of those of several nodes.
    """
    environ = {
        key: value
        for key, value in base.items()
        if key not in (*_OTHER_LAUNCHERS, LAUNCHER_PID, JOB) and not key.startswith("TORCHELASTIC_")
    }
    path = [os.path.abspath(entry or os.curdir) for entry in caller_path if isinstance(entry, str)]
    environ |= {LAUNCHER: SEVERAL_NODES if several else "1", LAUNCH_ID: launch_id, SYS_PATH: json.dumps(path)}
    # Python's own folders must keep their place in the order, so PYTHONPATH gets what was before them; it has no form
    # for a folder with a colon, of which ranks learn from SYS_PATH.
    first = [entry for entry in _before_standard_library(path) if os.pathsep not in entry]
    first += filter(None, base.get("PYTHONPATH", "").split(os.pathsep))
    environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(first))
    # Each rank with a thread for every core would be slower than one thread each.
    environ["OMP_NUM_THREADS"] = base.get(THREADS) or base.get("OMP_NUM_THREADS") or "1"
    set_defaults(environ)
    if not several and "lo" in (name for _, name in socket.if_nameindex()):
        # All ranks are here: gloo need not find out under which address others would see this machine.
        environ.setdefault(GLOO_INTERFACE, "lo")
    return environ


def _before_standard_library(path: list[str]) -> list[str]:
    standard = {os.path.abspath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    archive = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    before = []
    for entry in path:
        if entry in standard or Path(entry).name == archive:
            break
        before.append(entry)
    return before


def restore_sys_path(environ: Mapping[str, str]) -> None:
    """Give ``sys.path`` the caller's entries in the caller's order; others come last."""
    sys.path[:] = dict.fromkeys([*json.loads(environ.get(SYS_PATH, "[]")), *sys.path])


def set_threads(environ: Mapping[str, str]) -> None:
    """Let libraries use OMP_NUM_THREADS threads, which they read when imported: in a fork, that was before."""
    torch, threads = sys.modules.get("torch"), environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if torch is not None and threads.isdecimal() and int(threads):
        torch.set_num_threads(int(threads))
        threadpool_limits(int(threads))
