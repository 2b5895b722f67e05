"""How a link over RDMA begins: the ends meet and agree on their rails."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from ctypes import CDLL
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from hetero.addresses import family_of
from hetero.device.driver import driver_for
from hetero.device.topology import SYS, pci_device
from hetero.errors import LinkError
from hetero.link.handshake import (
    Meeting,
    accept,
    connect,
    listen_at,
    look_up,
    publish,
    receive_json,
    send_json,
)
from hetero.link.rdma_ports import Port, choose_devices, find_ports, pair_ports

T = TypeVar("T")
DEVICE, HOST = "device", "host"
_LONGEST_STALL = 20.0


@dataclass(frozen=True)
class VerbsOptions:
    """What one side may choose for itself."""

    memory: str = HOST
    """Where this side's rings are: DEVICE, which the NIC then reads and writes, or HOST."""
    nics: tuple[str, ...] = ()
    """RDMA devices, each with all its ports unless it ends in `:PORT`; else the nearest ones."""
    address: str = "127.0.0.1"
    """This side's address for the connection beside the rails."""
    stall_seconds: float | None = None
    """How long a request may take before its rail is given up; else half the link's timeout."""
    read_back: bool = False
    """Read a NIC's writes back over it even where the memory or its driver needs no such thing."""
    sys_root: Path = SYS
    """Where the kernel describes this side's devices."""

    def stall_within(self, timeout: float) -> float:
        """How long a request may take on a link with this timeout, in seconds."""
        return self.stall_seconds or min(timeout / 2, _LONGEST_STALL)


class Together:
    """Steps that both ends take at once: an error of either is an error of both."""

    def __init__(self, connection: socket.socket, meeting: Meeting) -> None:
        self._connection = connection
        self._meeting = meeting

    def take(
        self, step: Callable[[], T], tell: Callable[[T], Mapping[str, Any]]
    ) -> tuple[T, dict[str, Any]]:
        """Take this side's part of a step; what came of it, and what the other side tells."""
        peer = self._meeting.description.peer
        try:
            mine = step()
        except Exception as error:
            reason = str(error) or type(error).__name__
            send_json(self._connection, {"error": reason})
            raise self._meeting.failure(reason, f"rank {peer} has been told") from error
        send_json(self._connection, tell(mine))
        try:
            theirs = receive_json(self._connection)
        except OSError as error:
            raise self._meeting.failure(f"rank {peer} ended ({error})", "see its log") from error
        if "error" in theirs:
            raise self._meeting.failure(f"rank {peer} says: {theirs['error']}", "see there")
        return mine, theirs


def meet(meeting: Meeting, address: str) -> socket.socket:
    """The connection beside the rails; each end has proved itself to the other."""
    if not meeting.listens:
        told = look_up(meeting, "verbs address")
        host, port = told["address"]
        return connect((str(host), int(port)), meeting, family=family_of(str(host)))
    with listen_at(address) as listener:
        publish(meeting, "verbs address", {"address": list(listener.getsockname()[:2])})
        return accept(listener, meeting)[0]


def agree_on_ports(
    together: Together,
    meeting: Meeting,
    options: VerbsOptions,
    *,
    device: torch.device,
    library: CDLL,
) -> list[Port]:
    """This side's port of every rail, in one order."""
    ours, told = together.take(
        lambda: _look_around(library, options, device),
        lambda found: {"ports": [port.as_dict() for port in found]},
    )
    return _pair_up(meeting, ours, [Port(**port) for port in told["ports"]])


def require_room(ports: Sequence[Port], nbytes: int) -> None:
    """Raises LinkError where a port carries no chunk of so many bytes."""
    for port in ports:
        if nbytes > port.max_message:
            raise LinkError(
                f"{port} carries messages of {port.max_message} bytes at most and a chunk has "
                f"{nbytes}; choose smaller chunks"
            )


def _look_around(library: CDLL, options: VerbsOptions, device: torch.device) -> list[Port]:
    """This side's ports that can be used. Only now, so that the peer hears why not."""
    gpu = None
    if device.type == "cuda" and not options.nics:
        index = torch.cuda.current_device() if device.index is None else device.index
        gpu = pci_device(driver_for(device).pci_bus_id(index))
    devices = choose_devices(gpu, options.nics, sys_root=options.sys_root)
    return find_ports(devices, library=library, sys_root=options.sys_root)


def _pair_up(meeting: Meeting, ours: list[Port], theirs: list[Port]) -> list[Port]:
    """This side's port of every rail, in one order on both sides."""
    if meeting.listens:
        chosen = [ours[mine] for mine, _ in pair_ports(ours, theirs)]
    else:
        chosen = [ours[mine] for _, mine in pair_ports(theirs, ours)]
    if not chosen:
        raise meeting.failure(
            f"no RDMA port of this side ({', '.join(map(str, ours))}) can reach one of the other "
            f"({', '.join(map(str, theirs))}): one side is on InfiniBand and the other on Ethernet",
            "name NICs of one fabric with --hetero-nics",
        )
    return chosen
