"""How ranks find each other: this host's name, the network interface, a free port, the clock."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from lockstep.doctor.finding import Finding
from lockstep.hardware.network import GLOO_INTERFACE as GLOO
from lockstep.hardware.network import is_loopback
from lockstep.hardware.world import World

NCCL = "NCCL_SOCKET_IFNAME"
SLOW_LOOKUP_S = 2.0


@dataclass(frozen=True, slots=True)
class Network:
    """This host as others would find it.

    Attributes:
        host: its name.
        addresses: what the name resolves to.
        lookup_s: how long that took, seconds.
        error: why it does not resolve.
        interfaces: addresses of each interface that is up.
        chosen: the variables that choose an interface for gloo and NCCL, where they are set.
        nodes: machines that take part.
        outside: whether torchrun or srun started the ranks; else Lockstep does, on this machine alone.
    """

    host: str
    addresses: tuple[str, ...] = ()
    lookup_s: float = 0.0
    error: str = ""
    interfaces: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    chosen: Mapping[str, str] = field(default_factory=dict)
    nodes: int = 1
    outside: bool = False

    @property
    def of_host(self) -> str | None:
        """The interface that has an address of the host's name."""
        named = (name for name, own in self.interfaces.items() if set(own) & set(self.addresses))
        return next(named, None)


def gather_network(environ: Mapping[str, str], world: World, *, nccl: bool) -> Network:
    """Args: nccl: whether ranks talk over NCCL, too."""
    import psutil

    host, started = socket.gethostname(), time.perf_counter()
    addresses: tuple[str, ...] = ()
    error = ""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        addresses = tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
    except OSError as failure:
        error = failure.strerror or str(failure)
    states = psutil.net_if_stats()
    return Network(
        host=host,
        addresses=addresses,
        lookup_s=time.perf_counter() - started,
        error=error,
        interfaces={
            name: tuple(entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6))
            for name, entries in psutil.net_if_addrs().items()
            if name in states and states[name].isup
        },
        chosen={name: environ[name] for name in ((GLOO, NCCL) if nccl else (GLOO,)) if environ.get(name)},
        nodes=world.nodes,
        outside=world.from_outside,
    )


def check_host_name(network: Network) -> Iterator[Finding]:
    why = "ranks find each other by name; one that does not resolve delays the start, or stops it on several nodes"
    addresses = ", ".join(network.addresses)
    local = network.of_host is not None or any(is_loopback(address) for address in network.addresses)
    wrong = ""
    if network.error:
        wrong = f"{network.host} does not resolve: {network.error}"
    elif not local:
        wrong = f"{network.host} resolves to {addresses}, which is not an address of this machine"
    if wrong:
        fix = f"add a line with this machine's address and {network.host} to /etc/hosts, on every node (or fix the DNS)"
        yield Finding("host name", "warn", wrong, why, fix)
    elif network.lookup_s > SLOW_LOOKUP_S:
        what = f"{network.host} resolves to {addresses}, but that took {network.lookup_s:.1f} s"
        yield Finding("host name", "warn", what, why, f"add {network.host} to /etc/hosts, or fix the DNS")
    else:
        yield Finding("host name", "ok", f"{network.host} resolves to {addresses}", why)


def check_interface(network: Network) -> Iterator[Finding]:
    why = "gloo and NCCL talk over one network interface; a wrong one is slow, or others cannot reach it"
    up = ", ".join(network.interfaces) or "none"
    absent = [f"{name}={value}" for name, value in network.chosen.items() if not _matches(name, value, network)]
    if absent:
        fix = f"unset it, or name one that is up: {up}"
        yield Finding("interface", "fail", f"{', '.join(absent)} names no interface that is up", why, fix)
    elif GLOO in network.chosen:
        yield Finding("interface", "ok", ", ".join(f"{key}={value}" for key, value in network.chosen.items()), why)
    elif not network.outside:
        name = "lo" if "lo" in network.interfaces else network.of_host or up
        yield Finding("interface", "ok", f"ranks of this machine talk over {name}; up: {up}", why)
    elif network.nodes > 1 and (network.of_host is None or all(map(is_loopback, network.addresses))):
        fix = f"on each node: export {GLOO}=NAME {NCCL}=NAME, the interface that reaches the other nodes ({up})"
        addresses = ", ".join(network.addresses) or "nothing"
        what = f"{network.host} resolves to {addresses}, which the other nodes cannot reach"
        yield Finding("interface", "warn", what, why, fix)
    else:
        name = network.of_host or "the loopback address"
        yield Finding("interface", "ok", f"gloo takes {name}, where {network.host} is; up: {up}", why)


def find_free_port() -> str:
    """Bind a port that the system chooses, listen and connect to it; empty, or what went wrong."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5.0):
                return ""
    except OSError as error:
        return error.strerror or str(error)


def check_port(error: str) -> Iterator[Finding]:
    why = "ranks meet at a port of this machine, which the system chooses"
    if error:
        fix = "look for a firewall or sandbox that forbids connections to 127.0.0.1, and for used-up ports (ss -s)"
        yield Finding("port", "fail", f"no connection to a free port: {error}", why, fix)
    else:
        yield Finding("port", "ok", "a free port could be bound and reached", why)


def read_clock(samples: int = 1000) -> list[float]:
    """``samples`` readings of the monotonic clock and one after a pause, seconds."""
    readings = [time.monotonic() for _ in range(samples)]
    time.sleep(0.002)
    return [*readings, time.monotonic()]


def check_clock(readings: list[float]) -> Iterator[Finding]:
    why = "heartbeats, time limits and throughput are measured with the monotonic clock"
    falls = sum(later < earlier for earlier, later in pairwise(readings))
    if falls or readings[-1] <= readings[0]:
        what = f"the monotonic clock went back {falls} times" if falls else "the monotonic clock does not move"
        yield Finding("clock", "fail", what, why, "choose another clock source (virtual machines: kvm-clock or tsc)")
    else:
        yield Finding("clock", "ok", "the monotonic clock only moves forward", why)


def _matches(variable: str, value: str, network: Network) -> bool:
    """Whether some interface that is up fits the variable.

    gloo takes names; NCCL prefixes, exact names after ``=``, and exclusions after ``^``
    (NCCL user guide, "Environment Variables").
    """
    if variable == GLOO:
        return all(name in network.interfaces for name in value.split(","))
    exclude, exact = value.startswith("^"), value.lstrip("^").startswith("=")
    names = value.lstrip("^=").split(",")
    hits = [up for up in network.interfaces if any(up == name if exact else up.startswith(name) for name in names)]
    return len(hits) < len(network.interfaces) if exclude else bool(hits)
