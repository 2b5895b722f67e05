"""What a monitored barrier says, in gloo's words."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from hetero.collectives.monitored_barrier import MonitoredBarrier

SHORT = timedelta(seconds=0.2)


def barrier(store: dist.Store, rank: int) -> MonitoredBarrier:
    return MonitoredBarrier(store, rank=rank, size=4)


def test_all_ranks_pass_together_and_again() -> None:
    store = dist.HashStore()
    barriers = [barrier(store, rank) for rank in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            waits = [pool.submit(one.wait, timedelta(seconds=20)) for one in barriers]
            for wait in waits:
                wait.result()


@pytest.mark.parametrize(
    ("wait_all_ranks", "message"),
    [
        (False, "Rank 2 failed to pass monitoredBarrier in 0:00:00.2"),
        (True, "Ranks 2, 3 failed to pass monitoredBarrier in 0:00:00.2"),
    ],
)
def test_missing_ranks_are_named(wait_all_ranks: bool, message: str) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor() as pool:
        present = pool.submit(barrier(store, 1).wait, SHORT)
        with pytest.raises(RuntimeError, match=message):
            barrier(store, 0).wait(SHORT, wait_all_ranks=wait_all_ranks)
        with pytest.raises(RuntimeError, match="Rank 1 successfully reached monitoredBarrier"):
            present.result()


def test_a_rank_0_without_time_says_so_and_blames_nobody() -> None:
    with pytest.raises(RuntimeError, match="Rank 0 timed out in monitoredBarrier after 0:00:00"):
        barrier(dist.HashStore(), 0).wait(timedelta(0))
