"""Whether this host can use RDMA at all."""

from __future__ import annotations

import socket
from ctypes import create_string_buffer
from pathlib import Path

from hetero.device.topology import SYS, rdma_devices
from hetero.native.carrier import TEXT_BYTES
from hetero.native.library import LIBRARY


def no_rdma(*, sys_root: Path = SYS) -> str | None:
    """Why this host cannot use RDMA; None if it has a device and the library to drive it.

    Whether a port is up and reaches the peer is seen only by opening a link.
    """
    if not rdma_devices(sys_root=sys_root):
        return f"{socket.gethostname()} has no RDMA device"
    error = create_string_buffer(TEXT_BYTES)
    if not LIBRARY.load().ibverbs_load(error, TEXT_BYTES):
        reason = error.value.decode(errors="replace")
        return (
            f"{socket.gethostname()} cannot use libibverbs ({reason}); install it (Debian, Ubuntu: "
            "libibverbs1 and ibverbs-providers; RHEL: libibverbs)"
        )
    return None
