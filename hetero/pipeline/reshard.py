"""An edge between stages of different layouts, with the interface of a link.

Each end has a tensor [sequence, micro-batch, hidden] of its own shape, and exchanges slabs of it
with several ranks of the other stage, each over its own link. Tensor-parallel ranks that hold the
same tensor send and receive a part each, and all-gather what they received.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
import torch.distributed as dist

from hetero.link.base import Link, Work
from hetero.plan.plan import Layout, slabs

Piece = tuple[int, tuple[slice, ...], slice]
"""Number of the peer in its stage; rows and sequences of a slab, counted from this rank's part."""


@dataclass(frozen=True)
class End:
    """One rank's end of an edge."""

    own: Layout
    other: Layout
    place: int
    """The rank's number in its stage."""
    sequence: int
    """Length of the whole sequence."""

    def peers(self) -> list[int]:
        """The ranks it exchanges slabs with, by number in the other stage."""
        return [peer for peer, _, _ in _pieces(self, self.own.micro_batch_size)]


@lru_cache(maxsize=64)
def _pieces(end: End, micro_batch: int) -> tuple[Piece, ...]:
    """An end's slabs of a step of this micro-batch size, which evaluation may change.

    One for each peer, whether they are sent or received.
    """
    own = replace(end.own, micro_batch_size=micro_batch)
    other = replace(end.other, micro_batch_size=own.batch // end.other.data)
    return tuple(
        (slab.target, *own.in_part(slab, end.place, end.sequence))
        for slab in slabs(own, other, sequence=end.sequence)
        if slab.source == end.place
    )


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
            own = self._end.own.own_rows(self._end.place, self._end.sequence)
            part = part[own.start : own.stop]
        works = []
        for peer, rows, batch in _pieces(self._end, tensor.shape[1]):
            parts = [part[each, batch] for each in rows]
            works.append(
                self._by_peer[peer].send(parts[0] if len(parts) == 1 else torch.cat(parts))
            )
        return _AllOf(works)

    def recv(self, tensor: torch.Tensor) -> Work:
        """Receive into a contiguous tensor, which is complete after `wait()`.

        `wait()` is collective over the tensor-parallel ranks if they gather.
        """
        whole = part = tensor.detach()
        gather: Callable[[], None] | None = None
        if self._gathers_over is not None:
            rows = self._end.own.part_rows(self._end.sequence)
            part = whole.new_empty((rows, *whole.shape[1:]))
            gather = partial(_gather, part, whole, self._gathers_over)
        receives = []
        for peer, rows_, batch in _pieces(self._end, tensor.shape[1]):
            targets = [part[each, batch] for each in rows_]
            if len(targets) == 1 and targets[0].is_contiguous():
                buffer, targets = targets[0], []
            else:
                count = sum(len(target) for target in targets)
                buffer = targets[0].new_empty((count, *targets[0].shape[1:]))
            receives.append((self._by_peer[peer].recv(buffer), buffer, targets))
        return _Received(receives, gather)


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
    """Slab receives in flight, each with its buffer and where `wait()` copies its rows to."""

    def __init__(
        self,
        receives: Sequence[tuple[Work, torch.Tensor, list[torch.Tensor]]],
        gather: Callable[[], None] | None,
    ) -> None:
        super().__init__([work for work, _, _ in receives])
        self._receives, self._gather = receives, gather

    def wait(self) -> None:
        for work, buffer, targets in self._receives:
            work.wait()
            first = 0
            for target in targets:
                target.copy_(buffer[first : first + len(target)])
                first += len(target)
        if self._gather is not None:
            self._gather()
        # Never run the collective twice: the other ranks take part once.
        self._works, self._receives, self._gather = [], [], None


def _gather(part: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """All-gather the parts, which are equally long: the last ones may be padded."""
    rows = part.shape[0] * group.size()
    if rows == whole.shape[0]:
        dist.all_gather_into_tensor(whole, part, group=group)
        return
    table = part.new_empty((rows, *part.shape[1:]))
    dist.all_gather_into_tensor(table, part, group=group)
    whole.copy_(table[: whole.shape[0]])
