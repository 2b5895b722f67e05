"""The addresses by which ranks reach each other, and the interfaces that have them."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Way:
    """How a rank reached rank 0: its own address on the way, and rank 0's."""

    own: str
    rank_0: str


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def own_address(ways: Sequence[Way | None], rank: int) -> str:
    """The address by which the ranks of other hosts reach this one; a loopback one if all are here.

    `ways` are all ranks', None for rank 0's own. Rank 0 cannot see its own address, which its host
    may resolve to a loopback one, as Debian's do; those who have reached it from elsewhere know.
    """
    way = ways[rank]
    if way is not None and not is_loopback(way.own):
        return way.own
    others = [way for way in ways if way is not None and not is_loopback(way.own)]
    for other in others:
        if interface_with(other.rank_0) is not None:
            return other.rank_0
    # It is behind a translation of addresses: the one that leads to them will do.
    for other in others:
        return address_towards(other.own)
    return (
        way.own if way is not None else next((w.rank_0 for w in ways if w is not None), "127.0.0.1")
    )


def interface_with(address: str) -> str | None:
    """The network interface that has an address; None where none has."""
    wanted = ipaddress.ip_address(address)
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            its = ipaddress.ip_address(entry.address.partition("%")[0])
            # Any loopback address belongs to that interface, whether it is listed or not.
            if its == wanted or (its.is_loopback and wanted.is_loopback):
                return name
    return None


def interface_address(name: str, family: socket.AddressFamily | None = None) -> str | None:
    """An address of an interface, of a family if one is given, else IPv4 before IPv6.

    None where it has none or does not exist. Addresses that only mean something together with an
    interface (fe80::) count as none.
    """
    entries = psutil.net_if_addrs().get(name, [])
    for wanted in (family,) if family is not None else (socket.AF_INET, socket.AF_INET6):
        for entry in entries:
            if entry.family == wanted and not entry.address.startswith("fe80:"):
                return str(entry.address)
    return None


def address_leading_to(host: str) -> str | None:
    """The same, where others can use it; None for a way that stays within this host, or none."""
    try:
        address = address_towards(host)
    except OSError:
        return None
    return None if is_loopback(address) else address


def address_towards(host: str) -> str:
    """The local address from which packets to a host leave. OSError where there is no way."""
    failure: OSError | None = None
    for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0]).partition("%")[0]
        except OSError as error:
            failure = error
    raise failure or OSError(f"{host} has no address")
