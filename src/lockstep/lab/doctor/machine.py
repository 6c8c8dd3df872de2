"""Checks of the host: cores, shared memory, limits, run folder, host name and network interfaces."""

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
MIN_SHARED_BYTES = 32_000_000
ENOUGH_SHARED_BYTES = 1_000_000_000
#: Open files of a rank.
FILES_PER_RANK = 256
#: Open files for each loader worker: torch passes each tensor in flight as a descriptor.
FILES_PER_WORKER = 128
SLOW_LOOKUP_S = 2.0
#: Above this time, heartbeats and checkpoints slow down the training of small models.
SLOW_FSYNC_S = 0.1
FSYNC_REPEATS = 5
LARGE_FILE_BYTES = 16 << 20
MIN_FREE_BYTES = 100_000_000
ENOUGH_FREE_BYTES = 2_000_000_000


def check_machine(placement: Placement, world: World, runs_dir: Path) -> Iterator[Finding]:
    """Yield the findings on this machine; starts no process and leaves no file."""
    ranks = world.local_size if world.from_outside else placement.world_size
    visible = visible_cores()
    usable = usable_cores()
    workers = automatic_workers(usable, ranks)
    yield from guarded("cores", lambda: check_cores(visible, usable, ranks, gpus=placement.accelerator == "gpu"))
    yield from guarded("shared memory", lambda: check_shared_memory(*shared_memory()))
    yield from guarded("open files", lambda: check_open_files(*limits(resource.RLIMIT_NOFILE), workers))
    yield from guarded("locked memory", lambda: check_locked_memory(limits(resource.RLIMIT_MEMLOCK)[0], adapters()))
    yield from guarded("run folder", lambda: check_run_folder(probe_run_folder(runs_dir)))
    yield from guarded("host name", lambda: check_host_name(gather_network(world)))
    yield from guarded("interface", lambda: check_interface(gather_network(world)))
    yield from guarded("port", lambda: check_port(find_free_port()))


def check_cores(visible: int, usable: int, ranks: int, *, gpus: bool) -> Iterator[Finding]:
    """Check that each rank has a core.

    Args:
        visible: cores on which this process may run.
        usable: cores after the quota of its control group.
    """
    check = Check("cores", "each rank and each of its loader workers needs a core; else the devices wait for data")
    workers = automatic_workers(usable, ranks)
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
    """Return total bytes, free bytes, and an error if ``path`` is not writable, else an empty text."""
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
    if error:
        yield check("fail", f"{SHARED_MEMORY} cannot be used: {error}")
    else:
        status = _status(free, minimum=MIN_SHARED_BYTES, enough=ENOUGH_SHARED_BYTES)
        yield check(status, f"{SHARED_MEMORY} has {free / 1e6:,.0f} of {total / 1e6:,.0f} MB free")


def _status(free: int, *, minimum: int, enough: int) -> Status:
    return "fail" if free < minimum else "warn" if free < enough else "ok"


def limits(which: int) -> tuple[float, float]:
    """Return the soft and hard limit of this process (getrlimit(2)); infinite if there is none."""
    soft, hard = (math.inf if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which))
    return soft, hard


def check_open_files(soft_limit: float, hard_limit: float, workers: int) -> Iterator[Finding]:
    """Check the limit of open files; ``workers``: loader workers of a rank."""
    check = Check(
        "open files",
        "a rank with loader workers holds many files open; at the limit it ends with 'Too many open files'",
    )
    needed = FILES_PER_RANK + FILES_PER_WORKER * max(workers, 1)
    if soft_limit >= needed:
        yield check("ok", "no limit" if soft_limit == math.inf else f"{soft_limit:,} may be open")
    else:
        fix = f"ulimit -n {max(4096, needed)}"
        if hard_limit < needed:
            fix = "let the administrator raise nofile in /etc/security/limits.conf"
        text = f"only {soft_limit:,} may be open, and a rank with {workers} loader workers may need {needed:,}"
        yield check("warn", text, fix)


def adapters() -> list[str]:
    """List network adapters that pin memory."""
    return sorted(entry.name for entry in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []


def check_locked_memory(limit: float, adapters: Sequence[str]) -> Iterator[Finding]:
    """Check the limit of locked memory, in bytes."""
    check = Check(
        "locked memory",
        "InfiniBand and RoCE adapters pin the memory that they send from; with a low limit NCCL falls back or fails",
        "ulimit -l unlimited (docker run --ulimit memlock=-1; memlock in /etc/security/limits.conf)",
    )
    limit_text = "no limit" if limit == math.inf else f"{limit / 1e6:,.1f} MB"
    adapters_text = f"for {', '.join(adapters)}" if adapters else "no RDMA adapter here needs more"
    yield check("warn" if adapters and limit < math.inf else "ok", f"{limit_text}, {adapters_text}")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Measurements of writing in ``path``, or in its nearest parent that exists.

    Attributes:
        error: the reason if it is not writable; then nothing else was measured.
        atomic: renames replace files and move folders at once.
        fsync_s: median time to write a small file durably.
        bytes_per_s: speed of writing 16 MB durably.
        free: free bytes.
    """

    path: Path
    error: str = ""
    atomic: bool = False
    fsync_s: float = 0.0
    bytes_per_s: float = 0.0
    free: int = 0


def probe_run_folder(path: Path) -> RunFolder:
    """Write and rename files as a run does, in a hidden folder that is removed again."""
    path = absolute(path)
    try:
        parent = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
        with tempfile.TemporaryDirectory(prefix=".lockstep-doctor-", dir=parent, ignore_cleanup_errors=True) as name:
            folder = Path(name)
            fsync_s = median(_seconds(lambda: write_text(folder / "small", "x" * 1000)) for _ in range(FSYNC_REPEATS))
            content = os.urandom(LARGE_FILE_BYTES)
            large_s = _seconds(lambda: write_bytes(folder / "large", content))
            return RunFolder(
                path,
                atomic=_has_atomic_renames(folder),
                fsync_s=fsync_s,
                bytes_per_s=LARGE_FILE_BYTES / large_s,
                free=shutil.disk_usage(parent).free,
            )
    except StorageError as error:
        return RunFolder(path, error=f"{error.what}: {error.why}")
    except (OSError, ValueError) as error:
        return RunFolder(path, error=getattr(error, "strerror", None) or str(error))


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _has_atomic_renames(folder: Path) -> bool:
    """Check that a rename replaces a file while it is read, and moves a folder with its content."""
    target = folder / "target"
    replacement = folder / "replacement"
    target.write_bytes(b"old")
    replacement.write_bytes(b"new")
    with target.open("rb") as reader:
        replacement.replace(target)
        reader_sees_old = reader.read() == b"old"
    is_replaced = target.read_bytes() == b"new" and not replacement.exists()
    source_folder = folder / "source"
    target_folder = folder / "moved"
    source_folder.mkdir()
    (source_folder / "file").write_bytes(b"content")
    source_folder.rename(target_folder)
    is_moved = not source_folder.exists() and (target_folder / "file").read_bytes() == b"content"
    return reader_sees_old and is_replaced and is_moved


def check_run_folder(folder: RunFolder) -> Iterator[Finding]:
    check = Check("run folder", "a run writes all its files there; without it, training does not begin")
    if folder.error:
        fix = f"choose another folder with --runs-dir (train: --save-dir), or make {folder.path} writable"
        yield check("fail", f"cannot write in {folder.path}: {folder.error}", fix)
        return
    yield check("ok", f"{folder.path} is writable")
    check = Check(
        "atomic rename",
        "checkpoints are renamed when they are complete; a reader or a crash must see the old one or the new one",
        "keep runs on a local disk or NFS, not on an object store mounted as a folder",
    )
    if folder.atomic:
        yield check("ok", "a rename replaces a file and moves a folder at once")
    else:
        yield check("fail", f"renames in {folder.path} are not atomic")
    check = Check(
        "disk speed",
        "each checkpoint waits until the disk has it",
        "keep runs on a local disk (--save-dir), or save less often (checkpoint.every_steps)",
    )
    speed = f"{folder.fsync_s * 1e3:.1f} ms for a small file, {folder.bytes_per_s / 1e6:,.0f} MB/s for a large one"
    yield check("warn" if folder.fsync_s > SLOW_FSYNC_S else "ok", speed)
    check = Check(
        "free space",
        "a checkpoint holds the weights and about twice as much for the optimizer, and several are kept",
        "free some space, lower checkpoint.keep_last, or choose another --save-dir",
    )
    status = _status(folder.free, minimum=MIN_FREE_BYTES, enough=ENOUGH_FREE_BYTES)
    yield check(status, f"{gigabytes(folder.free):g} GB")


@dataclass(frozen=True, slots=True)
class Network:
    """Names, addresses and interfaces of this host.

    Attributes:
        addresses: addresses of the host's name.
        lookup_s: seconds of resolving the name.
        error: the reason if the name does not resolve.
        interfaces: addresses of each interface that is up.
        chosen: value of the variable that chooses an interface for gloo; empty if it is not set.
        nodes: machines that take part.
        outside: torchrun or srun started the ranks; else Lockstep starts them, on this machine alone.
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
        """Name of the interface that has an address of the host's name."""
        names = (name for name, addresses in self.interfaces.items() if set(addresses) & set(self.addresses))
        return next(names, None)


def gather_network(world: World) -> Network:
    """Resolve the host's name and list the interfaces that are up."""
    host = socket.gethostname()
    started = time.perf_counter()
    addresses: tuple[str, ...] = ()
    error = ""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        addresses = tuple(dict.fromkeys(str(entry[4][0]) for entry in entries))
    except OSError as failure:
        error = failure.strerror or str(failure)
    lookup_s = time.perf_counter() - started
    states = psutil.net_if_stats()
    interfaces = {
        name: tuple(address.address for address in items if address.family in (socket.AF_INET, socket.AF_INET6))
        for name, items in psutil.net_if_addrs().items()
        if name in states and states[name].isup
    }
    return Network(
        host,
        addresses=addresses,
        lookup_s=lookup_s,
        error=error,
        interfaces=interfaces,
        chosen=os.environ.get(GLOO, ""),
        nodes=world.nodes,
        outside=world.from_outside,
    )


def check_host_name(network: Network) -> Iterator[Finding]:
    check = Check(
        "host name",
        "ranks find each other by name; a name that does not resolve delays the start, or stops it on several nodes",
    )
    host = network.host
    addresses = ", ".join(network.addresses)
    fix = f"add a line with this machine's address and {host} to /etc/hosts, on every node (or fix the DNS)"
    if network.error:
        yield check("warn", f"{host} does not resolve: {network.error}", fix)
    elif network.of_host is None and not any(map(is_loopback, network.addresses)):
        yield check("warn", f"{host} resolves to {addresses}, which is not an address of this machine", fix)
    elif network.lookup_s > SLOW_LOOKUP_S:
        text = f"{host} resolves to {addresses}, but that took {network.lookup_s:.1f} s"
        yield check("warn", text, f"add {host} to /etc/hosts, or fix the DNS")
    else:
        yield check("ok", f"{host} resolves to {addresses}")


def check_interface(network: Network) -> Iterator[Finding]:
    check = Check(
        "interface", "gloo and NCCL use one network interface; a wrong one is slow, or other nodes cannot reach it"
    )
    up = ", ".join(network.interfaces) or "none"
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
        interface = network.of_host or "the loopback address"
        yield check("ok", f"gloo uses {interface}, the interface of {network.host}; up: {up}")


def find_free_port() -> str:
    """Bind a port that the system chooses, listen and connect to it; return the error, or an empty text."""
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
