"""Process groups: which ranks belong together, and which library may join them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.pipeline.groups import (
    GroupPlan,
    Groups,
    joins_meshes,
    members,
    planned_groups,
)
from hetero.plan import Coordinate, Mesh, Plan

Key = Callable[[Coordinate], tuple[int, ...]]

MINUTE = timedelta(seconds=60)
KINDS: dict[str, Key] = {
    "single": lambda c: (c.rank,),
    "tensor": lambda c: (c.stage, c.data, c.context),
    "context": lambda c: (c.stage, c.data, c.tensor),
    "tensor_context": lambda c: (c.stage, c.data),
    "data": lambda c: (c.stage, c.context, c.tensor),
    "data_context": lambda c: (c.stage, c.tensor),
    "tensor_data_context": lambda c: (c.stage,),
    "expert_data": lambda c: (c.stage, c.expert, c.expert_tensor),
    "expert_tensor": lambda c: (c.stage, c.expert, c.expert_copy),
    "expert_model": lambda c: (c.stage, c.expert_copy),
    "expert": lambda c: (c.stage, c.expert_tensor, c.expert_copy),
    "world": lambda c: (),
}
ALONG_THE_PIPELINE: dict[str, Key] = {
    "pipeline": lambda c: (c.data, c.context, c.tensor),
    "model": lambda c: (c.data, c.context),
}
"""Where all stages have the same ranks: in one mesh, or in whole replicas."""


def _expert_sizes(ranks: int) -> list[dict[str, int]]:
    """Every way in which the ranks of a stage can hold all experts, if each holds some."""
    found: list[dict[str, int]] = [{}]
    for experts in range(2, ranks + 1):
        widths = range(1, ranks // experts + 1)
        found += [
            {"experts": experts, "expert_tensor": width}
            for width in widths
            if ranks % (experts * width) == 0
        ]
    return found


@st.composite
def plans_of_replicas(draw: st.DrawFn) -> Plan:
    """Whole replicas on each vendor, of one shape and in any number."""
    size, stages = st.integers(1, 2), draw(st.integers(1, 3))
    tensor, context = draw(size), draw(size)
    meshes = tuple(
        Mesh(vendor, stages=stages, tensor=tensor, context=context, data=draw(st.integers(1, 3)))
        for vendor in ("nvidia", "amd")
    )
    common = math.gcd(*(mesh.ranks_per_stage for mesh in meshes))
    experts = draw(st.sampled_from(_expert_sizes(common)))
    meshes = tuple(replace(mesh, **experts) for mesh in meshes)
    return Plan(meshes=meshes, layers=((1,),) * stages, whole_replicas=True)


@st.composite
def plans_of_stages(draw: st.DrawFn) -> Plan:
    """Meshes of any shapes, of which some are alike."""
    size = st.integers(1, 3)
    mesh = st.builds(
        Mesh, vendor=st.just("amd"), stages=size, tensor=size, context=st.integers(1, 2), data=size
    )
    with_experts = mesh.flatmap(
        lambda m: st.sampled_from(_expert_sizes(m.ranks_per_stage)).map(
            lambda sizes: replace(m, **sizes)
        )
    )
    meshes = tuple(draw(st.lists(with_experts, min_size=1, max_size=2)))
    meshes *= draw(st.integers(1, 2))
    return Plan(meshes=meshes, layers=((1,),) * sum(mesh.stages for mesh in meshes))


any_plans = plans_of_stages() | plans_of_replicas()
MIXED = Plan(
    meshes=(Mesh("amd", 1, tensor=2, data=2), Mesh("nvidia", 2, tensor=2, data=2)),
    layers=((1,),) * 3,
)


# Which ranks.


def _partition(plan: Plan, key: Key) -> list[tuple[int, ...]]:
    """The definition, over all ranks: those with one key belong together."""
    sets: dict[tuple[int, ...], list[int]] = {}
    for rank in range(plan.world_size):
        sets.setdefault(key(plan.coordinate(rank)), []).append(rank)
    return [tuple(ranks) for ranks in sets.values()]


@given(any_plans, st.sampled_from(sorted(KINDS)))
def test_each_rank_finds_its_own_group_of_a_kind_by_itself(plan: Plan, kind: str) -> None:
    for ranks in _partition(plan, KINDS[kind]):
        assert ranks == tuple(sorted(ranks))
        assert {members(plan, rank, kind) for rank in ranks} == {ranks}


@given(any_plans, st.sampled_from(sorted(ALONG_THE_PIPELINE)))
def test_stages_of_several_meshes_have_no_group_of_one_rank_each(plan: Plan, kind: str) -> None:
    everyone = tuple(range(plan.world_size))
    if joins_meshes(plan):
        expected = dict.fromkeys(everyone, () if kind == "pipeline" else everyone)
    else:
        parts = _partition(plan, ALONG_THE_PIPELINE[kind])
        expected = {rank: ranks for ranks in parts for rank in ranks}
    assert {rank: members(plan, rank, kind) for rank in everyone} == expected


@given(plans_of_stages())
def test_an_embedding_group_joins_the_two_copies_of_a_tied_embedding(plan: Plan) -> None:
    first, last = (plan.blocks_of_stage(s)[0].ranks for s in (0, plan.stages - 1))
    if joins_meshes(plan):
        expected = dict.fromkeys((*first, *last), (*first, *last))
    else:
        pairs = zip(first, last, strict=True)
        expected = {rank: tuple(sorted(set(pair))) for pair in pairs for rank in pair}
    for rank in range(plan.world_size):
        assert members(plan, rank, "embedding") == expected.get(rank, ())


# Which library.


CARRY_THE_MODEL = {"data_context", "expert_data", "embedding"}


@given(any_plans)
def test_a_group_inside_one_mesh_uses_the_vendors_library_and_none_that_crosses_does(
    plan: Plan,
) -> None:
    for rank in range(plan.world_size):
        for kind, group in planned_groups(plan, rank, vendor_backend="nccl").items():
            if group is None:
                continue
            crosses = len({plan.coordinate(rank).mesh for rank in group.ranks}) > 1
            assert group.crosses == crosses
            carries = kind in CARRY_THE_MODEL or (
                kind == "data" and group.ranks == members(plan, rank, "data_context")
            )
            across = "hetero" if carries else "gloo"
            assert group.backend == (across if crosses else "nccl")


@given(plans_of_replicas())
def test_of_whole_replicas_only_what_joins_replicas_crosses_vendors(plan: Plan) -> None:
    inside = {"tensor", "context", "tensor_context", "pipeline", "model", "embedding"}
    for rank in range(plan.world_size):
        planned = planned_groups(plan, rank, vendor_backend="nccl")
        assert not any(group.crosses for kind in inside if (group := planned[kind]) is not None)
        for kind in ("data", "data_context", "tensor_data_context", "world"):
            group = planned[kind]
            assert group is not None
            assert group.crosses


@given(any_plans)
def test_gloo_may_be_asked_for_in_every_group(plan: Plan) -> None:
    for rank in range(plan.world_size):
        planned = planned_groups(plan, rank, vendor_backend="gloo", crossing_backend="gloo")
        assert {group.backend for group in planned.values() if group is not None} == {"gloo"}


# Who creates which.


def _planned(plan: Plan, rank: int) -> list[GroupPlan]:
    """The distinct groups of a rank, in the order in which it creates them."""
    planned = planned_groups(plan, rank, vendor_backend="nccl").values()
    return list(dict.fromkeys(group for group in planned if group is not None))


@settings(max_examples=40)
@given(any_plans)
def test_all_members_of_a_group_create_it_under_one_name_each_once(plan: Plan) -> None:
    by_name: dict[str, list[tuple[int, GroupPlan]]] = {}
    for rank in range(plan.world_size):
        planned = _planned(plan, rank)
        assert all(rank in group.ranks for group in planned)
        assert len({group.name for group in planned}) == len(planned)
        assert len({(group.ranks, group.backend) for group in planned}) == len(planned)
        for group in planned:
            by_name.setdefault(group.name, []).append((rank, group))
    for created in by_name.values():
        assert len({group for _, group in created}) == 1, "another set, or another library"
        assert tuple(rank for rank, _ in created) == created[0][1].ranks


@settings(max_examples=40)
@given(any_plans)
def test_ranks_that_wait_for_each_others_groups_all_get_on(plan: Plan) -> None:
    """A group is there when all its members have come to it; each comes to one after another."""
    left = {rank: _planned(plan, rank) for rank in range(plan.world_size)}
    while any(left.values()):
        heads = [queue[0] for queue in left.values() if queue]
        ready = {g for g in heads if all(left[rank][:1] == [g] for rank in g.ranks)}
        assert ready, "every rank waits for another"
        for group in ready:
            for rank in group.ranks:
                left[rank].pop(0)


def test_ranks_that_share_sequences_lie_between_tensor_and_data_parallel_ones() -> None:
    plan = Plan((Mesh("amd", 1, tensor=2, context=2, data=2),), layers=((1,),))
    planned = planned_groups(plan, 5, vendor_backend="nccl")
    assert {kind: group.ranks for kind, group in planned.items() if group is not None} == {
        "single": (5,),
        "tensor": (4, 5),
        "context": (5, 7),
        "tensor_context": (4, 5, 6, 7),
        "data": (1, 5),
        "data_context": (1, 3, 5, 7),
        "tensor_data_context": tuple(range(8)),
        "expert": (5,),
        "expert_tensor": (4, 5),
        "expert_model": (4, 5),
        "expert_data": (1, 3, 5, 7),
        "pipeline": (5,),
        "model": (4, 5),
        "world": tuple(range(8)),
        "embedding": (5,),
    }


def _job(stages: int, tensor: int, data: int) -> Plan:
    half = stages // 2
    meshes = tuple(Mesh(v, stages=half, tensor=tensor, data=data) for v in ("amd", "nvidia"))
    return Plan(meshes=meshes, layers=((1,),) * stages)


@pytest.mark.parametrize(
    ("plan", "by_rank"),
    [
        (_job(8, 8, 16), {0: 6, 200: 5, 1023: 6}),
        (_job(16, 8, 128), {0: 6, 9000: 5, 16383: 6}),
    ],
    ids=["1,024 ranks", "16,384 ranks"],
)
def test_a_rank_creates_a_handful_of_groups_however_many_the_job_has(
    plan: Plan, by_rank: dict[int, int]
) -> None:
    for rank, count in by_rank.items():
        planned = _planned(plan, rank)
        assert len(planned) == count
        assert [group.ranks for group in planned if len(group.ranks) == 1] == [(rank,)]


def test_the_groups_of_one_rank_of_a_mixed_plan() -> None:
    planned = planned_groups(MIXED, 5, vendor_backend="nccl")
    found = {kind: None if group is None else group.ranks for kind, group in planned.items()}
    assert found == {
        "single": (5,),
        "tensor": (4, 5),
        "context": (5,),
        "tensor_context": (4, 5),
        "data": (5, 7),
        "data_context": (5, 7),
        "tensor_data_context": (4, 5, 6, 7),
        "expert": (5,),
        "expert_tensor": (4, 5),
        "expert_model": (4, 5),
        "expert_data": (5, 7),
        "pipeline": None,
        "model": tuple(range(12)),
        "world": tuple(range(12)),
        "embedding": None,
    }
    assert list(planned) == [field.name for field in fields(Groups)]
