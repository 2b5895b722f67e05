"""Counts what the start of a job costs a rank, for any number of ranks, in one process.

The ranks that are counted run what they run in a job. The others are played: they put into the
store what they would have put there.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from hetero.pipeline.groups import planned_groups
from hetero.plan import Mesh, Plan
from hetero.startup.exchange import Exchange, JobExchanges
from hetero.startup.store import BoundedStore

_PATIENCE = 300.0
_COUNTED = "hetero/exchange"
_FIRST = f"{_COUNTED} 1"

Payloads = Callable[[int], Mapping[str, Any]]
"""What each rank tells."""


class DictStore:
    """The rendezvous store, in one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytearray] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = bytearray(value.encode())
            self._changed.notify_all()

    def append(self, key: str, value: str) -> None:
        with self._changed:
            self._values.setdefault(key, bytearray()).extend(value.encode())
            self._changed.notify_all()

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            number = int(self._values.get(key, b"0")) + amount
            self._values[key] = bytearray(str(number).encode())
            self._changed.notify_all()
            return number

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        with self._changed:
            if self._values.get(key, b"") == expected_value.encode():
                self._values[key] = bytearray(desired_value.encode())
                self._changed.notify_all()
            return bytes(self._values[key])

    def get(self, key: str) -> bytes:
        return bytes(self._values[key])

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        with self._changed:
            there = self._changed.wait_for(lambda: self.check(keys), timeout.total_seconds())
        if not there:
            raise RuntimeError(f"timed out on {keys}")

    def clone(self) -> Any:
        return self


class CountedStore:
    """One rank's connection to a store, which counts the operations on its exchanges."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.operations: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def counted(key: Any, *rest: Any) -> Any:
            first = key if isinstance(key, str) else key[0]
            if first.startswith(_COUNTED):
                self.operations[name] += 1
            return method(key, *rest)

        return counted

    def clone(self) -> CountedStore:
        return self


def count_exchange(world_size: int, payload_of: Payloads) -> dict[str, Any]:
    """The store operations of one exchange: of rank 0, of the rank that comes last, and of another.

    Also the bytes of the outcome, as every rank reads it, and the seconds from the last rank's
    coming until it knows the outcome. At least three ranks.
    """
    store = DictStore()
    played = BoundedStore(store, seconds=_PATIENCE)
    for rank in range(2, world_size - 1):
        exchange = Exchange(played, "command lines", member=rank, size=world_size, key=_FIRST)
        exchange.arrive()
        exchange.submit(payload_of(rank))
    counted = {rank: CountedStore(store) for rank in (1, 0, world_size - 1)}
    with ThreadPoolExecutor(len(counted)) as pool:
        ends: list[Future[None]] = []
        for number, (rank, own) in enumerate(counted.items(), start=world_size - 2):
            began = time.perf_counter()
            ends.append(pool.submit(_exchange, own, rank, world_size, payload_of))
            while _count(store, f"{_FIRST}/count") < number:
                time.sleep(0.001)
        for end in ends:
            end.result(_PATIENCE)
        seconds = time.perf_counter() - began
    return {
        "rank 0": dict(counted[0].operations),
        "another": dict(counted[1].operations),
        "the last": dict(counted[world_size - 1].operations),
        "bytes of the outcome": len(store.get(f"{_FIRST}/outcome")),
        "seconds until known": round(seconds, 3),
    }


def _count(store: DictStore, key: str) -> int:
    return int(store.get(key)) if store.check([key]) else 0


def _exchange(store: CountedStore, rank: int, world_size: int, payload_of: Payloads) -> None:
    exchanges = JobExchanges(store, rank=rank, world_size=world_size, timeout=_PATIENCE)
    told = exchanges.exchange("command lines", payload=payload_of(rank))
    if told != [json.loads(json.dumps(payload_of(rank))) for rank in range(world_size)]:
        raise RuntimeError(f"rank {rank} heard something else than what was told")


def two_meshes(*, stages: int, tensor: int, data: int) -> Plan:
    """A plan of two vendors, half of the stages each."""
    meshes = tuple(
        Mesh(vendor, stages=stages // 2, tensor=tensor, data=data) for vendor in ("amd", "nvidia")
    )
    return Plan(meshes=meshes, layers=((1,),) * stages)


def count_groups(plan: Plan) -> dict[str, Any]:
    """The groups of the whole job, and those that one rank creates."""
    names: set[str] = set()
    created: list[int] = []
    crossing: list[int] = []
    began = time.perf_counter()
    for rank in range(plan.world_size):
        groups = set(planned_groups(plan, rank, vendor_backend="nccl").values()) - {None}
        names |= {group.name for group in groups if group is not None}
        created.append(sum(len(group.ranks) > 1 for group in groups if group is not None))
        crossing.append(sum(group.crosses for group in groups if group is not None))
    return {
        "groups of the job": len(names),
        "groups of more than one that a rank creates, at most": max(created),
        "of those across vendors, at most": max(crossing),
        "seconds a rank needs to find its own": round(
            (time.perf_counter() - began) / plan.world_size, 5
        ),
    }
