"""Network addresses and interfaces by which other machines can reach this one."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import MutableMapping
from itertools import chain

import psutil

#: Gloo listens on the address of this interface.
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
#: An address for documentation (RFC 5737), which no host has: its route is the default route.
_REMOTE_ADDRESS = "192.0.2.1"


def address_towards(host: str) -> str | None:
    """Return this machine's address for connections from ``host`` and its neighbours; ``None`` if there is none.

    If ``host`` resolves to a loopback address of this machine, return the address of the default route.
    """
    source = _source(host)
    if source is not None and is_loopback(source):
        entries = chain.from_iterable(psutil.net_if_addrs().values())
        addresses = (entry.address for entry in entries if entry.family == socket.AF_INET)
        return _source(_REMOTE_ADDRESS) or next((item for item in addresses if not is_loopback(item)), source)
    return source


def _source(host: str) -> str | None:
    """Return the address from which this machine would send to ``host``.

    A datagram socket that is connected sends nothing, but the kernel has chosen the route (``man 7 ip``).
    """
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, target in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0]).partition("%")[0]
    return None


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_of(address: str) -> str | None:
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return None


def is_this_machine(host: str) -> bool:
    """Check whether ``host`` (a name or an address) is this machine. Raises ``OSError`` if it has no address."""
    addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    return any(is_loopback(address) or interface_of(address) for address in addresses)


def choose_interface(environ: MutableMapping[str, str], towards: str) -> None:
    """Let gloo use the interface on the route to ``towards``, unless the user has set one.

    By default gloo uses the address of the host's name, which many systems map to 127.0.1.1: not reachable by others.
    """
    address = None if GLOO_INTERFACE in environ else address_towards(towards)
    if address is not None and (interface := interface_of(address)) is not None:
        environ[GLOO_INTERFACE] = interface
