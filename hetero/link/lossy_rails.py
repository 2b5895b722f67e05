"""Tells which rails of a link lose packets, by what the kernel's TCP has to send again."""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

_LOSSY = 0.01
"""Of the packets that a rail sends, the share that are sent again; congestion costs far less."""
_SECONDS = 5.0
"""Over which that is counted, and longer until the rail has sent enough."""
_LEAST_PACKETS = 200
_LEAST_RESENT = 10
"""Enough as well: one that loses many is soon used for little."""
_INFO_BYTES = 160
_RESENT, _SENT = 100, 156
"""Where `struct tcp_info` has its numbers of segments with data: since Linux 4.6."""


@dataclass(frozen=True, kw_only=True)
class RailPackets:
    """What a rail has sent since the link was opened."""

    sent: int = 0
    """Packets with data, those that were sent again included."""
    resent: int = 0

    @classmethod
    def of(cls, connection: socket.socket) -> Self:
        """Zero where the kernel does not tell."""
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        if len(info) < _INFO_BYTES:
            return cls()
        (resent,), (sent,) = (struct.unpack_from("=I", info, at) for at in (_RESENT, _SENT))
        return cls(sent=sent, resent=resent)

    def __add__(self, other: RailPackets) -> RailPackets:
        return RailPackets(sent=self.sent + other.sent, resent=self.resent + other.resent)


@dataclass
class _Window:
    since: float
    before: RailPackets
    is_lossy: bool = False


class LossyRails:
    """Judges by windows of some seconds. Call it every second or so, from one thread at a time."""

    def __init__(self) -> None:
        self._windows: dict[str, _Window] = {}

    def update(self, packets: Mapping[str, RailPackets], now: float) -> dict[str, str]:
        """Take the counts of all live rails at a time; a sentence for each that begins to lose."""
        told = {}
        for name, count in packets.items():
            window = self._windows.setdefault(name, _Window(now, count))
            sent = count.sent - window.before.sent
            resent, seconds = count.resent - window.before.resent, now - window.since
            if sent < 0:  # a new connection
                self._windows[name] = _Window(now, count)
                continue
            if seconds < _SECONDS or (sent < _LEAST_PACKETS and resent < _LEAST_RESENT):
                continue
            is_lossy = resent >= max(_LOSSY * sent, _LEAST_RESENT)
            if is_lossy and not window.is_lossy:
                told[name] = (
                    f"rail {name} loses packets: {resent / sent:.1%} of those that it sent in "
                    f"{seconds:.0f} s had to be sent again; see its cable, ports and switch"
                )
            self._windows[name] = _Window(now, count, is_lossy)
        return told
