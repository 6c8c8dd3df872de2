"""A real SLURM on this machine: munge, a controller and the daemons of two nodes, without systemd."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "runuser")
SBIN = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
READY_S = 60

#: What makes it work as root in a container: no control groups, no accounting, no systemd.
CONF = """\
ClusterName=lockstep
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=10
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs=2 State=UNKNOWN
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


@contextlib.contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """Yields the variables that SLURM's commands and jobs need. Skips the test where SLURM cannot run."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=SBIN) is None]
    if missing or os.geteuid() != 0:
        message = f"needs SLURM and root (apt-get install slurm-wlm munge); missing: {', '.join(missing) or 'root'}"
        assert not os.environ.get("CI"), message
        pytest.skip(message)
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # a socket's path must be short
    folder.chmod(0o755)
    environ = {"PATH": SBIN, "SLURM_CONF": str(folder / "slurm.conf")}
    try:
        _start(folder, environ)
        # The two nodes are names only: no address belongs to them.
        yield {"SLURM_CONF": environ["SLURM_CONF"], "MASTER_ADDR": "127.0.0.1"}
    finally:
        _end(folder, environ)
        shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path, environ: dict[str, str]) -> None:
    (folder / "state").mkdir()
    (folder / "munge").mkdir(mode=0o755)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    for path in (key, folder / "munge"):
        shutil.chown(path, "munge", "munge")
    (folder / "slurm.conf").write_text(CONF.format(host=socket.gethostname(), ports=_ports(), folder=folder))
    munge = folder / "munge"
    _run(
        *("runuser", "-u", "munge", "--", "munged", f"--key-file={key}", f"--socket={munge}/socket"),
        *(f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed"),
        environ=environ,
    )
    _run("slurmctld", "-c", environ=environ)
    for node in ("n1", "n2"):
        _run("slurmd", "-N", node, environ=environ)
    deadline = time.monotonic() + READY_S
    while _run("sinfo", "--noheader", "--format=%D %T", environ=environ, check=False) != "2 idle":
        assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()[-2000:]
        time.sleep(0.2)


def _ports() -> tuple[int, int, int]:
    """A free port for the controller, and two neighbours for the nodes."""
    while True:
        with contextlib.ExitStack() as held, contextlib.suppress(OSError, OverflowError):
            first, second, third = (held.enter_context(socket.socket()) for _ in range(3))
            for probe in (first, second):
                probe.bind(("127.0.0.1", 0))
            port = second.getsockname()[1]
            third.bind(("127.0.0.1", port + 1))
            return first.getsockname()[1], port, port + 1


def _end(folder: Path, environ: dict[str, str]) -> None:
    for name in ("slurmctld.pid", "slurmd-n1.pid", "slurmd-n2.pid", "munge/pid"):
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((folder / name).read_text()), signal.SIGKILL)  # what they would save is removed


def _run(*command: str, environ: dict[str, str], check: bool = True) -> str:
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=READY_S)
    assert not check or result.returncode == 0, (command, result.stderr)
    return result.stdout.strip()
