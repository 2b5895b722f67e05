"""Process groups, built from the plan, with the backend chosen for each group.

A group whose ranks lie in one mesh uses the vendor's own library (NCCL, which is RCCL on a ROCm
build, or gloo on CPU). A group that crosses a boundary never does: it is gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from hetero.plan import Coordinate, Plan

CROSSING_BACKEND = "gloo"


@dataclass(frozen=True)
class Groups:
    """The groups of one rank. Sizes of one are real groups too: megatron-core asks their size."""

    single: dist.ProcessGroup
    tensor: dist.ProcessGroup
    context: dist.ProcessGroup
    tensor_context: dist.ProcessGroup
    data: dist.ProcessGroup
    data_context: dist.ProcessGroup
    tensor_data_context: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    model: dist.ProcessGroup
    world: dist.ProcessGroup
    embedding: dist.ProcessGroup | None
    position_embedding: dist.ProcessGroup | None


class _Builder:
    """Creates each distinct set of ranks once. Every rank must ask for the same sets in order."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        *,
        vendor_backend: str,
        timeout: timedelta,
        crossing_timeout: timedelta | None = None,
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._vendor_backend = vendor_backend
        self._timeout, self._crossing_timeout = timeout, crossing_timeout or timeout
        self._created: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def backend_for(self, ranks: Sequence[int]) -> str:
        return CROSSING_BACKEND if self._crosses(ranks) else self._vendor_backend

    def _timeout_for(self, ranks: Sequence[int]) -> timedelta:
        return self._crossing_timeout if self._crosses(ranks) else self._timeout

    def _crosses(self, ranks: Sequence[int]) -> bool:
        return len({self._plan.coordinate(rank).mesh for rank in ranks}) > 1

    def partition(self, sets: Iterable[Sequence[int]]) -> dist.ProcessGroup | None:
        """Create all the sets of one kind; return the one this rank is in."""
        mine = None
        for ranks in sets:
            key = tuple(ranks)
            if key not in self._created:
                self._created[key] = dist.new_group(
                    list(ranks),
                    backend=self.backend_for(ranks),
                    timeout=self._timeout_for(ranks),
                )
            if self._rank in key:
                mine = self._created[key]
        return mine

    def required(self, sets: Iterable[Sequence[int]]) -> dist.ProcessGroup:
        group = self.partition(sets)
        if group is None:
            raise RuntimeError(f"rank {self._rank} is in no group of a kind that covers all ranks")
        return group


def rank_sets(plan: Plan, key: Callable[[Coordinate], tuple[int, ...]]) -> list[list[int]]:
    """Partition the ranks by a key of their coordinates, in rank order."""
    sets: dict[tuple[int, ...], list[int]] = {}
    for rank in range(plan.world_size):
        sets.setdefault(key(plan.coordinate(rank)), []).append(rank)
    return list(sets.values())


def embedding_sets(plan: Plan) -> list[list[int]]:
    """First and last stage, pairwise: the ranks that hold the two copies of a tied embedding."""
    if plan.stages == 1:
        return rank_sets(plan, lambda c: (c.rank,))
    return [
        [line[0], line[-1]] for line in rank_sets(plan, lambda c: (c.data, c.context, c.tensor))
    ]


def build_groups(
    plan: Plan,
    rank: int,
    *,
    vendor_backend: str,
    timeout: timedelta,
    crossing_timeout: timedelta | None = None,
) -> Groups:
    """Build every group of the plan. Collective over the default group.

    A collective that blocks for longer than its group's timeout is an error: `crossing_timeout`,
    where given, for groups that cross a boundary, `timeout` for the others.
    """
    build = _Builder(
        plan,
        rank,
        vendor_backend=vendor_backend,
        timeout=timeout,
        crossing_timeout=crossing_timeout,
    )
    first_stage = rank_sets(plan, lambda c: (c.rank,))[: len(plan.ranks_of_stage(0))]
    return Groups(
        single=build.required(rank_sets(plan, lambda c: (c.rank,))),
        tensor=build.required(rank_sets(plan, lambda c: (c.stage, c.data, c.context))),
        context=build.required(rank_sets(plan, lambda c: (c.stage, c.data, c.tensor))),
        tensor_context=build.required(rank_sets(plan, lambda c: (c.stage, c.data))),
        data=build.required(rank_sets(plan, lambda c: (c.stage, c.context, c.tensor))),
        data_context=build.required(rank_sets(plan, lambda c: (c.stage, c.tensor))),
        tensor_data_context=build.required(rank_sets(plan, lambda c: (c.stage,))),
        pipeline=build.required(rank_sets(plan, lambda c: (c.data, c.context, c.tensor))),
        model=build.required(rank_sets(plan, lambda c: (c.data, c.context))),
        world=build.required([list(range(plan.world_size))]),
        embedding=build.partition(embedding_sets(plan)),
        position_embedding=build.partition(first_stage),
    )
