"""Both ends of a verbs link in one process, over emulated NICs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch

from hetero.device.base import DeviceRuntime
from hetero.device.cpu import CpuRuntime
from hetero.transport.base import LinkDescription
from hetero.transport.chunked import ChunkedLink, RingShape
from hetero.transport.handshake import Meeting
from hetero.transport.verbs.ends import VerbsEnds
from hetero.transport.verbs.joining import VerbsOptions
from hetero.transport.verbs.opening import open_verbs
from tests.emulated_nic.library import emulated
from tests.emulated_nic.world import World

CPU = torch.device("cpu")
SLOT_BYTES = 4096
TIMEOUT = 20.0
STALL = 0.6
"""Longer than the emulated NIC's retries, so that only silence is met by the deadline."""
SHAPE = RingShape(slots=8, slot_bytes=SLOT_BYTES)
OPTIONS = VerbsOptions(stall_seconds=STALL)


@dataclass
class LocalStore:
    """What torch's store does for two threads of one process."""

    values: dict[str, bytes] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value.encode()
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.check(keys), timeout.total_seconds()):
                raise TimeoutError(str(keys))


@dataclass(frozen=True)
class Setup:
    """How the two ends are opened."""

    world: World
    shape: RingShape = SHAPE
    timeout: float = TIMEOUT
    nics: tuple[tuple[str, ...], tuple[str, ...]] = (("a0", "a1"), ("b0", "b1"))
    options: VerbsOptions = OPTIONS
    runtime: DeviceRuntime = field(default_factory=CpuRuntime)
    without_nics: int | None = None
    """A rank that is not given the emulated NICs, and so looks for real ones."""

    def description(self, rank: int) -> LinkDescription:
        return LinkDescription(
            rank=rank,
            peer=1 - rank,
            stage=rank,
            peer_stage=1 - rank,
            job="joined",
            timeout=self.timeout,
        )

    def _open(self, rank: int, store: LocalStore) -> VerbsEnds:
        meeting = Meeting(
            store=store,
            description=self.description(rank),
            name="joined",
            listens=rank == 0,
            secret=b"joined",
            timeout=TIMEOUT,
        )
        return open_verbs(
            meeting,
            shape=self.shape,
            runtime=self.runtime,
            device=CPU,
            options=replace(self.options, nics=self.nics[rank]),
            verbs=None if rank == self.without_nics else emulated(self.world),
        )

    def _try(self, rank: int, store: LocalStore) -> VerbsEnds | Exception:
        try:
            return self._open(rank, store)
        except Exception as error:
            return error

    def attempt(self) -> list[VerbsEnds | Exception]:
        """What came of opening, by rank."""
        store = LocalStore()
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda rank: self._try(rank, store), range(2)))

    @contextmanager
    def ends(self) -> Iterator[list[VerbsEnds]]:
        """Both ends, open."""
        opened = self.attempt()
        for one in opened:
            if isinstance(one, Exception):
                raise one
        ends = [one for one in opened if isinstance(one, VerbsEnds)]
        try:
            yield ends
        finally:
            for one in ends:
                one.send.close()
                one.recv.close()
                one.close()

    @contextmanager
    def links(self) -> Iterator[list[ChunkedLink]]:
        """Both links, open."""
        opened = self.attempt()
        links = []
        for rank, ends in enumerate(opened):
            if isinstance(ends, Exception):
                raise ends
            links.append(
                ChunkedLink(
                    self.description(rank),
                    transport="verbs",
                    send_end=ends.send,
                    recv_end=ends.recv,
                    device=CPU,
                    on_close=ends.close,
                )
            )
        try:
            yield links
        finally:
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(ChunkedLink.close, links))


def noise(nbytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def exchange(links: list[ChunkedLink], *, messages: int, nbytes: int, seed: int = 0) -> None:
    """Messages both ways at once, every byte compared."""
    flights = []
    for number in range(messages):
        for rank in range(2):
            sent = noise(nbytes, seed + 2 * number + rank)
            target = torch.zeros_like(sent)
            work = links[rank].send(sent)
            flights.append((work, links[1 - rank].recv(target), sent, target))
    for sending, receiving, sent, target in flights:
        receiving.wait()
        sending.wait()
        assert torch.equal(sent, target)
