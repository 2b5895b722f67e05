"""The links of one group, to ranks of any vendor, opened when a pair first needs one.

The only file of this package that knows hetero.link.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from hetero.collectives.vendor_layout import Layout
from hetero.errors import LinkError
from hetero.link.base import Link, as_bytes
from hetero.link.base import Work as Transfer
from hetero.link.connect import connect
from hetero.link.open import ChannelOptions
from hetero.link.ring_exchange import Message, RingExchange, begin

NICS_VARIABLE = "HETERO_NICS"
"""The rails of this rank, as --hetero-nics names them."""
RING_BYTES = {"cpu": 16 << 20, "cuda": 64 << 20}
"""Of a link, both directions."""
_CLOSE_SECONDS = 2.0
_GRACE_SECONDS = 2.0
"""More than the peer's own deadline, whose end says more."""

__all__ = ["Link", "Links", "Message", "RingExchange", "Transfer", "as_bytes", "begin", "clone"]


class Links:
    """One rank's links of one purpose. `to` is for one thread at a time for each peer.

    Args:
        store: this purpose's own: each pair meets in it.
        timeout: seconds for a peer to come, and before a blocked transfer is an error.
        look: called now and then while a peer is waited for; raises to give it up.
    """

    def __init__(
        self,
        *,
        layout: Layout,
        store: dist.Store,
        device: torch.device,
        timeout: float,
        look: Callable[[], None],
    ) -> None:
        self._layout, self._store = layout, store
        self._device, self._timeout, self._look = device, timeout, look
        self._open: dict[int, Link] = {}
        self.closed = threading.Event()
        """Set at the end; a link that is being opened is then given up."""

    def to(self, rank: int, *, store: dist.Store | None = None) -> Link:
        """The link to a rank of the group. Both ends have to ask for it.

        Args:
            store: this purpose's, to wait in over a connection of its own.
        """
        link = self._open.get(rank)
        if link is None:
            link = self._open[rank] = self._opened(rank, clone(store) if store else self._store)
        return link

    def set_timeout(self, seconds: float) -> None:
        """For links to come, and for what those that are open carry from now on."""
        self._timeout = seconds
        for link in list(self._open.values()):
            link.description = replace(link.description, timeout=seconds)

    def is_open_to(self, rank: int) -> bool:
        return rank in self._open

    def _opened(self, rank: int, store: dist.Store) -> Link:
        here, there = (self._layout.members[r].global_rank for r in (self._layout.rank, rank))
        deadline = time.monotonic() + self._timeout + _GRACE_SECONDS

        def look() -> None:
            self._look()
            if self.closed.is_set():
                raise RuntimeError("the links of this group are closed; make a new group")
            if time.monotonic() > deadline:
                raise LinkError(
                    f"link rank {here} - rank {there} could not be opened within "
                    f"{self._timeout:g} s; see the log of rank {there}"
                )

        if self.closed.is_set():
            look()
        names = [name for name in os.environ.get(NICS_VARIABLE, "").split(",") if name]
        return connect(
            store,
            rank=here,
            peer=there,
            device=self._device,
            timeout=self._timeout,
            nics=names,
            options=ChannelOptions(ring_bytes=RING_BYTES[self._device.type]),
            look=look,
        )

    def across(self) -> list[Link]:
        """Those to ranks of other vendors that are open by now."""
        here = self._layout.vendor
        return [link for rank, link in self._open.items() if self._layout.vendor_of(rank) != here]

    def check(self) -> None:
        """Raise what broke a link, if anything did: a GPU's transfers fail after their `wait()`."""
        for link in self._open.values():
            link.check()

    def close(self) -> None:
        """Close every link, each in a thread: one whose peer does not listen waits for it."""
        self.closed.set()
        closing = [threading.Thread(target=link.close, daemon=True) for link in self._open.values()]
        self._open.clear()
        for thread in closing:
            thread.start()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in closing:
            thread.join(max(0.0, deadline - time.monotonic()))


def clone(store: dist.Store) -> dist.Store:
    """The same store over a connection of its own: a wait in one holds up all its other users."""
    return store.clone()  # type: ignore[attr-defined]
