"""Whether this host can use RDMA at all."""

from __future__ import annotations

import socket
from pathlib import Path

from hetero.device.topology import SYS, rdma_devices
from hetero.errors import LinkError
from hetero.transport.verbs.library import load


def no_rdma(*, sys_root: Path = SYS) -> str | None:
    """Why this host cannot use RDMA; None if it has a device and the library to drive it.

    Whether a port is up and reaches the peer is seen only by opening a link.
    """
    if not rdma_devices(sys_root=sys_root):
        return f"{socket.gethostname()} has no RDMA device"
    try:
        load()
    except LinkError as error:
        return f"{socket.gethostname()}: {error}"
    return None
