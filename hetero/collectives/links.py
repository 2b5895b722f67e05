"""The links of one rank of a group to the other ranks, each opened when both ends first need it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from hetero.collectives.layout import Layout
from hetero.errors import LinkError
from hetero.link.base import Link
from hetero.link.nics import find_nics
from hetero.link.open import ChannelOptions, connect
from hetero.startup.addresses import address_towards
from hetero.startup.store import as_link_error, over_own_connection

NICS_VARIABLE = "HETERO_NICS"
"""The NICs that this rank's links use, in the format of --hetero-nics."""
RING_BYTES = {"cpu": 16 << 20, "cuda": 64 << 20}
"""Of one link, for both directions together, by type of device."""
_CLOSE_SECONDS = 2.0


class Links:
    """One rank's links for collectives, or for point-to-point messages.

    Args:
        store: for these links alone: each pair connects through it.
        timeout: seconds to wait for a peer, and until a blocked transfer is an error.
        check_abort: called with the peer every second while it is waited for; raises to abort.
        has_exited: returns whether a peer is known to have exited. Called from another thread; must
            not block.
    """

    def __init__(
        self,
        *,
        layout: Layout,
        store: dist.Store,
        device: torch.device,
        timeout: float,
        check_abort: Callable[[int], None],
        has_exited: Callable[[int], bool],
    ) -> None:
        self._layout, self._store = layout, store
        self._device, self.timeout = device, timeout
        self._check_abort, self._has_exited = check_abort, has_exited
        self.by_rank: dict[int, Link] = {}
        """The open ones."""
        self._opening = {rank: threading.Lock() for rank in range(layout.size)}
        self.closed = threading.Event()
        """Set by `close`, which aborts the opening of a link."""

    def to(self, rank: int) -> Link:
        """The link to a rank of the group, opened if it is not; both ends have to call it."""
        with self._opening[rank]:
            link = self.by_rank.get(rank)
            if link is None:
                link = self.by_rank[rank] = self._open(rank)
                if self.closed.is_set():  # `close`, in another thread, may not have seen it
                    link.close()
            return link

    def set_timeout(self, seconds: float) -> None:
        """For links opened later, and for later transfers of those that are open."""
        self.timeout = seconds
        for link in list(self.by_rank.values()):
            link.description = replace(link.description, timeout=seconds)

    def check_peer(self, rank: int) -> None:
        """Raise if there is no reason to wait for a peer any longer."""
        self._check_abort(rank)
        if self.closed.is_set():
            raise LinkError("the links of this group are closed; make a new group")

    def _open(self, rank: int) -> Link:
        own, peer = (self._layout.members[r].global_rank for r in (self._layout.rank, rank))
        if self.closed.is_set():
            self.check_peer(rank)
        return connect(
            self._store,
            rank=own,
            peer=peer,
            device=self._device,
            timeout=self.timeout,
            nics=nic_names(),
            options=ChannelOptions(ring_bytes=RING_BYTES[self._device.type]),
            check_abort=partial(self.check_peer, rank),
            has_exited=partial(self._has_exited, rank),
        )

    def inter_vendor(self) -> list[Link]:
        """The open links to ranks of other vendors."""
        own = self._layout.vendor
        links = list(self.by_rank.items())  # another thread may open one meanwhile
        return [link for rank, link in links if self._layout.vendor_of(rank) != own]

    def check(self) -> None:
        """Raise the error of a link that has failed: a GPU's transfers fail after `wait()`."""
        for link in list(self.by_rank.values()):
            link.check()

    def close(self) -> None:
        """Close all links in parallel: a link whose peer does not respond waits for it."""
        self.closed.set()
        closing = [
            threading.Thread(target=link.close, daemon=True) for link in list(self.by_rank.values())
        ]
        self.by_rank.clear()
        for thread in closing:
            thread.start()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in closing:
            thread.join(max(0.0, deadline - time.monotonic()))


def own_address(store_host: str) -> str:
    """The first of the addresses at which this rank's links listen."""
    return find_nics(nic_names(), own=address_towards(store_host)).addresses[0]


def nic_names() -> list[str]:
    """The NICs that the user has named for this rank's links; empty for those found."""
    return [name for name in os.environ.get(NICS_VARIABLE, "").split(",") if name]


def clone(store: dist.Store) -> dist.Store:
    """The same store over a new connection: a wait blocks all other users of its connection.

    Make few: PyTorch looks up the name of each end, and a host's first resolver may not answer.
    """
    with as_link_error("no more links can be opened"):
        return over_own_connection(store)
