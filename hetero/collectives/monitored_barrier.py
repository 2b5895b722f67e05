"""`monitored_barrier` over the store alone: names the missing ranks, in gloo's words."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from hetero.startup.store import BoundedStore

_GRACE_SECONDS = 2.0
_PASSED, _FAILED = "passed", "failed"


class MonitoredBarrier:
    """The monitored barriers of one group, numbered alike on all its ranks."""

    def __init__(self, store: dist.Store, *, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._count = 0

    def wait(self, timeout: timedelta, *, wait_all_ranks: bool = False) -> None:
        """Rank 0 waits for all others, which wait for its verdict. RuntimeError names the missing.

        Args:
            wait_all_ranks: name all missing ranks, not only the first.
        """
        self._count += 1
        store = BoundedStore(self._store, seconds=timeout.total_seconds() + _GRACE_SECONDS)
        name = f"monitored barrier {self._count}"
        if self._rank:
            self._report_to_rank_0(store, name, timeout)
            return
        missing: list[int] = []
        deadline = time.monotonic() + timeout.total_seconds()
        for rank in range(1, self._size):
            if not missing and time.monotonic() > deadline:
                store.set(f"{name}/verdict", _FAILED)
                raise RuntimeError(
                    f"Rank 0 timed out in monitoredBarrier after {timeout}; give it more time"
                )
            if not _comes(store, f"{name}/{rank}", seconds=deadline - time.monotonic()):
                missing.append(rank)
                if not wait_all_ranks:
                    break
        store.set(f"{name}/verdict", _FAILED if missing else _PASSED)
        if missing:
            noun = "Ranks" if wait_all_ranks else "Rank"
            names = ", ".join(map(str, missing))
            raise RuntimeError(
                f"{noun} {names} failed to pass monitoredBarrier in {timeout}; see the log there"
            )

    def _report_to_rank_0(self, store: BoundedStore, name: str, timeout: timedelta) -> None:
        store.set(f"{name}/{self._rank}", "reached")
        verdict, seconds = f"{name}/verdict", timeout.total_seconds() + _GRACE_SECONDS
        if not _comes(store, verdict, seconds=seconds) or store.get(verdict).decode() != _PASSED:
            raise RuntimeError(
                f"Rank {self._rank} successfully reached monitoredBarrier, but received errors "
                "while waiting for send/recv from rank 0; see what rank 0 says"
            )


def _comes(store: BoundedStore, key: str, *, seconds: float) -> bool:
    try:
        store.wait([key], timedelta(seconds=seconds))
    except dist.DistStoreError:
        return False
    return True
