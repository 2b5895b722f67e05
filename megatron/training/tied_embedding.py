"""Gradients of a tied embedding, whose two copies lie on the first and on the last mesh.

Each mesh splits its copy in its own way: over its tensor-parallel ranks by rows of the vocabulary,
and, with the distributed optimizer, a rank's rows once more over its replicas. Rows come one after
another in memory, so whatever a rank is responsible for is an interval of the whole flat embedding.
Every rank is sent, from the other copy, the gradients of its own interval, and adds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

Interval = tuple[int, int]
"""From (inclusive) and to (exclusive), in elements of the whole embedding."""


@dataclass(frozen=True)
class Transfer:
    """What one member sends another; members are counted as in their group."""

    source: int
    target: int
    begin: int
    end: int


def cover(
    wanted: Interval, sources: Sequence[Interval], *, turn: int
) -> list[tuple[int, Interval]]:
    """Parts of `wanted`, and which of `sources` gives each.

    Where several could, as replicas can, they take turns: the one that `turn` says is asked first.
    """
    found: list[tuple[int, Interval]] = []
    at, end = wanted
    order = [(turn + step) % len(sources) for step in range(len(sources))]
    while at < end:
        index = next((i for i in order if sources[i][0] <= at < sources[i][1]), None)
        if index is None:
            raise ValueError(f"nobody has element {at} of the embedding's other copy")
        until = min(end, sources[index][1])
        found.append((index, (at, until)))
        at = until
    return found


def transfers(held: Sequence[Interval], *, firsts: int) -> list[Transfer]:
    """Who sends what to whom. The first `firsts` members have one copy, the others the other."""
    sides = range(firsts), range(firsts, len(held))
    return [
        Transfer(source=there[source], target=target, begin=begin, end=end)
        for here, there in (sides, sides[::-1])
        for place, target in enumerate(here)
        for source, (begin, end) in cover(held[target], [held[i] for i in there], turn=place)
    ]


class TiedEmbedding:
    """This rank's part of a tied embedding, and the group of all that have one.

    Args:
        weight: the rank's shard, rows of the whole embedding. Its gradient is in `main_grad`.
        rows_before: how many rows of the whole embedding come before the shard.
        held: the flat range of the shard whose gradient this rank has in full.
        group: the ranks of the first stage, then those of the last.
        firsts: how many of them are of the first stage.

    Collective over the group, and so is `add_gradients`.
    """

    def __init__(
        self,
        weight: torch.nn.Parameter,
        *,
        rows_before: int,
        held: Interval,
        group: dist.ProcessGroup,
        firsts: int,
    ) -> None:
        self._weight, self._group = weight, group
        self._offset = rows_before * weight.shape[1]
        mine = torch.tensor([self._offset + edge for edge in held], device=weight.device)
        everyone = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(everyone, mine, group=group)
        intervals = [(row[0], row[1]) for row in torch.stack(everyone).tolist()]
        moved = transfers(intervals, firsts=firsts)
        self._sent = {t.target: t for t in moved if t.source == group.rank()}
        self._received = {t.source: t for t in moved if t.target == group.rank()}

    def add_gradients(self) -> None:
        """Add the other copy's gradients to this rank's."""
        gradient: torch.Tensor = self._weight.main_grad.view(-1)  # type: ignore[attr-defined]
        given = [self._part(gradient, self._sent[member]) for member in sorted(self._sent)]
        source = torch.cat([gradient[:0], *given])
        taken = self._sizes(self._received)
        output = gradient.new_empty(sum(taken))
        dist.all_to_all_single(output, source, taken, self._sizes(self._sent), group=self._group)
        for member, part in enumerate(output.split(taken)):
            if member in self._received:
                self._part(gradient, self._received[member]).add_(part)

    def _sizes(self, moved: Mapping[int, Transfer]) -> list[int]:
        """Elements for, or from, each member."""
        members = range(self._group.size())
        return [moved[m].end - moved[m].begin if m in moved else 0 for m in members]

    def _part(self, gradient: torch.Tensor, transfer: Transfer) -> torch.Tensor:
        return gradient[transfer.begin - self._offset : transfer.end - self._offset]
