"""Both ends of a TCP link in one process, and faults put on its connections."""

from __future__ import annotations

import ctypes
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from ctypes import addressof, create_string_buffer
from dataclasses import dataclass, replace

import pytest

from hetero.device.device import Device
from hetero.device.host import HostDevice
from hetero.link.carrier import Carrier
from hetero.link.control import Control
from hetero.link.handshake import Rendezvous
from hetero.link.ring import RingOptions
from hetero.link.ring_link import RingLink
from hetero.link.tcp import open_tcp
from tests.hetero.link.joined import CPU, JoinedEnds

RING_BYTES = 256 << 10
CHUNK_BYTES = 16 << 10
SO_ATTACH_FILTER, SO_DETACH_FILTER, SO_MAX_PACING_RATE = 26, 27, 47
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A packet filter of one instruction: return 0, which keeps nothing."""
_Names = tuple[tuple[str, int], tuple[str, int]]
_ACKED = 120
"""Where struct tcp_info counts the bytes that were confirmed."""


@dataclass(frozen=True)
class Connection:
    """One connection, by the sockets at both of its ends."""

    ends: tuple[socket.socket, socket.socket]

    def close(self) -> None:
        """End it in order, as a proxy between the two does that is stopped."""
        for end in self.ends:
            # The other's end may have come to it by now.
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def reset(self) -> None:
        """Break it, as a firewall does that has forgotten it. Of one that no thread reads."""
        nowhere = struct.pack("H14x", socket.AF_UNSPEC)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.connect(self.ends[0].fileno(), nowhere, len(nowhere)):
            raise OSError(ctypes.get_errno(), "disconnect")

    def silence(self) -> None:
        """Lose every packet from now on, as a switch does that has died."""
        program = create_string_buffer(_DROP_ALL)
        for end in self.ends:
            end.setsockopt(
                socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 1, addressof(program))
            )

    def hear_again(self) -> None:
        for end in self.ends:
            end.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)

    def slow_to(self, bytes_per_second: int) -> None:
        for end in self.ends:
            end.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, bytes_per_second)

    def carried(self) -> int:
        """Bytes that either end has sent and the other confirmed."""
        infos = (end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192) for end in self.ends)
        return sum(struct.unpack_from("Q", info, _ACKED)[0] for info in infos)


class Network:
    """The connections of links that are opened while it watches, each known by its address."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._rails: dict[_Names, socket.socket] = {}
        self._control: dict[_Names, socket.socket] = {}
        counts: Counter[Carrier] = Counter()
        self._numbers: dict[_Names, int] = {}
        add, begin = Carrier.add_tcp_rail, Control.__init__

        def adding(carrier: Carrier, connection: socket.socket) -> None:
            self._rails[_names(connection)] = connection.dup()
            self._numbers[_names(connection)] = counts[carrier]
            counts[carrier] += 1
            add(carrier, connection)

        def beginning(control: Control, *connections: socket.socket, **options: float) -> None:
            for connection in connections:
                self._control[_names(connection)] = connection.dup()
            begin(control, *connections, **options)

        monkeypatch.setattr(Carrier, "add_tcp_rail", adding)
        monkeypatch.setattr(Control, "__init__", beginning)

    @property
    def rails(self) -> list[Connection]:
        """In the order of the rails."""
        return _paired(dict(sorted(self._rails.items(), key=lambda i: self._numbers[i[0]])))

    @property
    def control(self) -> list[Connection]:
        return _paired(self._control)

    def path(self, address: str) -> list[Connection]:
        """All that begins at one address of the listener, control connections too."""
        every = self._rails | self._control
        return _paired({names: end for names, end in every.items() if address in str(names)})

    def hear_again(self) -> None:
        """The end of a silence of all connections."""
        hear_again(_paired(self._rails | self._control))

    def close(self) -> None:
        for end in [*self._rails.values(), *self._control.values()]:
            end.close()


def hear_again(connections: Iterable[Connection]) -> None:
    for connection in connections:
        connection.hear_again()


def _paired(ends: dict[_Names, socket.socket]) -> list[Connection]:
    """By the ends of the caller, in the order in which it was given them."""
    pairs = [(end, ends.get(names[::-1])) for names, end in ends.items() if names[0] > names[1]]
    return [Connection((one, other)) for one, other in pairs if other is not None]


def _names(end: socket.socket) -> _Names:
    return end.getsockname(), end.getpeername()


@dataclass(frozen=True)
class Setup(JoinedEnds):
    connections: int = 2
    addresses: tuple[str, ...] = ("127.0.0.1",)
    ring_bytes: int = RING_BYTES
    chunk_bytes: int = CHUNK_BYTES
    has_exited: Callable[[], bool] = lambda: False

    def open(self, rendezvous: Rendezvous) -> RingLink:
        rank = rendezvous.description.rank
        return open_tcp(
            replace(rendezvous, has_exited=self.has_exited),
            RingOptions("tcp", self.ring_bytes, self.chunk_bytes, self.devices[rank]),
            addresses=self.addresses,
            rails=self.connections,
        )


def checked() -> tuple[Device, Device]:
    """Devices that verify every byte."""
    return HostDevice(CPU, checksum=True), HostDevice(CPU, checksum=True)
