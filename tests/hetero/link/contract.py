"""Two real processes, each with one end of a link, for the contract that transports keep.

A test gives a scenario: a module-level function of one `Side`, run by both processes. What it
returns, or the exception it ends with, comes back as that side's `Outcome`. A process that does not
answer in time is killed and its outcome says so, so that a hang is a failure and not a wait.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from hetero.link.base import Link, LinkDescription, as_bytes, sendable
from tests.forked_ranks import ForkedRanks, Outcome
from tests.gpus import gpu_of, take_gpu
from tests.hetero.link.transports import PATIENCE, SLOWNESS, Transport

SECRET = "contract"
# Not the ranks' numbers, so that an error that confuses a rank with a stage is seen.
STAGES = (4, 5)


@dataclass
class Side:
    """What a scenario has: one end of the link, and a store to meet the other end."""

    rank: int
    number: int
    """Which scenario of these processes it is."""
    transport: Transport
    store: dist.Store
    timeout: float
    options: Mapping[str, Any]
    links: list[Link] = field(default_factory=list)

    @property
    def peer(self) -> int:
        return 1 - self.rank

    @property
    def device(self) -> torch.device:
        on_gpu = self.transport.device == "cuda"
        return gpu_of(self.rank) if on_gpu else torch.device("cpu")

    @property
    def link(self) -> Link:
        """The link of this side, opened when it is first asked for."""
        return self.links[-1] if self.links else self.open()

    def open(self) -> Link:
        description = LinkDescription(
            rank=self.rank,
            peer=self.peer,
            stage=STAGES[self.rank],
            peer_stage=STAGES[self.peer],
            secret=SECRET,
            timeout=self.timeout,
        )
        self.links.append(self.transport.open(description, self.store, self.device))
        return self.links[-1]

    def say(self, what: str) -> None:
        self.store.set(f"{self.number}/{what}", "1")

    def hear(self, what: str, seconds: float = PATIENCE) -> None:
        self.store.wait([f"{self.number}/{what}"], timedelta(seconds=seconds))

    def meet(self, where: str) -> None:
        """Go on when the other side is here too."""
        self.say(f"{where}/{self.rank}")
        self.hear(f"{where}/{self.peer}")


Scenario = Callable[[Side], Any]


class Pair:
    """Two processes that play one scenario after another, each over links of its own.

    They are started when they are first needed, and again after a scenario in which one of them
    failed, died or hung. Links that share a process group with the next get new ones every time.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._started = contextlib.ExitStack()
        self._ranks: ForkedRanks | None = None
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(
        self,
        scenario: Scenario,
        *,
        transport: Transport | None = None,
        timeout: float = 30.0 * SLOWNESS,
        patience: float = PATIENCE,
        opened: bool = True,
        **options: Any,
    ) -> list[Outcome]:
        """Both sides' outcomes, by rank, within `patience` seconds whatever happens.

        The link is open when the scenario begins, unless `opened` is false: opening is collective.
        Another transport than the pair's own is one of the same device.
        """
        transport = transport or self._transport
        ranks = self._ranks or self._start()
        self._count += 1
        ranks.ask(scenario, self._count, transport, timeout, opened, options)
        outcomes = ranks.outcomes(patience=patience, until_end=False)
        broken = any(one.error or one.hung or one.exit_code is not None for one in outcomes)
        if broken or transport.shares_group:
            self.close()
        return outcomes

    def _start(self) -> ForkedRanks:
        folder = self._started.enter_context(tempfile.TemporaryDirectory())
        self._ranks = ForkedRanks(
            _live,
            [(rank, self._transport.device == "cuda", f"{folder}/store") for rank in range(2)],
        )
        self._started.callback(self._ranks.close)
        return self._ranks

    def close(self) -> None:
        self._ranks = None
        self._started.close()


def _live(rank: int, on_gpu: bool, store_path: str, asked: Connection) -> None:
    """One process: its process group, then whatever it is asked for."""
    store = _join(rank, on_gpu, store_path)
    while True:
        scenario, number, transport, timeout, opened, options = asked.recv()
        side = Side(rank, number, transport, store, timeout, options)
        try:
            if opened:
                side.open()
            asked.send((scenario(side), None))
            side.meet("end")
        except Exception as error:
            # The other side may have ended well, and would wait to the end of its patience.
            side.say(f"end/{rank}")
            asked.send((None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        for link in side.links:
            link.close()


def _join(rank: int, on_gpu: bool, store_path: str) -> dist.Store:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if on_gpu:
        take_gpu(rank, 2)
    store = dist.FileStore(store_path, 2)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=PATIENCE),
    )
    return dist.PrefixStore("side", store)


# What scenarios share.


def make(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, seed: int
) -> torch.Tensor:
    """A tensor of random bits, NaNs and all, the same for one seed in every process."""
    itemsize = torch.empty((), dtype=dtype).element_size()
    count = itemsize * int(torch.Size(shape).numel())
    high = 2 if dtype is torch.bool else 256
    generator = torch.Generator().manual_seed(seed)
    content = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
    return content.view(dtype).reshape(shape).to(device)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    left, right = (as_bytes(sendable(tensor).cpu()) for tensor in (one, other))
    return torch.equal(left, right)


def blank(like: torch.Tensor) -> torch.Tensor:
    """Where `like` can be received: contiguous, and visibly not yet received."""
    target = torch.zeros(like.numel() * like.itemsize, dtype=torch.uint8, device=like.device)
    return target.view(like.dtype).reshape(like.shape)


@dataclass(frozen=True)
class Resources:
    """What a process holds that a closed link must have given back."""

    threads: int
    files: int
    shared_memory: int

    @classmethod
    def held(cls) -> Resources:
        return cls(
            threads=threading.active_count(),
            files=len(list(Path("/proc/self/fd").iterdir())),
            shared_memory=sum("/dev/shm/" in line for line in open("/proc/self/maps")),
        )


def names_the_link(text: str, *, rank: int) -> bool:
    """Whether an error of one end names both."""
    peer = 1 - rank
    return f"rank {rank} (stage {4 + rank})" in text and f"rank {peer} (stage {4 + peer})" in text
