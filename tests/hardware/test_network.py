"""Addresses and interfaces of this machine, on the network that it really has."""

from __future__ import annotations

import socket

import psutil
import pytest

from lockstep.hardware.network import GLOO_INTERFACE, address_towards, choose_interface, interface_of, is_this_machine

OWN = [
    (name, entry.address)
    for name, entries in psutil.net_if_addrs().items()
    for entry in entries
    if entry.family == socket.AF_INET
]


@pytest.mark.parametrize(("name", "address"), OWN)
def test_own_addresses(name: str, address: str) -> None:
    assert interface_of(address) == name
    assert is_this_machine(address)


@pytest.mark.parametrize("host", ["localhost", "127.0.1.1", socket.gethostname()])
def test_own_names(host: str) -> None:
    assert is_this_machine(host)


def test_somebody_else() -> None:
    assert interface_of("192.0.2.1") is None
    assert not is_this_machine("192.0.2.1")
    with pytest.raises(OSError):
        is_this_machine("no-such-host.invalid")
    assert address_towards("no-such-host.invalid") is None


def test_a_loopback_name_leads_to_an_address_that_others_can_reach() -> None:
    outside = [address for name, address in OWN if not address.startswith("127.")]
    assert address_towards("localhost") in (outside or ["127.0.0.1"])


def test_what_the_user_named_stays() -> None:
    environ = {GLOO_INTERFACE: "mine"}
    choose_interface(environ, "localhost")
    assert environ == {GLOO_INTERFACE: "mine"}


def test_the_interface_is_that_of_the_address() -> None:
    environ: dict[str, str] = {}
    choose_interface(environ, "localhost")
    assert environ[GLOO_INTERFACE] == interface_of(address_towards("localhost") or "")
