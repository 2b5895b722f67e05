"""Whether this host can use RDMA at all."""

from __future__ import annotations

import socket
from ctypes import create_string_buffer
from pathlib import Path

from hetero.device.topology import SYS, rdma_devices
from hetero.native.carrier import TEXT_BYTES
from hetero.native.library import native


def no_rdma(*, sys_root: Path = SYS) -> str | None:
    """Why this host cannot use RDMA; None if it has a device and the library to drive it.

    Whether a port is up and reaches the peer is seen only by opening a link.
    """
    if not rdma_devices(sys_root=sys_root):
        return f"{socket.gethostname()} has no RDMA device"
    return libibverbs_missing()


def libibverbs_missing() -> str | None:
    """Why libibverbs cannot be used here, with the packages to install; None if it can."""
    error = create_string_buffer(TEXT_BYTES)
    if native().ibverbs_load(error, TEXT_BYTES):
        return None
    reason = error.value.decode(errors="replace")
    return (
        f"{socket.gethostname()} cannot use libibverbs ({reason}); install it (Debian, Ubuntu: "
        "libibverbs1 and ibverbs-providers; RHEL: libibverbs)"
    )
