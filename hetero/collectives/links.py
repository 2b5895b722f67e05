"""The links of one group, and the sends and receives of a call over them.

A link opens when a pair of ranks first needs it. Each message has the tag of its call, and a link
rejects one whose tag is not that of the receiver's call: ranks that call different operations get
an error instead of each other's bytes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from hetero.collectives.layout import Layout, Segment, copy_segment, same_memory
from hetero.collectives.vendor_library import VendorLibrary
from hetero.errors import LinkError
from hetero.link.base import Link
from hetero.link.base import Work as Transfer
from hetero.link.nics import find_nics
from hetero.link.open import ChannelOptions, connect
from hetero.link.ring_exchange import Message, RingExchange
from hetero.startup.addresses import address_towards
from hetero.startup.store import BoundedStore, as_link_error

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
        on_first_crossing: called with the first link to a rank of another vendor.
    """

    def __init__(
        self,
        *,
        layout: Layout,
        store: dist.Store,
        device: torch.device,
        timeout: float,
        check_abort: Callable[[int], None],
        on_first_crossing: Callable[[Link], None] = lambda _: None,
    ) -> None:
        self._on_crossing: list[Callable[[Link], None]] = [on_first_crossing]
        self._layout, self._store = layout, store
        self._device, self._timeout, self._check_abort = device, timeout, check_abort
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
                if self._on_crossing and self._layout.vendor_of(rank) != self._layout.vendor:
                    self._on_crossing.pop()(link)
                if self.closed.is_set():  # `close`, in another thread, may not have seen it
                    link.close()
            return link

    def set_timeout(self, seconds: float) -> None:
        """For links opened later, and for later transfers of those that are open."""
        self._timeout = seconds
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
            timeout=self._timeout,
            nics=nic_names(),
            options=ChannelOptions(ring_bytes=RING_BYTES[self._device.type]),
            check_abort=partial(self.check_peer, rank),
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
    # PyTorch tries for minutes to connect to a store that has gone.
    with as_link_error("no more links can be opened"):
        BoundedStore(store).check(["host"])
    return store.clone()  # type: ignore[attr-defined]


_WAIT_SPIN_MICROSECONDS = 500
_POLL_MICROSECONDS = 200
"""About what handing the rest of a call over to another thread costs a slow CPU."""
_COPY_FIRST_BYTES = {"cpu": 64 << 10, "cuda": 32 << 20}
"""Up to this size a rank's own row is copied before the batch is issued, which then takes one call
into C. A GPU copies this in 25 us, less than issuing the batch separately takes in Python.
"""


class CallContext:
    """What a group's algorithms work with, one call at a time. Peers are ranks of the group."""

    def __init__(
        self,
        *,
        layout: Layout,
        library: VendorLibrary | None,
        links: Links,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.library = library
        """None if this rank is the only one of its vendor."""
        self.device = device
        self.links = links
        self.tag = 0
        """The current call's."""
        self.may_block = True
        """Whether the calling thread may wait for a peer."""
        self.ring = RingExchange()

    def compare_tags_within_vendor(self) -> None:
        """Raise LinkError if a rank of this vendor has made another call; gloo does not compare.

        Call it before anything of the call is given to the vendor's library.
        """
        batch, empty = P2PBatch(self), torch.empty(0, dtype=torch.uint8, device=self.device)
        for is_receive in (False, True):
            batch.ops += [
                (rank, empty, 0, 0, is_receive) for rank in self.layout.intra_vendor_peers
            ]
        batch.wait()


class P2PBatch:
    """Sends and receives that are issued together, as torch's `batch_isend_irecv` does.

    Do not change what is sent before the batch has been waited for.
    """

    __slots__ = ("_context", "_followers", "_pending", "ops")

    def __init__(self, context: CallContext) -> None:
        self._context = context
        self.ops: list[tuple[int, torch.Tensor, int, int, bool]] = []
        """Peer, contiguous memory, offset and size in bytes, whether it is a receive."""
        self._pending: Sequence[Transfer] | None = None
        """None until the batch is issued."""
        self._followers: Sequence[P2PBatch] = ()

    def issue_with(self, followers: Sequence[P2PBatch]) -> None:
        """Have other batches issued in one call with this one, and each waited for by itself.

        So Python need not issue anything between one batch's end and the next one's.
        """
        self._followers = followers

    def send(self, rank: int, memory: torch.Tensor, offset: int = 0, nbytes: int = -1) -> None:
        """Add a send of contiguous memory, or of `nbytes` of it; no-op if that is 0."""
        if nbytes < 0:
            nbytes = memory.nbytes
        if nbytes:
            self.ops.append((rank, memory, offset, nbytes, False))

    def recv(self, rank: int, memory: torch.Tensor, offset: int = 0, nbytes: int = -1) -> None:
        """Add a receive into contiguous memory, or into `nbytes` of it; no-op if that is 0."""
        if nbytes < 0:
            nbytes = memory.nbytes
        if nbytes:
            self.ops.append((rank, memory, offset, nbytes, True))

    def copy(self, target: Segment, source: Segment) -> None:
        """Copy what this rank has for itself: before a small batch is issued, during a large one.

        No-op if both are the same memory.
        """
        if not same_memory(target, source):
            if source[2] > _COPY_FIRST_BYTES[source[0].device.type]:
                self.start()
            copy_segment(target, source)

    def start(self) -> None:
        """Issue the batch now, to overlap it with what the caller does before `wait()`."""
        if (messages := self._messages()) is not None:
            self._share_out(self._context.ring.start(messages, tag=self._context.tag))

    def _share_out(self, left: Sequence[Transfer]) -> None:
        """Give each batch what is left to wait for of its own; the followers' comes last."""
        end = len(left)
        for batch in reversed(self._followers):
            begin = end - len(batch.ops)
            batch._pending, end = left[begin:end], begin
        self._pending = left[:end]

    def _messages(self) -> list[Message] | None:
        """None if a link has to be opened first and the calling thread may not wait for that."""
        links, ops = self._context.links, self.ops
        if self._followers:
            ops = [op for batch in (self, *self._followers) for op in batch.ops]
        by_rank = links.by_rank
        try:  # mostly all are open
            return [(by_rank[op[0]], *op[1:]) for op in ops]
        except KeyError:
            if not self._context.may_block:
                return None
        return [(links.to(op[0]), *op[1:]) for op in ops]

    def wait(self) -> None:
        """Order the current stream after the transfers; on a CPU, block until they are done."""
        if not self.poll(_WAIT_SPIN_MICROSECONDS):
            for transfer in self._pending or ():
                transfer.wait()
            self._pending = ()

    def poll(self, microseconds: int = _POLL_MICROSECONDS) -> bool:
        """Issue the batch if it is not, and poll that long; whether nothing is left to wait for."""
        if self._pending is None:
            if (messages := self._messages()) is None:
                return False
            self._pending = ()
            if messages:
                self._share_out(
                    self._context.ring.order(
                        messages,
                        tag=self._context.tag,
                        microseconds=microseconds,
                        waited=len(self.ops),
                    )
                )
        elif self._pending and self._context.ring.progress(
            self._pending, microseconds=microseconds
        ):
            self._pending = ()
        return not self._pending


Schedule = Iterator[P2PBatch]
"""The steps of a call: each yielded batch has to be waited for before the next step.

The consumer may wait in its own thread or leave the remaining steps to another one.
"""


_Chunk = TypeVar("_Chunk")


def overlapped(
    pipeline: Sequence[_Chunk], steps: Sequence[tuple[int, Callable[[_Chunk], Schedule]]]
) -> Schedule:
    """Run the steps of every chunk in their order, and other chunks' between them.

    Args:
        steps: each with its lag: by how many chunks it is behind the first step.
    """
    most = max(lag for lag, _ in steps)
    for number in range(len(pipeline) + most):
        for lag, step in steps:
            if 0 <= number - lag < len(pipeline):
                yield from step(pipeline[number - lag])
