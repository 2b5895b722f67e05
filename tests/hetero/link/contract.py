"""Two real processes, each with one end of a link, for the contract that transports keep.

The clauses that `hetero verify` plays too are in hetero/tools/verification/contract.py.

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
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from hetero.link.base import Link, LinkDescription
from hetero.tools.verification import contract
from tests.forked_ranks import ForkedRanks, Outcome
from tests.gpus import gpu_of, take_gpu
from tests.hetero.link.transports import PATIENCE, SLOWNESS, Transport

SECRET = "contract"
# Not the ranks' numbers, so that an error that confuses a rank with a stage is seen.
STAGES = (4, 5)
GRACE = 8.0 * SLOWNESS
"""Within this after the deadline a failure must be known."""


@dataclass(kw_only=True)
class Side(contract.Side):
    """One end of a link over a transport of the tests."""

    transport: Transport


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
        side = _side(rank, number, transport, store, timeout, options)
        try:
            if opened:
                side.open()
            asked.send((scenario(side), None))
            side.meet("end")
        except Exception as error:
            # The other side may have ended well, and would wait to the end of its patience.
            side.say(f"end/{rank}")
            asked.send((None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        side.close()


def _side(
    rank: int,
    number: int,
    transport: Transport,
    store: dist.Store,
    timeout: float,
    options: dict[str, Any],
) -> Side:
    """The end of scenario `number`. Links of one pair are numbered over all scenarios."""
    peer = 1 - rank
    device = gpu_of(rank) if transport.device == "cuda" else torch.device("cpu")

    def open_link(seconds: float) -> Link:
        description = LinkDescription(
            rank=rank,
            peer=peer,
            stage=STAGES[rank],
            peer_stage=STAGES[peer],
            secret=SECRET,
            timeout=seconds,
        )
        return transport.open(description, store, device)

    return Side(
        rank=rank,
        peer=peer,
        store=dist.PrefixStore(str(number), store),
        device=device,
        opener=open_link,
        sends=rank == 0,
        timeout=timeout,
        grace=GRACE,
        patience=PATIENCE,
        options=options,
        transport=transport,
    )


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
