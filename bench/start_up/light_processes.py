"""Starts real processes that meet, agree and build groups as ranks do, and nothing else."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bench.start_up.counting import Payloads
from hetero.pipeline.groups import build_groups, open_world
from hetero.plan import Plan
from hetero.startup.exchange import JobExchanges
from hetero.startup.liveness import open_liveness
from hetero.tools.launching.interrupts import children_ignore_interrupts

_TIMEOUT = timedelta(minutes=5)
EXCHANGES = 7
"""As many as a run of a model without a checkpoint has."""


class CountedTorchStore(dist.Store):
    """A store that counts what is asked of it, by Python or by gloo."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store, self.operations = store, Counter[str]()

    def _counted(self, name: str, *values: Any) -> Any:
        self.operations[name] += 1
        return getattr(self._store, name)(*values)

    def set(self, key: str, value: Any) -> None:
        self._counted("set", key, value)

    def get(self, key: str) -> Any:
        return self._counted("get", key)

    def wait(self, *values: Any) -> None:
        self._counted("wait", *values)

    def check(self, keys: list[str]) -> Any:
        return self._counted("check", keys)

    def add(self, key: str, amount: int) -> Any:
        return self._counted("add", key, amount)

    def multi_get(self, keys: list[str]) -> Any:
        return self._counted("multi_get", keys)

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        return _TIMEOUT


def time_start(plan: Plan, payload_of: Payloads) -> dict[str, Any]:
    """Start a light process for every rank of a plan; what the slowest of them needed.

    They are forked from this process, which has imported torch: a rank's own imports are left out.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=plan.world_size)
    port = listener.getsockname()[1]
    context = multiprocessing.get_context("fork")
    told: Any = context.SimpleQueue()
    processes = [
        context.Process(target=_live, args=(rank, plan, payload_of(rank), port, told), daemon=True)
        for rank in range(plan.world_size)
    ]
    with children_ignore_interrupts():
        # Until a process has an answer of its own: one lost in the midst of a fork ends nothing.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            for process in processes:
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    # Only now: a fork beside the server's thread may copy a lock that the thread holds.
    server = dist.TCPStore(
        *("127.0.0.1", port, 1, True, _TIMEOUT),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    found: list[dict[str, Any]] = []
    while len(found) < plan.world_size:
        while told.empty():
            if failed := [p.exitcode for p in processes if p.exitcode]:
                raise RuntimeError(f"a rank ended with {failed[0]}; see above")
            time.sleep(0.01)
        found.append(told.get())
    for process in processes:
        process.join()
    del server
    operations = [entry.pop("operations for groups") for entry in found]
    return {
        **{name: round(max(entry[name] for entry in found), 3) for name in found[0]},
        "store operations for groups, at most": max(sum(o.values()) for o in operations),
    }


def _live(rank: int, plan: Plan, payload: Mapping[str, Any], port: int, told: Any) -> None:
    # The tool's own answer would wait for what this process waits for in C.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, False, _TIMEOUT, wait_for_workers=False)
    liveness = open_liveness(store, rank=rank, world_size=plan.world_size, master="127.0.0.1")
    exchanges = JobExchanges(
        store,
        rank=rank,
        world_size=plan.world_size,
        timeout=_TIMEOUT.total_seconds(),
        liveness=liveness,
    )
    exchanges.exchange("start", joining=True)  # The processes are started one after another.
    began = time.perf_counter()
    for number in range(EXCHANGES):
        exchanges.exchange(f"values {number}", payload=payload)
    agreed = time.perf_counter()
    counted = CountedTorchStore(dist.PrefixStore("groups", store))
    with exchanges.section("process groups"):
        open_world("gloo", store=counted, rank=rank, world_size=plan.world_size, timeout=_TIMEOUT)
        build_groups(plan, rank, vendor_backend="gloo", timeout=_TIMEOUT)
    built = time.perf_counter()
    told.put(
        {
            f"seconds for {EXCHANGES} exchanges": agreed - began,
            "seconds for groups": built - agreed,
            "operations for groups": counted.operations,
        }
    )
    dist.barrier()
    liveness.leave()
    # Nothing of another rank's is needed any more.
    os._exit(0)
