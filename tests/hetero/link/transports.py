"""Every transport that the contract is run against, and how a test opens it.

To add one: write its `open_...` function and put one `Transport` into TRANSPORTS.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetero.device.driver import HIP_LIBRARY_VARIABLE
from hetero.device.host import HostDevice
from hetero.link.base import Link, LinkDescription
from hetero.link.gloo import GlooLink
from hetero.link.handshake import Rendezvous
from hetero.link.nics import Nics
from hetero.link.open import ChannelOptions, PeerCapabilities, open_path
from hetero.link.ring import RingOptions
from hetero.link.shared_memory import open_shared_memory
from hetero.link.tcp import open_tcp
from hetero.link.verbs import open_verbs
from hetero.pipeline.vendor_link import VendorLink
from hetero.startup.store import BoundedStore
from tests.emulated_streams import EmulatedDevice
from tests.hip_on_cuda.library import hip_on_cuda_library

SLOWNESS = float(os.environ.get("HETERO_TEST_SLOWNESS", "1"))
"""How many times more time than a real machine's everything is given, on an emulated one."""
PATIENCE = 60.0 * SLOWNESS

Opener = Callable[[LinkDescription, dist.Store, torch.device], Link]


@dataclass(frozen=True)
class Transport:
    """One way of moving bytes, and what of the contract it cannot offer by design."""

    name: str
    open: Opener
    device: str = "cpu"
    has_header: bool = True
    """Without one, both ends are trusted to agree on what is sent."""
    has_deadlines: bool = True
    """Without them, a wait that lasts too long ends the process."""
    shares_group: bool = False
    """Its links share a process group, which one that fails may leave unusable."""

    def __str__(self) -> str:
        return f"{self.name}-{self.device}"


def open_gloo(description: LinkDescription, store: dist.Store, device: torch.device) -> Link:
    number, odd = _number(description.rank, store), description.rank
    return GlooLink(description, send_tag=2 * number + odd, recv_tag=2 * number + 1 - odd)


def _number(rank: int, store: dist.Store) -> int:
    """Both sides open their links in the same order, so a count of their own names each alike."""
    return store.add(f"opened by {rank}", 1)


def next_name(rank: int, store: dist.Store) -> str:
    """Of the next link that this rank opens."""
    return f"contract/{_number(rank, store)}"


def _rendezvous(description: LinkDescription, store: dist.Store) -> Rendezvous:
    return Rendezvous(
        store=BoundedStore(store),
        description=description,
        name=next_name(description.rank, store),
    )


def open_channel(
    path: str,
    description: LinkDescription,
    store: dist.Store,
    device: torch.device,
    *,
    checksum: bool = False,
) -> Link:
    rendezvous = _rendezvous(description, store)
    # Small chunks and rings, so that even small messages are cut and every ring wraps.
    ring_bytes = (512 if path == "ipc" else 2048) << 10
    options = ChannelOptions(ring_bytes=ring_bytes, chunk_bytes=64 << 10, checksum=checksum)
    capabilities = PeerCapabilities.of(rendezvous, device=device, options=options)
    return open_path(path, rendezvous, capabilities)


open_checked = functools.partial(open_channel, checksum=True)


def open_over_hip(
    path: str, description: LinkDescription, store: dist.Store, device: torch.device
) -> Link:
    """The HIP runtime's own code, over a library that forwards each call to its CUDA twin."""
    os.environ[HIP_LIBRARY_VARIABLE] = str(hip_on_cuda_library())
    return open_channel(path, description, store, device)


def open_emulated(
    transport: str, description: LinkDescription, store: dist.Store, device: torch.device
) -> Link:
    """Streams of a CPU that plays a GPU: it has three for each direction, and callers' own."""
    rendezvous = _rendezvous(description, store)
    options = RingOptions(transport, 1 << 20, 64 << 10, EmulatedDevice())
    if transport == "tcp":
        return open_tcp(rendezvous, options, addresses=["127.0.0.1"], rails=2)
    return open_shared_memory(rendezvous, options)


def open_rdma(
    description: LinkDescription,
    store: dist.Store,
    device: torch.device,
    *,
    nics: Sequence[Sequence[str]] = (),
    ring_bytes: int = 1 << 20,
    chunk_bytes: int = 64 << 10,
    read_back: bool = False,
) -> Link:
    """RDMA over each rank's NICs, which HETERO_TEST_RAILS names if they are not given.

    In it are those of rank 0, a slash, those of rank 1.
    """
    nics = nics or [names.split(",") for names in os.environ["HETERO_TEST_RAILS"].split("/")]
    return open_verbs(
        _rendezvous(description, store),
        RingOptions("verbs", ring_bytes, chunk_bytes, HostDevice(device)),
        device=device,
        nics=Nics(rdma=tuple(nics[description.rank])),
        read_back=read_back,
    )


def _real_verbs() -> list[Transport]:
    """Over the NICs that HETERO_TEST_RAILS names; HETERO_TEST_READ_BACK makes them read back."""
    if "HETERO_TEST_RAILS" not in os.environ:
        return []
    read_back = "HETERO_TEST_READ_BACK" in os.environ
    name = "verbs-readback" if read_back else "verbs"
    return [Transport(name, functools.partial(open_rdma, read_back=read_back))]


@functools.cache
def _nccl_groups(timeout: float) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    forward, backward = (
        dist.new_group([0, 1], backend="nccl", timeout=timedelta(seconds=timeout)) for _ in range(2)
    )
    return forward, backward


def open_nccl(description: LinkDescription, store: dist.Store, device: torch.device) -> Link:
    forward, backward = _nccl_groups(description.timeout)
    send, recv = (forward, backward) if description.rank == 0 else (backward, forward)
    return VendorLink(description, send_group=send, recv_group=recv)


TRANSPORTS = (
    Transport("gloo", open_gloo, shares_group=True),
    Transport("gloo", open_gloo, device="cuda", shares_group=True),
    Transport(
        "nccl",
        open_nccl,
        device="cuda",
        has_header=False,
        has_deadlines=False,
        shares_group=True,
    ),
    Transport("shm", functools.partial(open_channel, "shm")),
    Transport("shm", functools.partial(open_channel, "shm"), device="cuda"),
    Transport("shm-checksum", functools.partial(open_checked, "shm")),
    Transport("shm-checksum", functools.partial(open_checked, "shm"), device="cuda"),
    Transport("shm-emulated", functools.partial(open_emulated, "shm")),
    Transport("ipc-emulated", functools.partial(open_emulated, "ipc")),
    Transport("ipc", functools.partial(open_channel, "ipc"), device="cuda"),
    Transport("ipc-hip", functools.partial(open_over_hip, "ipc"), device="cuda"),
    Transport("shm-hip", functools.partial(open_over_hip, "shm"), device="cuda"),
    Transport("tcp", functools.partial(open_channel, "tcp")),
    Transport("tcp", functools.partial(open_channel, "tcp"), device="cuda"),
    Transport("tcp-emulated", functools.partial(open_emulated, "tcp")),
    Transport("tcp-checksum", functools.partial(open_checked, "tcp")),
    *_real_verbs(),
)


def why_absent(transport: Transport) -> str | None:
    """Why this machine cannot run a transport."""
    if transport.device == "cuda" and not torch.cuda.is_available():
        return f"{transport} needs a GPU; this machine has none"
    return None


def of_this_machine(*, present: bool) -> list[Any]:
    """The transports that this machine can run, or those that it cannot, as parameters of tests."""
    return [
        pytest.param(t, id=str(t), marks=[pytest.mark.gpu] if t.device == "cuda" else [])
        for t in TRANSPORTS
        if (why_absent(t) is None) == present
    ]
