"""The sends and receives of one call between ranks of a group, each with the call's tag.

A link rejects a message whose tag is not that of the receiver's call, so ranks that call different
operations get an error instead of each other's bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hetero.collectives.group_links import Links, Message, RingExchange, Transfer
from hetero.collectives.intra_vendor import VendorLibrary
from hetero.collectives.memory_segments import Segment, copy_segment, same_memory
from hetero.collectives.vendor_layout import Layout

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
