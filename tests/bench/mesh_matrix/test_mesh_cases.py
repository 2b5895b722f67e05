"""The plans that are tried, and what counts as equal to one process."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from bench.mesh_matrix.cases import GLOBAL_BATCH, HIDDEN, ITERATIONS, SEQUENCE, STEP, all_cases
from bench.mesh_matrix.comparison import Differences

CASES = list(all_cases())
EQUAL = Differences(loss=1e-7, norm=1e-7, gradients=1e-6, parameters=30, bytes_ratio=1.0)


def test_every_shape_stands_beside_every_other_that_eight_processes_have_room_for() -> None:
    shapes = [(t, d) for t, d in product((1, 2, 4), repeat=2) if t * d <= 4]
    tried = {
        tuple((mesh.tensor, mesh.data) for mesh in case.plan.meshes)
        for case in CASES
        if case.plan.stages == 2
    }
    assert tried == set(product(shapes, shapes))
    assert max(case.plan.world_size for case in CASES) == 8


def test_there_is_every_kind_of_plan() -> None:
    plans = [case.plan for case in CASES]
    assert any(len(plan.meshes) == 3 for plan in plans)
    assert any(plan.chunks > 1 for plan in plans)
    assert any(mesh.stages > 1 for plan in plans for mesh in plan.meshes)
    assert any(len(set(plan.layers)) > 1 for plan in plans)
    assert any(mesh.sequence_parallel for plan in plans for mesh in plan.meshes)
    assert len({case.name for case in CASES}) == len(CASES)
    for plan in plans:
        assert {mesh.data * (mesh.micro_batch_size or 0) for mesh in plan.meshes} == {STEP}


def test_bytes_are_those_of_activations_and_gradients_at_each_boundary() -> None:
    tensor = SEQUENCE * HIDDEN * 4 * GLOBAL_BATCH * ITERATIONS
    crossings = {case.name: case.bytes_of_tensors // (2 * tensor) for case in CASES}
    assert crossings["TP1 DP1 (2) / TP1 DP1 (2)"] == 1
    assert crossings["TP2 DP1 sp (1) / TP1 DP2 (2) / TP2 DP2 (1)"] == 2
    assert crossings["TP2 DP1 sp (1+1) / TP1 DP2 (1+1)"] == 3
    assert crossings["TP2 DP1 sp (1+2) / TP1 DP4 (1+1) / TP1 DP1 (2+1)"] == 5


@pytest.mark.parametrize(
    "changed",
    [
        {"loss": 2e-5},
        {"norm": 2e-6},
        {"gradients": 2e-5},
        {"parameters": 0},
        {"bytes_ratio": 2.0},
        {"loss": float("nan")},
    ],
    ids=str,
)
def test_one_difference_is_enough(changed: dict[str, float]) -> None:
    assert EQUAL.is_equal
    assert not replace(EQUAL, **changed).is_equal


def test_a_norm_that_rounding_has_moved_is_judged_by_its_step_alone() -> None:
    moved = replace(EQUAL, norm=2e-6, worst_norm_step=19)
    assert not moved.is_equal
    assert replace(moved, norm_resumed=1e-8).is_equal
    assert not replace(moved, norm_resumed=2e-6).is_equal
    assert not replace(moved, norm=2e-5, norm_resumed=1e-8).is_equal
