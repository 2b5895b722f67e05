"""Process groups: which ranks belong together, and which library may join them."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.groups import Groups, _Builder, build_groups, embedding_sets, rank_sets
from hetero.plan import Coordinate, Mesh, Plan

Key = Callable[[Coordinate], tuple[int, ...]]

MINUTE = timedelta(seconds=60)
PIPELINE: Key = lambda c: (c.data, c.context, c.tensor)  # noqa: E731
KINDS: dict[str, Key] = {
    "single": lambda c: (c.rank,),
    "tensor": lambda c: (c.stage, c.data, c.context),
    "data": lambda c: (c.stage, c.context, c.tensor),
    "pipeline": PIPELINE,
    "model": lambda c: (c.data, c.context),
}


def _plan(vendors: list[tuple[str, int]], *, tensor: int = 1, data: int = 1) -> Plan:
    meshes = tuple(Mesh(v, stages=s, tensor=tensor, data=data) for v, s in vendors)
    return Plan(meshes=meshes, layers=((1,),) * sum(s for _, s in vendors))


@st.composite
def uniform_plans(draw: st.DrawFn) -> Plan:
    size = st.integers(1, 2)
    mesh = st.tuples(st.sampled_from(["amd", "nvidia"]), size)
    vendors = draw(st.lists(mesh, min_size=1, max_size=3))
    return _plan(vendors, tensor=draw(size), data=draw(size))


MIXED = _plan([("amd", 1), ("nvidia", 2)], tensor=2, data=2)


# Which ranks.


@given(uniform_plans(), st.sampled_from(sorted(KINDS)))
def test_the_sets_of_a_kind_partition_the_ranks(plan: Plan, kind: str) -> None:
    sets = rank_sets(plan, KINDS[kind])
    assert sorted(chain.from_iterable(sets)) == list(range(plan.world_size))
    assert all(ranks == sorted(ranks) for ranks in sets)
    assert [ranks[0] for ranks in sets] == sorted(ranks[0] for ranks in sets)


@given(uniform_plans())
def test_sets_have_the_sizes_the_plan_says(plan: Plan) -> None:
    mesh = plan.meshes[0]
    sizes = {kind: {len(r) for r in rank_sets(plan, key)} for kind, key in KINDS.items()}
    assert sizes["single"] == {1}
    assert sizes["tensor"] == {mesh.tensor}
    assert sizes["data"] == {mesh.data}
    assert sizes["pipeline"] == {plan.stages}
    assert sizes["model"] == {plan.stages * mesh.tensor}


def test_the_sets_of_a_known_plan() -> None:
    assert rank_sets(MIXED, KINDS["tensor"]) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert rank_sets(MIXED, KINDS["data"]) == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11]]
    assert rank_sets(MIXED, KINDS["pipeline"]) == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]


@given(uniform_plans())
def test_an_embedding_set_joins_the_two_copies_of_a_tied_embedding(plan: Plan) -> None:
    sets = embedding_sets(plan)
    if plan.stages == 1:
        assert sets == [[rank] for rank in range(plan.world_size)]
        return
    first, last = plan.ranks_of_stage(0), plan.ranks_of_stage(plan.stages - 1)
    assert sets == [list(pair) for pair in zip(first, last, strict=True)]


# Which library.


def test_a_group_inside_one_mesh_uses_the_vendors_library_and_any_other_gloo() -> None:
    builder = _Builder(MIXED, 0, vendor_backend="nccl", timeout=MINUTE)
    for stage in range(MIXED.stages):
        assert builder.backend_for(MIXED.ranks_of_stage(stage)) == "nccl"
    assert builder.backend_for([4, 8]) == "nccl", "two stages of one mesh"
    assert builder.backend_for([0, 4]) == "gloo"
    assert builder.backend_for(range(12)) == "gloo"


@given(uniform_plans())
def test_no_group_that_crosses_a_boundary_is_a_vendor_librarys(plan: Plan) -> None:
    builder = _Builder(plan, 0, vendor_backend="nccl", timeout=MINUTE)
    for key in KINDS.values():
        for ranks in rank_sets(plan, key):
            crosses = len({plan.coordinate(rank).mesh for rank in ranks}) > 1
            assert (builder.backend_for(ranks) == "nccl") == (not crosses)


# Building them.


class Recorded:
    """Stands in for torch.distributed.new_group."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], str]] = []

    def new_group(self, ranks: list[int], *, backend: str, timeout: timedelta) -> Any:
        assert timeout == MINUTE
        self.calls.append((tuple(ranks), backend))
        return tuple(ranks)


def _recorded(plan: Plan, rank: int) -> tuple[list[tuple[tuple[int, ...], str]], Groups]:
    recorded = Recorded()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", recorded.new_group)
        groups = build_groups(plan, rank, vendor_backend="nccl", timeout=MINUTE)
    return recorded.calls, groups


@settings(max_examples=12)
@given(uniform_plans())
def test_every_rank_creates_the_same_groups_in_the_same_order_each_once(plan: Plan) -> None:
    """Creating a group is collective: a rank that leaves one out hangs all the others."""
    calls = [_recorded(plan, rank)[0] for rank in range(plan.world_size)]
    assert all(other == calls[0] for other in calls)
    assert len(set(calls[0])) == len(calls[0])


@settings(max_examples=12)
@given(uniform_plans())
def test_a_rank_is_in_each_of_its_groups_and_in_embeddings_only_at_the_ends(plan: Plan) -> None:
    for rank in range(plan.world_size):
        groups = _recorded(plan, rank)[1]
        stage = plan.coordinate(rank).stage
        for kind in fields(Groups):
            group: Any = getattr(groups, kind.name)
            if group is not None:
                assert rank in group
        assert (groups.embedding is not None) == (stage in (0, plan.stages - 1))
        assert (groups.position_embedding is not None) == (stage == 0)


def test_the_groups_of_one_rank_of_a_mixed_plan() -> None:
    groups: Any = _recorded(MIXED, 5)[1]
    assert groups.single == (5,)
    assert groups.tensor == (4, 5)
    assert groups.data == groups.data_context == (5, 7)
    assert groups.context == (5,)
    assert groups.tensor_data_context == (4, 5, 6, 7)
    assert groups.pipeline == (1, 5, 9)
    assert groups.model == (0, 1, 4, 5, 8, 9)
    assert groups.world == tuple(range(12))
    assert groups.embedding is None
    assert groups.position_embedding is None


# For real, on four processes.

REAL = _plan([("amd", 1), ("nvidia", 1)], tensor=2)


def _live(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=MINUTE)
    groups = build_groups(REAL, rank, vendor_backend="gloo", timeout=MINUTE)
    found: dict[str, Any] = {}
    for kind in fields(Groups):
        group = getattr(groups, kind.name)
        if group is None:
            found[kind.name] = None
            continue
        number = torch.tensor([10.0**rank])
        dist.all_reduce(number, group=group)
        found[kind.name] = {
            "ranks": dist.get_process_group_ranks(group),
            "size": group.size(),
            "rank": group.rank(),
            "backend": dist.get_backend(group),
            "sum": number.item(),
        }
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_four_processes_build_the_groups_of_a_mixed_plan_and_use_them() -> None:
    expected = {
        "single": [[0], [1], [2], [3]],
        "tensor": [[0, 1], [0, 1], [2, 3], [2, 3]],
        "data": [[0], [1], [2], [3]],
        "pipeline": [[0, 2], [1, 3], [0, 2], [1, 3]],
        "model": [[0, 1, 2, 3]] * 4,
        "world": [[0, 1, 2, 3]] * 4,
        "embedding": [[0, 2], [1, 3], [0, 2], [1, 3]],
        "position_embedding": [[0], [1], None, None],
    }
    # One forked parent that has torch loaded, instead of loading it in each process.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch.distributed"])
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _live, args=(folder,), nprocs=4, start_method="forkserver"
        )
        found = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(4)]
    for kind, by_rank in expected.items():
        for rank, ranks in enumerate(by_rank):
            group = found[rank][kind]
            if ranks is None:
                assert group is None
                continue
            assert group == {
                "ranks": ranks,
                "size": len(ranks),
                "rank": ranks.index(rank),
                "backend": "gloo",
                "sum": sum(10.0**member for member in ranks),
            }
