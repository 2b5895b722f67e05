"""The addresses by which ranks reach each other, and the interfaces that have them.

GLOO_SOCKET_IFNAME, which names the interfaces of gloo, is read and set here alone, and set by tools
for ranks that they start on this host.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Sequence

import psutil

_GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 10),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 4),
)
PORT_RANGE = "those of net.ipv4.ip_local_port_range"
"""The ports at which links and rank 0 listen, except the port of the rendezvous."""
_UNREACHABLE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def is_unreachable(error: OSError) -> bool:
    """Returns whether a connection has ended because the other host no longer answers."""
    return error.errno in _UNREACHABLE


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def reachable_address(own: str, others: Sequence[str]) -> str:
    """The address by which the ranks with the addresses `others` reach this one.

    A rank's own address is found in two steps. The first is the address from which it reaches the
    host that all ranks reach, and the ranks exchange those. On that host itself its name may
    resolve to a loopback address, as on Debian: so the second step, this function, returns the one
    from which this rank reaches the first of the others elsewhere. It returns `own` unless that is
    a loopback address, and also if all ranks are on one host.

    The users, with the `own` of each and what the result is for:

    - `hetero.link.open.connect`: `address_towards(host_of(store))`; where the link listens, unless
      its user has named NICs.
    - `hetero.collectives.vendor_library`: `own_address` of hetero/collectives/links.py, which is a
      NIC that the user has named, or `address_towards` the store's host; where gloo listens.
    - `megatron.hetero.rendezvous`: this end of the connection to rank 0; the address of all links,
      and of gloo's interface.
    - `hetero.tools.verification.rank`: as `connect`; where bare sockets listen, to be measured
      beside the links.

    Raises OSError if no route leads to the others.
    """
    elsewhere = next((address for address in others if not is_loopback(address)), None)
    return address_towards(elsewhere) if is_loopback(own) and elsewhere is not None else own


def interface_with(address: str) -> str | None:
    """The network interface that has an address; None if there is none."""
    wanted = ipaddress.ip_address(address)
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            its = ipaddress.ip_address(entry.address.partition("%")[0])
            # Every loopback address belongs to the loopback interface, listed or not.
            if its == wanted or (its.is_loopback and wanted.is_loopback):
                return name
    return None


def interface_address(name: str, family: socket.AddressFamily | None = None) -> str | None:
    """An address of an interface, of `family` if given, else IPv4 before IPv6.

    None if it has none or does not exist. Link-local addresses (fe80::) do not count.
    """
    entries = psutil.net_if_addrs().get(name, [])
    for wanted in (family,) if family is not None else (socket.AF_INET, socket.AF_INET6):
        for entry in entries:
            if entry.family == wanted and not entry.address.startswith("fe80:"):
                return str(entry.address)
    return None


def unusable_gloo_interfaces(*, several_hosts: bool) -> tuple[str, ...]:
    """The interfaces in GLOO_SOCKET_IFNAME by which other ranks cannot reach this one."""
    names = os.environ.get(_GLOO_VARIABLE, "").split(",")
    found = {name: interface_address(name) for name in filter(None, names)}
    stats = psutil.net_if_stats()
    return tuple(
        name
        for name, address in found.items()
        if address is None
        or (name in stats and not stats[name].isup)
        or (several_hosts and is_loopback(address))
    )


def address_leading_to(host: str) -> str | None:
    """`address_towards`, but None if it is a loopback address or there is no route."""
    try:
        address = address_towards(host)
    except OSError:
        return None
    return None if is_loopback(address) else address


def is_gloo_interface_set() -> bool:
    """Returns whether GLOO_SOCKET_IFNAME is set, which takes precedence over any other choice."""
    return _GLOO_VARIABLE in os.environ


def set_gloo_interface(address: str) -> None:
    """Have gloo use the interface that has an address, unless GLOO_SOCKET_IFNAME is set.

    By default gloo takes the interface that this host's name resolves to: often the loopback
    interface, where no other host reaches it.
    """
    if not is_gloo_interface_set() and (interface := interface_with(address)) is not None:
        os.environ[_GLOO_VARIABLE] = interface


def lead_gloo_towards(host: str) -> None:
    """Have gloo use the interface that leads to a host, unless GLOO_SOCKET_IFNAME is set.

    On `host` itself its name may resolve to a loopback address; gloo then keeps its default.
    """
    if not is_gloo_interface_set() and (address := address_leading_to(host)) is not None:
        set_gloo_interface(address)


def address_towards(host: str) -> str:
    """The local address from which packets to a host are sent. OSError if there is no route."""
    failure: OSError | None = None
    for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                return plain_address(probe.getsockname()[0])
        except OSError as error:
            failure = error
    raise failure or OSError(f"{host} has no address")


def plain_address(address: object) -> str:
    """An address without its scope; an IPv4-mapped one (::ffff:10.0.0.1) as an IPv4 address.

    No socket of this project could listen at an IPv4-mapped address.
    """
    return str(address).removeprefix("::ffff:").partition("%")[0]


def listen_everywhere(*, backlog: int) -> socket.socket:
    """Listen at all addresses of this host, of IPv4 and IPv6, on a free port."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
        )
    return socket.create_server(("", 0), backlog=backlog)


def keep_alive(connection: socket.socket, *, ack_timeout: float | None = None) -> None:
    """Have the kernel end a connection about half a minute after the other host disappears.

    `ack_timeout`: seconds without a TCP acknowledgement of what was sent that end it as well.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    if ack_timeout is not None:
        milliseconds = int(ack_timeout * 1000)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
