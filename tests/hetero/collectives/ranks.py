"""Runs a scenario on real processes, each of which plays a rank of a simulated vendor.

The processes are forks of one that has imported torch. What a scenario returns, or the exception
it ends with, comes back as that rank's `Outcome`. A process that does not end in time is killed and
its outcome says so, so that a hang is a failure and not a wait.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

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


@dataclass(frozen=True)
class Outcome:
    """How one process ended: with a value, with an exception, or with neither."""

    value: Any = None
    error: str | None = None
    exit_code: int | None = None
    hung: bool = False


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
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "torch.distributed", "hetero.collectives.process_group", "hetero.cluster"]
    )
    deadline = time.monotonic() + patience
    with tempfile.TemporaryDirectory() as folder:
        ends: list[Connection] = []
        processes = []
        for rank in range(len(vendors)):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_live,
                args=(scenario, tuple(vendors), rank, folder, timeout, backend, options, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        outcomes = []
        for end, process in zip(ends, processes, strict=True):
            value, error, hung = None, None, False
            try:
                if end.poll(max(0.0, deadline - time.monotonic())):
                    value, error = end.recv()
            except EOFError:  # it ended without a word
                pass
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                hung = True
                process.kill()
                process.join()
            outcomes.append(Outcome(value, error, process.exitcode, hung))
            end.close()
        return outcomes


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """What all ranks returned; fails the test when one did not end well."""
    errors = [f"rank {r}: {o.error}" for r, o in enumerate(outcomes) if o.error is not None]
    assert not errors, "\n".join(errors)
    codes = ["hung" if outcome.hung else outcome.exit_code for outcome in outcomes]
    assert codes == [0] * len(codes), f"the ranks ended with {codes}"
    return [outcome.value for outcome in outcomes]


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
        torch.cuda.set_device(rank)
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
