"""Gradient exchange between the two copies of a tied embedding, on the first and the last mesh.

Each mesh shards its copy differently: by vocabulary rows over its tensor-parallel ranks and, with
the distributed optimizer, again over its replicas. Rows are contiguous, so a rank always owns an
interval of the flattened embedding. Every rank receives the other copy's gradients for its interval
and adds them to its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

Interval = tuple[int, int]
"""[begin, end), in elements of the whole flattened embedding."""


@dataclass(frozen=True)
class Transfer:
    """An interval that one rank sends to another. Ranks are those of the group."""

    source: int
    target: int
    begin: int
    end: int


def find_sources(
    wanted: Interval, sources: Sequence[Interval], *, preferred: int
) -> list[tuple[int, Interval]]:
    """Split `wanted` into intervals, each with the index of a source that owns it.

    Where several sources own an element, as replicas do, the first one from `preferred` on (modulo
    their number) is taken, so that callers can spread the load.
    """
    found: list[tuple[int, Interval]] = []
    at, end = wanted
    order = [(preferred + step) % len(sources) for step in range(len(sources))]
    while at < end:
        index = next((i for i in order if sources[i][0] <= at < sources[i][1]), None)
        if index is None:
            raise ValueError(f"nobody has element {at} of the embedding's other copy")
        until = min(end, sources[index][1])
        found.append((index, (at, until)))
        at = until
    return found


def plan_transfers(owned: Sequence[Interval], *, first_stage_size: int) -> list[Transfer]:
    """All transfers of the group, whose first `first_stage_size` ranks hold the first stage's copy.

    `owned` is the interval of each rank of the group.
    """
    sides = range(first_stage_size), range(first_stage_size, len(owned))
    return [
        Transfer(source=there[source], target=target, begin=begin, end=end)
        for here, there in (sides, sides[::-1])
        for place, target in enumerate(here)
        for source, (begin, end) in find_sources(
            owned[target], [owned[i] for i in there], preferred=place
        )
    ]


class TiedEmbedding:
    """Exchanges the gradients of a tied embedding. Constructor and methods are collective.

    Args:
        weight: this rank's shard, rows of the whole embedding. Its gradient is in `main_grad`.
        rows_before: number of rows of the whole embedding before the shard.
        owned: flat range of the shard whose reduced gradient this rank holds.
        group: the ranks of the first stage, then those of the last.
        first_stage_size: number of ranks of the first stage.
    """

    def __init__(
        self,
        weight: torch.nn.Parameter,
        *,
        rows_before: int,
        owned: Interval,
        group: dist.ProcessGroup,
        first_stage_size: int,
    ) -> None:
        self._weight, self._group = weight, group
        self._offset = rows_before * weight.shape[1]
        mine = torch.tensor([self._offset + edge for edge in owned], device=weight.device)
        everyone = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(everyone, mine, group=group)
        intervals = [(row[0], row[1]) for row in torch.stack(everyone).tolist()]
        moved = plan_transfers(intervals, first_stage_size=first_stage_size)
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
        """Split sizes for all_to_all: elements to, or from, each rank of the group."""
        members = range(self._group.size())
        return [moved[m].end - moved[m].begin if m in moved else 0 for m in members]

    def _part(self, gradient: torch.Tensor, transfer: Transfer) -> torch.Tensor:
        return gradient[transfer.begin - self._offset : transfer.end - self._offset]
