"""Runs a scenario on real processes, each of which plays a rank of a simulated vendor.

The processes are forks of one that has imported torch. What a scenario returns, or the exception
it ends with, comes back as that rank's `Outcome`. A process that does not end in time is killed and
its outcome says so, so that a hang is a failure and not a wait.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.forked_ranks import Outcome, run_forked
from tests.gpus import gpu_of, take_gpu

TWO_AND_TWO = ("nvidia", "nvidia", "amd", "amd")
THREE_AND_ONE = ("nvidia", "nvidia", "nvidia", "amd")
FOUR_AND_FOUR = ("nvidia",) * 4 + ("amd",) * 4
IN_TURN = ("nvidia", "amd", "nvidia", "amd", "amd")

TIMEOUT = 60.0
PATIENCE = 240.0


@dataclass(frozen=True)
class Side:
    """What a scenario has."""

    rank: int
    size: int
    store: dist.Store
    """For the scenario's own use."""
    options: dict[str, Any]

    def say(self, what: str) -> None:
        self.store.set(what, "1")

    def hear(self, what: str, seconds: float = TIMEOUT) -> None:
        self.store.wait([what], timedelta(seconds=seconds))


Scenario = Callable[[Side], Any]


def run_ranks(
    scenario: Scenario,
    vendors: Sequence[str],
    *,
    timeout: float = TIMEOUT,
    patience: float = PATIENCE,
    backend: str | None = "hetero",
    **options: Any,
) -> list[Outcome]:
    """Every rank's outcome, by rank. The default group is there, unless `backend` is None."""
    with tempfile.TemporaryDirectory() as folder:
        return run_forked(
            _live,
            [
                (scenario, tuple(vendors), rank, folder, timeout, backend, options)
                for rank in range(len(vendors))
            ],
            patience=patience,
        )


def open_group(side: Side, *, seconds: float = TIMEOUT) -> None:
    """Open the default group in a scenario that was started without one."""
    dist.init_process_group(
        "hetero",
        store=dist.PrefixStore("group", side.store),
        rank=side.rank,
        world_size=side.size,
        timeout=timedelta(seconds=seconds),
    )


def _live(
    scenario: Scenario,
    vendors: tuple[str, ...],
    rank: int,
    folder: str,
    timeout: float,
    backend: str | None,
    options: dict[str, Any],
    result: Connection,
) -> None:
    """One process: its vendor, its group, the scenario, and an end without ceremony."""
    code = 0
    side = None
    os.environ["HETERO_VENDOR"] = vendors[rank]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.set_num_threads(1)
    if options.get("on_gpus"):
        take_gpu(rank, len(vendors))
    try:
        import hetero

        hetero.register()
        store = dist.FileStore(f"{folder}/store", len(vendors))
        side = Side(rank, len(vendors), dist.PrefixStore("side", store), options)
        if backend is not None:
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("group", store),
                rank=rank,
                world_size=len(vendors),
                timeout=timedelta(seconds=timeout),
                # As scripts for GPUs do it: the default group is bound to the rank's own.
                device_id=gpu_of(rank) if options.get("on_gpus") else None,
            )
        result.send((scenario(side), None))
        _meet_at_the_end(side)
    except Exception as error:
        result.send((None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        code = 1
        if side is not None:
            side.say(f"end/{rank}")
    result.close()
    os._exit(code)


def _meet_at_the_end(side: Side) -> None:
    """Stay until every rank has ended: what one has sent may still be on its way out of it."""
    side.say(f"end/{side.rank}")
    side.store.wait([f"end/{rank}" for rank in range(side.size)], timedelta(seconds=TIMEOUT))
