"""The links of one group to ranks of other vendors, opened when a pair first needs one.

The only file of this package that knows hetero.link.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from hetero.collectives.layout import Layout
from hetero.link.auto import open_fastest
from hetero.link.base import Link, LinkDescription, as_bytes
from hetero.link.base import Work as Transfer
from hetero.link.handshake import Meeting
from hetero.link.names import FAMILIES
from hetero.link.nics import find_nics
from hetero.link.paths import ChannelOptions

NICS_VARIABLE = "HETERO_NICS"
_RING_BYTES = 16 << 20
_MEETING_SECONDS = 120.0
_CLOSE_SECONDS = 2.0

__all__ = ["Link", "Links", "Transfer", "as_bytes", "clone"]


@functools.cache
def _channel() -> ChannelOptions:
    """How links are opened on this host; HETERO_NICS names its rails, as --hetero-nics does."""
    names = [name for name in os.environ.get(NICS_VARIABLE, "").split(",") if name]
    nics = find_nics(names, towards=os.environ.get("MASTER_ADDR", "127.0.0.1"))
    return ChannelOptions(ring_bytes=_RING_BYTES, addresses=nics.addresses, rdma_devices=nics.rdma)


class Links:
    """One rank's links of one purpose. `to` is for one thread at a time for each peer."""

    def __init__(
        self,
        *,
        layout: Layout,
        store: dist.Store,
        name: str,
        secret: bytes,
        device: torch.device,
        timeout: float,
        meeting_seconds: float | None = None,
    ) -> None:
        self._layout, self._store, self._name = layout, store, name
        self._secret, self._device = secret, device
        self._timeout = timeout
        self._meeting_seconds = meeting_seconds or min(timeout, _MEETING_SECONDS)
        self._open: dict[int, Link] = {}
        self._closed = False

    def to(self, rank: int, *, store: dist.Store | None = None) -> Link:
        """The link to a rank of the group. Both ends have to ask for it."""
        link = self._open.get(rank)
        if link is None:
            link = self._open[rank] = self._opened(rank, store or self._store)
        return link

    def _opened(self, rank: int, store: dist.Store) -> Link:
        if self._closed:
            raise RuntimeError(f"the links of {self._name} are closed; make a new group")
        here, there = (self._layout.members[r] for r in (self._layout.rank, rank))
        description = LinkDescription(
            rank=here.global_rank,
            peer=there.global_rank,
            stage=self._layout.vendor,
            peer_stage=self._layout.vendor_of(rank),
            job=self._secret.hex(),
            timeout=self._timeout,
        )
        low, high = sorted((here.rank, rank))
        meeting = Meeting(
            store=store,
            description=description,
            name=f"{self._name}/{low}-{high}",
            listens=here.rank == low,
            secret=self._secret,
            timeout=self._meeting_seconds,
        )
        return open_fastest(meeting, FAMILIES["auto"], options=_channel(), device=self._device).link

    def check(self) -> None:
        """Raise what broke a link, if anything did."""
        for link in list(self._open.values()):
            link.check()

    def close(self) -> None:
        """Close every link, each in a thread: one whose peer does not listen waits for it."""
        self._closed = True
        closing = [threading.Thread(target=link.close, daemon=True) for link in self._open.values()]
        self._open.clear()
        for thread in closing:
            thread.start()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in closing:
            thread.join(max(0.0, deadline - time.monotonic()))


LinkTo = Callable[[int], Link]


def clone(store: dist.Store) -> dist.Store:
    """The same store over a connection of its own: a wait in one holds up all its other users."""
    return store.clone()  # type: ignore[attr-defined]
