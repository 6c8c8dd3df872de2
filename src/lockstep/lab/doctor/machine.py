"""The machine around the devices: cores, shared memory, limits, the folder of the runs, names and interfaces."""

from __future__ import annotations

import math
import os
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from lockstep.errors import StorageError, gigabytes, many
from lockstep.hardware.detect import usable_cores, visible_cores
from lockstep.hardware.network import GLOO_INTERFACE as GLOO
from lockstep.hardware.network import is_loopback
from lockstep.hardware.resolve import Placement
from lockstep.hardware.world import World
from lockstep.lab.doctor.report import Check, Finding, Status, guarded
from lockstep.planning.loader import automatic_workers
from lockstep.rundir.files import absolute, write_bytes, write_text

SHARED_MEMORY = Path("/dev/shm")
INFINIBAND = Path("/sys/class/infiniband")
#: Bytes. Loader workers pass whole batches through it (Docker's default: 64 MB), NCCL about 10 MB a rank.
LEAST_SHARED, ENOUGH_SHARED = 32_000_000, 1_000_000_000
#: Open files of a rank, and for each loader worker: torch passes each tensor in flight as a descriptor.
FILES_PER_RANK, FILES_PER_WORKER = 256, 128
SLOW_LOOKUP_S = 2.0
#: Slower than this, heartbeats and checkpoints of small models are noticed in the training's speed.
SLOW_FSYNC_S = 0.1
FSYNCS, WRITTEN_BYTES = 5, 16 << 20
LEAST_FREE, ENOUGH_FREE = 100_000_000, 2_000_000_000


def check_machine(placement: Placement, world: World, runs_dir: Path) -> Iterator[Finding]:
    """The findings on this machine; starts no process and leaves no file."""
    ranks = world.local_size if world.from_outside else placement.world_size
    visible, usable, gpus = visible_cores(), usable_cores(), placement.accelerator == "gpu"
    workers = automatic_workers(usable, ranks)
    yield from guarded("cores", lambda: check_cores(visible, usable, ranks, gpus=gpus))
    yield from guarded("shared memory", lambda: check_shared_memory(*shared_memory()))
    yield from guarded("open files", lambda: check_open_files(*limits(resource.RLIMIT_NOFILE), workers))
    yield from guarded("locked memory", lambda: check_locked_memory(limits(resource.RLIMIT_MEMLOCK)[0], adapters()))
    yield from guarded("run folder", lambda: check_run_folder(probe_run_folder(runs_dir)))
    yield from guarded("host name", lambda: check_host_name(gather_network(world)))
    yield from guarded("interface", lambda: check_interface(gather_network(world)))
    yield from guarded("port", lambda: check_port(find_free_port()))


def check_cores(visible: int, usable: int, ranks: int, *, gpus: bool) -> Iterator[Finding]:
    """Whether each rank has a core; ``usable``: those that its control group gives the process time for."""
    why = "each rank needs a core, and each of its loader workers another one; else the devices wait for data"
    check, workers = Check("cores", why), automatic_workers(usable, ranks)
    text = f"{usable} cores for {many(ranks, 'rank')}"
    if usable < visible:
        settings = f"--num-workers {workers} and --set training.threads={max(1, usable // ranks)}"
        fix = f"give the container more cores, or train with {settings}"
        yield check("warn", f"{text}: the container's quota allows {usable} of the {visible} cores that it shows", fix)
    elif usable < ranks:
        yield check("warn", f"{text}: ranks take turns", "choose fewer devices, or get more cores")
    elif gpus and not workers:
        fix = "get more cores, or fewer GPUs; keep the data in memory, so that no worker is needed"
        yield check("warn", f"{text}: none is left for loader workers", fix)
    else:
        yield check("ok", f"{text}, up to {many(workers, 'loader worker')} each")


def shared_memory(path: Path = SHARED_MEMORY) -> tuple[int, int, str]:
    """Bytes in all, free bytes, and why nothing can be written there."""
    try:
        space = shutil.disk_usage(path)
    except OSError as error:
        return 0, 0, error.strerror or str(error)
    return space.total, space.free, "" if os.access(path, os.W_OK | os.X_OK) else "no permission to write"


def check_shared_memory(total: int, free: int, error: str = "") -> Iterator[Finding]:
    check = Check(
        "shared memory",
        "loader workers and NCCL pass data through it; when it is full, they are killed by a bus error",
        "give the container more (docker run --shm-size=8g, or --ipc=host); until then train with --num-workers 0",
    )
    what = f"cannot be used: {error}" if error else f"has {free / 1e6:,.0f} of {total / 1e6:,.0f} MB free"
    yield check("fail" if error else _status(free, LEAST_SHARED, ENOUGH_SHARED), f"{SHARED_MEMORY} {what}")


def _status(free: int, least: int, enough: int) -> Status:
    return "fail" if free < least else "warn" if free < enough else "ok"


def limits(which: int) -> tuple[float, float]:
    """A limit of this process and the highest that it may set (getrlimit(2)); infinite where there is none."""
    soft, hard = (math.inf if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which))
    return soft, hard


def check_open_files(limit: float, most: float, workers: int) -> Iterator[Finding]:
    """``most``: what the user may raise the limit to. ``workers``: loader workers of a rank."""
    why = "a rank with loader workers holds many files open; at the limit it ends with 'Too many open files'"
    check, needed = Check("open files", why), FILES_PER_RANK + FILES_PER_WORKER * max(workers, 1)
    if limit >= needed:
        yield check("ok", "no limit" if limit == math.inf else f"{limit:,} may be open")
    else:
        administrator = "let the administrator raise nofile in /etc/security/limits.conf"
        what = f"only {limit:,} may be open, and a rank with {workers} loader workers may need {needed:,}"
        yield check("warn", what, administrator if most < needed else f"ulimit -n {max(4096, needed)}")


def adapters() -> list[str]:
    """Network adapters that pin memory."""
    return sorted(entry.name for entry in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []


def check_locked_memory(limit: float, adapters: Sequence[str]) -> Iterator[Finding]:
    """``limit``: in bytes."""
    check = Check(
        "locked memory",
        "InfiniBand and RoCE adapters pin the memory that they send from; with a low limit NCCL falls back or fails",
        "ulimit -l unlimited (docker run --ulimit memlock=-1; memlock in /etc/security/limits.conf)",
    )
    text = "no limit" if limit == math.inf else f"{limit / 1e6:,.1f} MB"
    whom = f"for {', '.join(adapters)}" if adapters else "no RDMA adapter here needs more"
    yield check("warn" if adapters and limit < math.inf else "ok", f"{text}, {whom}")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """What was tried in ``path`` (or, where it does not exist yet, in the parent that does).

    ``error``: why it cannot be written; then the rest was not tried. ``fsync_s``: the median for a small file.
    ``bytes_per_s``: of writing 16 MB durably. ``free``: bytes.
    """

    path: Path
    error: str = ""
    atomic: bool = False
    fsync_s: float = 0.0
    bytes_per_s: float = 0.0
    free: int = 0


def probe_run_folder(path: Path) -> RunFolder:
    """Try what a run does, in a hidden folder that is removed again."""
    path = absolute(path)
    try:
        there = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
        with tempfile.TemporaryDirectory(prefix=".lockstep-doctor-", dir=there, ignore_cleanup_errors=True) as name:
            folder = Path(name)
            small = median(_seconds(lambda: write_text(folder / "small", "x" * 1000)) for _ in range(FSYNCS))
            large = os.urandom(WRITTEN_BYTES)
            speed = WRITTEN_BYTES / _seconds(lambda: write_bytes(folder / "large", large))
            return RunFolder(path, "", _replaces_at_once(folder), small, speed, shutil.disk_usage(there).free)
    except StorageError as error:
        return RunFolder(path, error=f"{error.what}: {error.why}")
    except (OSError, ValueError) as error:
        return RunFolder(path, error=getattr(error, "strerror", None) or str(error))


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _replaces_at_once(folder: Path) -> bool:
    """Whether a rename replaces a file under its reader, and moves a folder with its content."""
    target, other = folder / "target", folder / "other"
    target.write_bytes(b"old")
    other.write_bytes(b"new")
    with target.open("rb") as reader:
        other.replace(target)
        kept = reader.read() == b"old"
    building, whole = folder / "building", folder / "whole"
    building.mkdir()
    (building / "file").write_bytes(b"content")
    building.rename(whole)
    moved = not building.exists() and (whole / "file").read_bytes() == b"content"
    return kept and target.read_bytes() == b"new" and not other.exists() and moved


def check_run_folder(folder: RunFolder) -> Iterator[Finding]:
    check = Check("run folder", "all that a run keeps goes there; without it, training ends before it begins")
    if folder.error:
        fix = f"choose another folder with --runs-dir (train: --save-dir), or make {folder.path} writable"
        yield check("fail", f"cannot write in {folder.path}: {folder.error}", fix)
        return
    yield check("ok", f"{folder.path} is writable")
    check = Check(
        "atomic rename",
        "checkpoints are renamed when they are whole; a reader or a crash must see the old one or the new one",
        "keep runs on a local disk or NFS, not on an object store mounted as a folder",
    )
    atomic = "a rename replaces a file and moves a folder at once"
    yield check("ok", atomic) if folder.atomic else check("fail", f"renames in {folder.path} are not atomic")
    check = Check(
        "disk speed",
        "each checkpoint waits until the disk has it",
        "keep runs on a local disk (--save-dir), or save less often (checkpoint.every_steps)",
    )
    what = f"{folder.fsync_s * 1e3:.1f} ms for a small file, {folder.bytes_per_s / 1e6:,.0f} MB/s for a large one"
    yield check("warn" if folder.fsync_s > SLOW_FSYNC_S else "ok", what)
    check = Check(
        "free space",
        "a checkpoint holds the weights and about twice as much for the optimizer, and several are kept",
        "free some space, lower checkpoint.keep_last, or choose another --save-dir",
    )
    yield check(_status(folder.free, LEAST_FREE, ENOUGH_FREE), f"{gigabytes(folder.free):g} GB")


@dataclass(frozen=True, slots=True)
class Network:
    """This host as others would find it.

    Attributes:
        addresses: what the host's name resolves to, in ``lookup_s`` seconds; ``error``: why it does not.
        interfaces: addresses of each interface that is up.
        chosen: the value of the variable that chooses an interface for gloo, if it is set.
        nodes: machines that take part.
        outside: whether torchrun or srun started the ranks; else Lockstep does, on this machine alone.
    """

    host: str
    addresses: tuple[str, ...] = ()
    lookup_s: float = 0.0
    error: str = ""
    interfaces: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    chosen: str = ""
    nodes: int = 1
    outside: bool = False

    @property
    def of_host(self) -> str | None:
        """The interface that has an address of the host's name."""
        named = (name for name, own in self.interfaces.items() if set(own) & set(self.addresses))
        return next(named, None)


def gather_network(world: World) -> Network:
    host, started = socket.gethostname(), time.perf_counter()
    addresses: tuple[str, ...] = ()
    error = ""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        addresses = tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
    except OSError as failure:
        error = failure.strerror or str(failure)
    lookup_s, states = time.perf_counter() - started, psutil.net_if_stats()
    interfaces = {
        name: tuple(entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6))
        for name, entries in psutil.net_if_addrs().items()
        if name in states and states[name].isup
    }
    return Network(
        host, addresses, lookup_s, error, interfaces, os.environ.get(GLOO, ""), world.nodes, world.from_outside
    )


def check_host_name(network: Network) -> Iterator[Finding]:
    why = "ranks find each other by name; one that does not resolve delays the start, or stops it on several nodes"
    check, host, addresses = Check("host name", why), network.host, ", ".join(network.addresses)
    line = f"add a line with this machine's address and {host} to /etc/hosts, on every node (or fix the DNS)"
    if network.error:
        yield check("warn", f"{host} does not resolve: {network.error}", line)
    elif network.of_host is None and not any(map(is_loopback, network.addresses)):
        yield check("warn", f"{host} resolves to {addresses}, which is not an address of this machine", line)
    elif network.lookup_s > SLOW_LOOKUP_S:
        what = f"{host} resolves to {addresses}, but that took {network.lookup_s:.1f} s"
        yield check("warn", what, f"add {host} to /etc/hosts, or fix the DNS")
    else:
        yield check("ok", f"{host} resolves to {addresses}")


def check_interface(network: Network) -> Iterator[Finding]:
    why = "gloo and NCCL talk over one network interface; a wrong one is slow, or others cannot reach it"
    check, up = Check("interface", why), ", ".join(network.interfaces) or "none"
    if network.chosen and not set(network.chosen.split(",")) <= network.interfaces.keys():
        fix = f"unset it, or name one that is up: {up}"
        yield check("fail", f"{GLOO}={network.chosen} names no interface that is up", fix)
    elif network.chosen:
        yield check("ok", f"{GLOO}={network.chosen}")
    elif not network.outside:
        name = "lo" if "lo" in network.interfaces else network.of_host or up
        yield check("ok", f"ranks of this machine talk over {name}; up: {up}")
    elif network.nodes > 1 and (network.of_host is None or all(map(is_loopback, network.addresses))):
        variables = f"{GLOO}=NAME NCCL_SOCKET_IFNAME=NAME"
        fix = f"on each node: export {variables}, the interface that reaches the other nodes ({up})"
        addresses = ", ".join(network.addresses) or "nothing"
        yield check("warn", f"{network.host} resolves to {addresses}, which the other nodes cannot reach", fix)
    else:
        yield check("ok", f"gloo takes {network.of_host or 'the loopback address'}, where {network.host} is; up: {up}")


def find_free_port() -> str:
    """Bind a port that the system chooses, listen and connect to it; empty, or what went wrong."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5.0).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def check_port(error: str) -> Iterator[Finding]:
    check = Check(
        "port",
        "ranks meet at a port of this machine, which the system chooses",
        "look for a firewall or sandbox that forbids connections to 127.0.0.1, and for used-up ports (ss -s)",
    )
    yield check("fail", f"no connection to a free port: {error}") if error else check("ok", "a free port was reached")
