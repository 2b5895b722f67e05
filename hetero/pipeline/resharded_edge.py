"""An edge between stages of different layouts, with the interface of a link.

Each end has a tensor [sequence, micro-batch, hidden] of its own shape, and exchanges slabs of it
with several ranks of the other stage, each over its own link. Tensor-parallel ranks that hold the
same tensor send and receive a part each, and all-gather what they received.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.distributed as dist

from hetero.link.base import Link, Work
from hetero.pipeline.reshard import Layout, slabs

Piece = tuple[int, slice, slice]
"""Number of the peer in its stage; rows and sequences of a slab, counted from this rank's part."""


@dataclass(frozen=True)
class End:
    """One rank's end of an edge."""

    own: Layout
    other: Layout
    is_source: bool
    place: int
    """The rank's number in its stage."""
    sequence: int
    """Length of the whole sequence."""

    def peers(self) -> list[int]:
        """The ranks it exchanges slabs with, by number in the other stage."""
        return sorted({peer for peer, _, _ in self.pieces(self.own.micro_batch_size)})

    def pieces(self, micro_batch: int) -> tuple[Piece, ...]:
        """The slabs of a step of this micro-batch size, which evaluation may change."""
        return _pieces(self, micro_batch)


@lru_cache(maxsize=64)
def _pieces(end: End, micro_batch: int) -> tuple[Piece, ...]:
    own = replace(end.own, micro_batch_size=micro_batch)
    other = replace(end.other, micro_batch_size=own.batch // end.other.data)
    if end.is_source:
        return tuple(
            (slab.target, _slice(slab.source_rows), _slice(slab.source_batch))
            for slab in slabs(own, other, sequence=end.sequence)
            if slab.source == end.place
        )
    return tuple(
        (slab.source, _slice(slab.target_rows), _slice(slab.target_batch))
        for slab in slabs(other, own, sequence=end.sequence)
        if slab.target == end.place
    )


def _slice(interval: range) -> slice:
    return slice(interval.start, interval.stop)


class ReshardedEdge:
    """This rank's links to the ranks of the other stage that it exchanges slabs with.

    Args:
        links: by the number of the peer in its stage.
        tensor_group: this rank's tensor-parallel group, which gathers what all its ranks need.
    """

    def __init__(
        self, end: End, links: Mapping[int, Link], *, tensor_group: dist.ProcessGroup | None
    ) -> None:
        self._end, self._by_peer = end, links
        self._gathers_over = tensor_group if end.own.gathers else None
        self.links: list[Link] = list(links.values())
        self.transport = ", ".join(sorted({link.transport for link in self.links}))
        self.receives_ahead = all(link.receives_ahead for link in self.links)

    def send(self, tensor: torch.Tensor) -> Work:
        """Send every slab of the tensor; its memory must not change until all have gone."""
        part = tensor.detach()
        if self._gathers_over is not None:
            part = part[_slice(self._end.own.part(self._end.place, self._end.sequence))]
        return _AllOf([self._by_peer[p].send(part[r, b]) for p, r, b in self._pieces(tensor)])

    def recv(self, tensor: torch.Tensor) -> Work:
        """Receive into a contiguous tensor, which is complete after `wait()`.

        `wait()` is collective over the tensor-parallel ranks if they gather.
        """
        whole = part = tensor.detach()
        if self._gathers_over is not None:
            rows = self._end.own.part_rows(self._end.sequence)
            part = whole.new_empty((rows, *whole.shape[1:]))
        receives = []
        for peer, rows_, batch in self._pieces(tensor):
            target = part[rows_, batch]
            buffer = target if target.is_contiguous() else torch.empty_like(target).contiguous()
            receives.append(_SlabReceive(self._by_peer[peer].recv(buffer), buffer, target))
        return _Received(receives, part, whole, self._gathers_over)

    def _pieces(self, tensor: torch.Tensor) -> tuple[Piece, ...]:
        return self._end.pieces(tensor.shape[1])


@dataclass(frozen=True)
class _SlabReceive:
    work: Work
    buffer: torch.Tensor
    target: torch.Tensor


class _AllOf(Work):
    """Several transfers as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        # Poll all of them: polling requests progress.
        completed = [work.is_completed() for work in self._works]
        return all(completed)


class _Received(_AllOf):
    """Slab receives in flight, which `wait()` assembles."""

    def __init__(
        self,
        receives: Sequence[_SlabReceive],
        part: torch.Tensor,
        whole: torch.Tensor,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__([receive.work for receive in receives])
        self._receives, self._part, self._whole, self._group = receives, part, whole, group

    def wait(self) -> None:
        for receive in self._receives:
            receive.work.wait()
            if receive.buffer is not receive.target:
                receive.target.copy_(receive.buffer)
        if self._group is not None:
            _gather(self._part, self._whole, self._group)
        # Never run the collective twice: the other ranks take part once.
        self._works, self._receives, self._group = [], [], None


def _gather(part: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """All-gather the parts, which are equally long: the last ones may be padded."""
    rows = part.shape[0] * group.size()
    if rows == whole.shape[0]:
        dist.all_gather_into_tensor(whole, part, group=group)
        return
    table = part.new_empty((rows, *part.shape[1:]))
    dist.all_gather_into_tensor(table, part, group=group)
    whole.copy_(table[: whole.shape[0]])
