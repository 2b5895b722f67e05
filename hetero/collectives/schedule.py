"""The contract of an algorithm of the group, and what algorithms are written in.

An algorithm is a generator. It gets the `CallContext` of its group and yields a `P2PBatch` at each
point where it has to wait for ranks of other vendors. The consumer (`RunningCall`) waits for that
batch and then resumes the generator, possibly in another thread. Between two batches an algorithm
calls the vendor's library, which is `context.library`.

Every message carries the tag of its call, and a link rejects a message with the tag of another
call, so ranks that call different operations get an error instead of each other's bytes. The
library does not check: gloo aborts the process or hangs. So an algorithm does nothing before the
generator is first advanced, and makes no library call before that: on a CPU the tags have been
compared within the vendor by then.

`HeteroProcessGroup._run` takes three lists of tensors with an algorithm:

- `common`: dtype and number of elements must be the same on all ranks. They are part of the tag.
- `tensors`: what the handle returns as its result. They stay alive until the call is done.
- `results`: those of `tensors` that the algorithm writes on this rank, in memory without overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from hetero.collectives.layout import (
    Layout,
    Segment,
    copy_segment,
    equal_parts,
    pad_to_multiple,
    same_memory,
)
from hetero.collectives.links import Links
from hetero.collectives.sizes import sizes_for
from hetero.collectives.vendor_library import LibraryWork, VendorLibrary
from hetero.link.base import Work as Transfer
from hetero.link.ring_exchange import Message, RingExchange

_WAIT_SPIN_MICROSECONDS = 500
_POLL_MICROSECONDS = 200
"""About what handing the rest of a call over to another thread costs a slow CPU."""


class CallContext:
    """What the algorithms of a group share. It serves one call at a time."""

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
        self.sizes = sizes_for(layout, device)
        self.links = links
        self.tag = 0
        """Of the current call."""
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

    Peers are ranks of the group. Memory that is sent must not change before the batch is done.
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

        Python then issues nothing between the end of one batch and the end of the next.
        """
        self._followers = followers

    def send(self, rank: int, memory: torch.Tensor, offset: int = 0, nbytes: int = -1) -> None:
        """Add a send of contiguous memory, or of `nbytes` of it; no-op if `nbytes` is 0."""
        if nbytes < 0:
            nbytes = memory.nbytes
        if nbytes:
            self.ops.append((rank, memory, offset, nbytes, False))

    def recv(self, rank: int, memory: torch.Tensor, offset: int = 0, nbytes: int = -1) -> None:
        """Add a receive into contiguous memory, or into `nbytes` of it; no-op if `nbytes` is 0."""
        if nbytes < 0:
            nbytes = memory.nbytes
        if nbytes:
            self.ops.append((rank, memory, offset, nbytes, True))

    def copy(self, target: Segment, source: Segment) -> None:
        """Copy what this rank has for itself: before a small batch is issued, during a large one.

        No-op if both are the same memory.
        """
        if not same_memory(target, source):
            if source[2] > self._context.sizes.copy_first:
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
        """Returns None if a link has to be opened first and the calling thread must not block."""
        links, ops = self._context.links, self.ops
        if self._followers:
            ops = [op for batch in (self, *self._followers) for op in batch.ops]
        by_rank = links.by_rank
        try:  # mostly all are open
            return [
                (by_rank[rank], memory, offset, nbytes, is_receive)
                for rank, memory, offset, nbytes, is_receive in ops
            ]
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
        """Issue the batch if needed, and poll that long; returns True once all of it is done."""
        context = self._context
        if self._pending is None:
            if (messages := self._messages()) is None:
                return False
            self._pending = ()
            if messages:
                left = context.ring.order(
                    messages, tag=context.tag, microseconds=microseconds, waited=len(self.ops)
                )
                if left or self._followers:
                    self._share_out(left)
        elif self._pending and context.ring.progress(self._pending, microseconds=microseconds):
            self._pending = ()
        return not self._pending


Schedule = Iterator[P2PBatch]
"""A started algorithm: each batch must be done before the next one is asked for."""
Algorithm = Callable[[CallContext], Schedule]

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


class ShardedChunk:
    """One chunk of an all-reduce or a broadcast: its shards, and the steps at its end.

    Derived classes add the steps before, which fill the shards.
    """

    def __init__(self, context: CallContext, target: torch.Tensor, *, ahead: int) -> None:
        """`ahead`: how many chunks are in flight beside it."""
        layout = context.layout
        self._context, self._target, self._ahead = context, target, ahead
        self._padded = pad_to_multiple(target, layout.alignment)
        self._spans = tuple(
            equal_parts(self._padded.numel(), len(ranks)) for ranks in layout.vendors
        )
        self._span = self._spans[layout.vendor][layout.vendor_rank]
        self._shard = self._padded
        self._library_work: LibraryWork | None = None
        self._batch = P2PBatch(context)

    def all_gather_within(self) -> Schedule:
        """Once the shards have come, gather those of this vendor."""
        yield self._batch
        if (library := self._context.library) is not None:
            self._library_work = library.all_gather(self._padded, self._shard)

    def finish(self) -> Schedule:
        self._wait_for_library()
        if self._padded is not self._target:
            self._target.copy_(self._padded[: self._target.numel()])
        # Free the memory now: that of all chunks together is as large as the tensor.
        self._padded = self._shard = self._target
        self._batch = P2PBatch(self._context)
        yield from ()

    def _start_batch(self) -> None:
        if self._ahead:
            self._batch.start()

    def _wait_for_library(self) -> None:
        if self._library_work is not None:
            self._library_work.wait()
            self._library_work = None
