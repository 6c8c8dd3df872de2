"""Which of this machine's network addresses and interfaces other machines can reach it by."""

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
_ELSEWHERE = "192.0.2.1"


def address_towards(host: str) -> str | None:
    """This machine's address under which ``host``, and others beside it, can reach it; ``None`` if there is none.

    Where ``host`` is this machine and its name means a loopback address, that is the address of the way out.
    """
    address = _source(host)
    if address is not None and is_loopback(address):
        entries = chain.from_iterable(psutil.net_if_addrs().values())
        own = (entry.address for entry in entries if entry.family == socket.AF_INET)
        address = _source(_ELSEWHERE) or next((one for one in own if not is_loopback(one)), address)
    return address


def _source(host: str) -> str | None:
    """The address from which this machine would send to ``host``.

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
    """Whether ``host`` (a name or an address) means an address of this machine. Raises ``OSError`` for no address."""
    found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    return any(is_loopback(address) or interface_of(address) for address in found)


def choose_interface(environ: MutableMapping[str, str], towards: str) -> None:
    """Let gloo use the interface on the route to ``towards``, unless the user has named one.

    Left alone it takes the address of the host's name, which many systems map to 127.0.1.1: out of others' reach.
    """
    address = None if GLOO_INTERFACE in environ else address_towards(towards)
    if address is not None and (interface := interface_of(address)) is not None:
        environ[GLOO_INTERFACE] = interface
