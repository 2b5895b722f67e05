"""A barrier over a group's store that names the ranks that do not come."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from hetero.errors import ExchangeError
from hetero.startup.exchange import Exchange
from hetero.startup.store import BoundedStore

_GRACE_SECONDS = 2.0


def monitored_barrier(
    store: dist.Store,
    *,
    rank: int,
    size: int,
    number: int,
    timeout: timedelta,
    wait_all_ranks: bool,
) -> None:
    """Return once every rank has come. Raises RuntimeError, in gloo's words, if one does not.

    Args:
        number: of this barrier among those of the group; the same on all ranks.
        wait_all_ranks: whether the error names, on rank 0, all ranks that are missing, or one.
    """
    seconds = timeout.total_seconds()
    if rank:  # rank 0, which names the missing ones, gives up first
        seconds += _GRACE_SECONDS
    barrier = Exchange(
        BoundedStore(store, seconds=seconds + _GRACE_SECONDS),
        f"monitored barrier {number}",
        member=rank,
        size=size,
    )
    try:
        barrier.run(timeout=seconds)
    except ExchangeError as error:
        missing = [member for member in error.missing if member]
        if error.store_lost or not (rank or missing):
            text = str(error)
        elif rank:
            text = (
                f"Rank {rank} successfully reached monitoredBarrier, but received errors "
                "while waiting for send/recv from rank 0; see what rank 0 says"
            )
        elif not timeout:
            text = f"Rank 0 timed out in monitoredBarrier after {timeout}; give it more time"
        else:
            named = missing if wait_all_ranks else missing[:1]
            text = (
                f"{'Ranks' if wait_all_ranks else 'Rank'} {', '.join(map(str, named))} failed "
                f"to pass monitoredBarrier in {timeout}; see the log there"
            )
        raise RuntimeError(text) from error
