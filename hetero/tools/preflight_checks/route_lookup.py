"""Asks the kernel by which interface packets leave."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator

_REQUEST = struct.Struct("=IHHII")
"""nlmsghdr: length, type, flags, sequence, port."""
_ROUTE = struct.Struct("=BBBBBBBBI")
"""rtmsg: family, bits of the target and of the source, then what a question leaves at 0."""
_ATTRIBUTE = struct.Struct("=HH")
_GET_ROUTE, _NEW_ROUTE, _IS_REQUEST = 26, 24, 1
_TARGET, _SOURCE, _LEAVES_BY = 1, 2, 4
_SECONDS = 2.0


def leaving_interface(target: str, source: str) -> str | None:
    """The interface by which packets from one address to another leave this host.

    None where there is no route, or the kernel does not say.
    """
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with contextlib.suppress(OSError, struct.error):
        addresses = [socket.inet_pton(family, address) for address in (target, source)]
        bits = 8 * len(addresses[0])
        body = _ROUTE.pack(family, bits, bits, 0, 0, 0, 0, 0, 0)
        for kind, value in zip((_TARGET, _SOURCE), addresses, strict=True):
            body += _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value
        header = _REQUEST.pack(_REQUEST.size + len(body), _GET_ROUTE, _IS_REQUEST, 1, 0)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
            kernel.settimeout(_SECONDS)
            kernel.send(header + body)
            answer = kernel.recv(1 << 16)
        if _REQUEST.unpack_from(answer)[1] == _NEW_ROUTE:
            found = dict(_attributes(answer[_REQUEST.size + _ROUTE.size :]))
            return socket.if_indextoname(struct.unpack("=I", found[_LEAVES_BY])[0])
    return None


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        yield kind, data[_ATTRIBUTE.size : length]
        data = data[(length + 3) // 4 * 4 :]
