"""Both ends of a native link in one process, over NICs that are copies within it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from hetero.device.ordered import OrderedDevice
from hetero.errors import LinkError
from hetero.transport.base import LinkDescription
from hetero.transport.handshake import Meeting
from hetero.transport.ordered.link import OrderedLink
from hetero.transport.verbs.joining import HOST, VerbsOptions
from hetero.transport.verbs.native.opening import open_native
from tests.emulated_nic.library import emulated
from tests.emulated_nic.world import two_rails
from tests.emulated_streams import EmulatedOrderedDevice
from tests.hetero.transport.verbs.joined import LocalStore
from tests.loopback_nic.library import LoopbackNics

CPU = torch.device("cpu")
RING_BYTES = 64 << 10
CHUNK_BYTES = 16 << 10
STALL = 0.5
TIMEOUT = 20.0


@dataclass(frozen=True)
class Setup:
    """How the two ends are opened."""

    nics: LoopbackNics
    rails: int = 2
    timeout: float = TIMEOUT
    ring_bytes: int = RING_BYTES
    chunk_bytes: int = CHUNK_BYTES
    read_back: bool = False
    memory: str = HOST
    devices: tuple[OrderedDevice, ...] = field(
        default_factory=lambda: (EmulatedOrderedDevice(), EmulatedOrderedDevice())
    )
    tensors_on: tuple[torch.device, ...] = (CPU, CPU)

    def open(self, store: LocalStore, rank: int) -> OrderedLink:
        description = LinkDescription(
            rank=rank,
            peer=1 - rank,
            stage=rank,
            peer_stage=1 - rank,
            job="joined",
            timeout=self.timeout,
        )
        meeting = Meeting(
            store=store,  # type: ignore[arg-type]
            description=description,
            name="joined",
            listens=rank == 0,
            secret=b"joined",
            timeout=20.0,
        )
        names = tuple(f"{'ab'[rank]}{rail}" for rail in range(self.rails))
        return open_native(
            meeting,
            transport="verbs",
            ring_bytes=self.ring_bytes,
            chunk_bytes=self.chunk_bytes,
            ordered=self.devices[rank],
            device=self.tensors_on[rank],
            options=VerbsOptions(
                memory=self.memory,
                nics=names,
                stall_seconds=STALL,
                read_back=self.read_back,
            ),
            verbs=emulated(two_rails(uuid.uuid4().hex)),
            library=self.nics.library,
        )


@contextmanager
def joined(setup: Setup) -> Iterator[tuple[OrderedLink, OrderedLink]]:
    """Both links, which are closed at the end in whatever state they are."""
    store = LocalStore()
    with ThreadPoolExecutor(2) as pool:
        links = list(pool.map(lambda rank: setup.open(store, rank), range(2)))
        try:
            yield links[0], links[1]
        finally:
            list(pool.map(lambda link: link.close(), links))


def attempted(setup: Setup) -> list[str]:
    """The texts of both ends' errors; opening must fail at both."""
    store = LocalStore()

    def error_of(rank: int) -> str:
        with pytest.raises(LinkError) as failure:
            setup.open(store, rank)
        return str(failure.value)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(error_of, range(2)))


def forwarder_threads() -> list[Path]:
    """This process's threads that carry links, which Python knows nothing of."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        # Others of the process's threads may end meanwhile.
        with suppress(FileNotFoundError):
            if (task / "comm").read_text().strip() == "rdma-forwarder":
                found.append(task)
    return found
