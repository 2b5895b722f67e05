"""Process groups, built from the plan, with the backend chosen for each group.

A group whose ranks lie in one mesh uses the vendor's own library (NCCL, which is RCCL on a ROCm
build, or gloo on CPU). A group that crosses a boundary never does. It is `hetero` where gradients
and weights go through it, and gloo where a few numbers do.

A rank computes which groups it is in and creates only those, together with their other members.
Always create them in the order of the kinds below: all ranks of a group have it under the same
kind, so no cycle of ranks can wait for itself.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from hetero.collectives.backend import register
from hetero.collectives.process_group import HeteroProcessGroup
from hetero.link.base import Link
from hetero.observe.record import GroupEntry, recorder
from hetero.plan import Plan

CROSSING_BACKEND = "hetero"
CONTROL_BACKEND = "gloo"

_CARRIES_THE_MODEL = frozenset({"data_context", "expert_data", "embedding"})
"""Kinds whose groups reduce or gather gradients and weights, on the model's device."""

_VARYING_COORDINATES: dict[str, frozenset[str]] = {
    "single": frozenset(),
    "tensor": frozenset({"tensor"}),
    "context": frozenset({"context"}),
    "tensor_context": frozenset({"tensor", "context"}),
    "data": frozenset({"data"}),
    "data_context": frozenset({"data", "context"}),
    "tensor_data_context": frozenset({"tensor", "data", "context"}),
    "pipeline": frozenset({"stage"}),
    "model": frozenset({"stage", "tensor"}),
    "world": frozenset({"stage", "tensor", "data", "context"}),
}
"""The coordinates in which the ranks of a group differ; the others are equal."""


@dataclass(frozen=True)
class StageOrder:
    """Stands in for the pipeline group where the pipeline spans several meshes.

    A real group would have one rank of each stage, but stages may have different numbers of ranks.
    Schedules only ask it for rank and size; the stages communicate over links.
    """

    stage: int
    stages: int

    def rank(self) -> int:
        return self.stage

    def size(self) -> int:
        return self.stages


@dataclass(frozen=True)
class Groups:
    """The groups of one rank, also those of size 1, whose size megatron-core asks for."""

    single: dist.ProcessGroup
    tensor: dist.ProcessGroup
    context: dist.ProcessGroup
    tensor_context: dist.ProcessGroup
    data: dist.ProcessGroup
    data_context: dist.ProcessGroup
    """The ranks that hold the same weights, over which gradients are reduced."""
    tensor_data_context: dist.ProcessGroup
    expert: dist.ProcessGroup
    """The ranks that hold different experts, between which tokens are exchanged."""
    expert_tensor: dist.ProcessGroup
    expert_model: dist.ProcessGroup
    """The ranks that hold all experts once."""
    expert_data: dist.ProcessGroup
    """The ranks that hold the same slices of the same experts; gradients are reduced over it."""
    pipeline: dist.ProcessGroup | StageOrder
    model: dist.ProcessGroup
    world: dist.ProcessGroup
    embedding: dist.ProcessGroup | None

    def data_links(self) -> list[Link]:
        """The links between replicas of different vendors."""
        groups = {id(group): group for group in (self.data_context, self.expert_data)}
        return [
            link
            for group in groups.values()
            if isinstance(group, HeteroProcessGroup)
            for link in group.links()
        ]

    def check(self) -> None:
        """Raise the error of a failed group across vendors. Call it after synchronising the GPU."""
        for group in (self.data_context, self.expert_data, self.embedding):
            if isinstance(group, HeteroProcessGroup):
                group.check()


@dataclass(frozen=True)
class GroupPlan:
    """One group that a rank creates: its ranks and backend."""

    name: str
    """The same on all of its members, and unique among their groups."""
    ranks: tuple[int, ...]
    backend: str
    crosses: bool


def members(plan: Plan, rank: int, kind: str) -> tuple[int, ...]:
    """The ranks of this rank's group of a kind, ascending; empty if it is in no such group.

    Takes time proportional to the size of the group, not of the job.
    """
    if kind == "embedding":
        return _embedding_members(plan, rank)
    if kind.startswith("expert"):
        return _expert_members(plan, rank, kind)
    if joins_meshes(plan):
        # Stages of different shapes have no corresponding ranks.
        if kind == "pipeline":
            return ()
        if kind == "model":
            kind = "world"
    return _ranks_along(plan, rank, differ=_VARYING_COORDINATES[kind])


def joins_meshes(plan: Plan) -> bool:
    """Whether the pipeline spans several meshes, each with a shape of its own."""
    return len(plan.meshes) > 1 and not plan.whole_replicas


def _embedding_members(plan: Plan, rank: int) -> tuple[int, ...]:
    """The ranks that hold a tied embedding or its copy; of one shard if both are sharded alike."""
    if joins_meshes(plan):
        last = plan.blocks_of_stage(plan.stages - 1)[0].ranks
        ends = (*plan.blocks_of_stage(0)[0].ranks, *last)
    else:
        line = _ranks_along(plan, rank, differ=_VARYING_COORDINATES["pipeline"])
        ends = (line[0], line[-1]) if len(line) > 1 else line
    return ends if rank in ends else ()


def _expert_members(plan: Plan, rank: int, kind: str) -> tuple[int, ...]:
    """Ranks of one stage: expert tensor parallel fastest, then expert parallel, then the copies."""
    blocks = plan.blocks_of_stage(plan.coordinate(rank).stage)
    own = next(block for block in blocks if rank in block.ranks)
    mesh, offset = plan.meshes[own.mesh], rank - own.ranks.start
    width, unit = mesh.ranks_per_expert, mesh.ranks_of_experts
    if kind == "expert_data":
        return tuple(other for block in blocks for other in block.ranks[offset % unit :: unit])
    if kind == "expert_tensor":
        return tuple(own.ranks[offset // width * width :][:width])
    together = own.ranks[offset // unit * unit :][:unit]
    return tuple(together if kind == "expert_model" else together[offset % width :: width])


def _ranks_along(plan: Plan, rank: int, *, differ: frozenset[str]) -> tuple[int, ...]:
    here = plan.coordinate(rank)

    def along(name: str, size: int) -> Sequence[int]:
        own: int = getattr(here, name)
        if name in differ:
            return range(size)
        return (own,) if own < size else ()

    found: list[int] = []
    for stage in along("stage", plan.stages):
        for block in plan.blocks_of_stage(stage):
            mesh = plan.meshes[block.mesh]
            found += [
                plan.rank_at(stage, data=data, context=context, tensor=tensor)
                for data in (block.replicas if "data" in differ else [here.data])
                if data in block.replicas
                for context in along("context", mesh.context)
                for tensor in along("tensor", mesh.tensor)
            ]
    return tuple(sorted(found))


def planned_groups(
    plan: Plan, rank: int, *, vendor_backend: str, crossing_backend: str = CROSSING_BACKEND
) -> dict[str, GroupPlan | None]:
    """The groups of a rank by kind, in the order in which to create them.

    Kinds with the same ranks and backend share a group: their entries are equal. None means that
    the rank is in no group of this kind.
    """
    known: dict[tuple[tuple[int, ...], str], GroupPlan] = {}
    planned: dict[str, GroupPlan | None] = {}
    for kind in (field.name for field in fields(Groups)):
        ranks = members(plan, rank, kind)
        if not ranks:
            planned[kind] = None
            continue
        ends = {plan.coordinate(end).mesh for end in (ranks[0], ranks[-1])}
        crosses = len(ends) > 1  # Ranks of a mesh are consecutive, and `ranks` are ascending.
        backend = vendor_backend
        if crosses:
            # Without context parallelism the data-parallel group is the one of the gradients.
            carries = kind in _CARRIES_THE_MODEL or (
                kind == "data" and ranks == members(plan, rank, "data_context")
            )
            backend = crossing_backend if carries else CONTROL_BACKEND
        planned[kind] = known.setdefault(
            (ranks, backend),
            GroupPlan(name=f"{kind} {ranks[0]}", ranks=ranks, backend=backend, crosses=crosses),
        )
    return planned


def build_groups(
    plan: Plan,
    rank: int,
    *,
    vendor_backend: str,
    crossing_backend: str = CROSSING_BACKEND,
    timeout: timedelta,
    crossing_timeout: timedelta | None = None,
) -> Groups:
    """Build the groups of a rank. All ranks call it, each with the same plan.

    A collective that blocks for longer than its group's timeout is an error: `crossing_timeout`,
    where given, for groups that cross a boundary, `timeout` for the others.
    """
    created: dict[GroupPlan, dist.ProcessGroup] = {}
    groups: dict[str, dist.ProcessGroup | StageOrder | None] = {}
    planned = planned_groups(
        plan, rank, vendor_backend=vendor_backend, crossing_backend=crossing_backend
    )
    for kind, group in planned.items():
        if group is not None and group not in created:
            created[group] = create_group(
                group.name,
                group.ranks,
                backend=group.backend,
                timeout=(crossing_timeout or timeout) if group.crosses else timeout,
                vendor=plan.vendor_of_rank(rank),
            )
        groups[kind] = None if group is None else created[group]
    if groups["pipeline"] is None:
        groups["pipeline"] = StageOrder(plan.coordinate(rank).stage, plan.stages)
    return Groups(**groups)  # type: ignore[arg-type]


def open_world(
    backend: str, *, store: dist.Store, rank: int, world_size: int, timeout: timedelta
) -> None:
    """Open the default group. Every rank calls it.

    Makes gloo connect lazily, only ranks that communicate. Otherwise it connects all pairs of each
    group: N sockets a rank, and N^3 values read from the store.
    """
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    world = c10d._get_default_group()
    if backend == "cpu:gloo":
        # PyTorch sets none where another backend has been registered, and would warn at exit.
        world._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    _connect_ring_neighbors(world, list(range(world_size)), rank)


def create_group(
    name: str,
    ranks: Sequence[int],
    *,
    backend: str,
    timeout: timedelta,
    vendor: str | None = None,
) -> dist.ProcessGroup:
    """Create a group of these ranks, ascending. Only its members call it, and all of them.

    PyTorch's `new_group(use_local_synchronization=True)` names a group after its ranks and the
    number of groups that the process has. Members of one group may be in different numbers of
    others (a first stage has groups that a middle stage lacks): their names would differ, and each
    would wait for the others for ever. Hence PyTorch's private function, used nowhere else.

    Never use a `name` for two sets of ranks. Create several groups in the same order on all ranks,
    or members wait for each other for ever. A group of one rank has a store of its own. `vendor` is
    this rank's, for a group of the backend `hetero`.
    """
    if backend == "hetero":
        register()
    rank = dist.get_rank()
    store = c10d._get_default_store() if len(ranks) > 1 else dist.HashStore()
    unique = f"hetero {name}"
    while unique in c10d._world.pg_names.values():
        unique += "'"  # All members have created it equally often.
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(rank),
        list(ranks),
        dist.Backend(backend),
        store,
        unique,  # type: ignore[arg-type]
        backend_options=vendor if backend == "hetero" else None,
        timeout=timeout,
        group_desc=name,
    )
    recorder().add_group(
        GroupEntry(name=unique, ranks=tuple(ranks), backend=backend, description=name)
    )
    c10d._world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    if backend == "gloo":
        _connect_ring_neighbors(group, ranks, rank)
    elif backend == "hetero":
        # Open its links now, for the same reason.
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    return group


def _connect_ring_neighbors(group: dist.ProcessGroup, ranks: Sequence[int], rank: int) -> None:
    """Connect to both neighbors of gloo's ring, while a failure still names missing ranks.

    Otherwise the first collective would connect, during training.
    """
    if len(ranks) == 1:
        return
    at = ranks.index(rank)
    token = torch.zeros(1)
    sent = dist.isend(token, ranks[(at + 1) % len(ranks)], group=group)
    dist.recv(torch.empty(1), ranks[at - 1], group=group)
    if sent is not None:
        sent.wait()
