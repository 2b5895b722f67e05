"""The search shares experts as training lets it, and finds what estimates say is best."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hetero.plan.plan import expert_rank_problems
from hetero.planner.analytic_profile import analytic_profile
from hetero.planner.cluster_shape import Cluster, cluster_from_mapping
from hetero.planner.layer_split import best_split, estimate
from hetero.planner.model_shape import ModelShape, load_model
from hetero.planner.peak_memory import in_flight
from hetero.planner.replica_search import search_replicas
from hetero.planner.search import search
from hetero.planner.search_space import (
    MeshCandidate,
    Problem,
    SearchSpace,
    build_placement,
    expert_sizes,
    layer_sizes,
    mesh_candidates,
    mesh_shapes,
    pipeline_model,
)
from hetero.planner.solution import find_best_plans, simulate_candidate
from hetero.planner.training_options import TrainingOptions
from tests.hetero.planner.expert_models import DEEPSEEK_LIKE, QWEN3_30B, model

QWEN, DEEPSEEK = model(QWEN3_30B), model(DEEPSEEK_LIKE)


def nodes(*accelerators: str, count: int = 1, **keys: Any) -> Cluster:
    kinds = [{"accelerator": name, "nodes": count, **keys} for name in accelerators]
    return cluster_from_mapping({"nodes": kinds}, source="the test")


def problem(of: ModelShape, cluster: Cluster, **space: Any) -> Problem:
    chosen = SearchSpace(
        **{
            "global_batch": 64,
            "experts": expert_sizes(of, 8),
            "sequence_parallel": bool(of.num_experts),
            "tensor": (1, 2),
            "micro_batch": (1, 2),
            **space,
        }
    )
    options = TrainingOptions(expert_dispatcher="alltoall")
    return Problem(cluster, of, analytic_profile(of, cluster), chosen, options)


def test_sizes_that_are_tried_unasked_divide_the_experts_and_fit_a_node() -> None:
    assert expert_sizes(QWEN, 8) == (1, 2, 4, 8)
    assert expert_sizes(replace(QWEN, num_experts=60), 8) == (1, 2, 3, 4, 5, 6)
    assert expert_sizes(load_model("llama3-8b"), 8) == (1,)


def test_one_rank_or_the_tensor_parallel_ones_share_an_expert() -> None:
    sizes = layer_sizes(problem(QWEN, nodes("H200"), experts=(1, 4), tensor=(1, 4)))
    found = {(one.tensor, one.experts, one.expert_tensor) for one in sizes}
    assert found == {(1, 1, None), (1, 4, None), (4, 1, None), (4, 4, 1), (4, 4, None)}


def test_tensor_parallel_ranks_that_would_compute_every_token_are_not_tried() -> None:
    sizes = layer_sizes(problem(QWEN, nodes("H200"), sequence_parallel=False))
    assert {one.tensor for one in sizes} == {1}


def test_latent_vectors_are_divided_with_the_sequence_or_not_at_all() -> None:
    latent = load_model("deepseek-v2-lite", num_experts=None)
    for is_shared, sizes in ((False, {1}), (True, {1, 2})):
        found = layer_sizes(problem(latent, nodes("H200"), sequence_parallel=is_shared))
        assert {one.tensor for one in found} == sizes


def test_ranks_of_experts_are_on_one_node_or_on_all_gpus_of_several() -> None:
    for size, fits in ((4, True), (8, True), (16, True), (12, False), (6, False)):
        of = replace(QWEN, num_experts=96)
        shapes = mesh_shapes(
            problem(of, nodes("H200", count=6), experts=(size,), tensor=(1,)),
            nodes("H200", count=6).kinds[0],
            48,
        )
        assert any(True for _ in shapes) is fits


@pytest.mark.parametrize(
    "of",
    [QWEN, DEEPSEEK, load_model("deepseek-v2-lite")],
    ids=["qwen", "deepseek", "latent attention"],
)
def test_plans_share_experts_as_training_lets_them_and_fit(of: ModelShape) -> None:
    best = find_best_plans(problem(of, nodes("H100-SXM", "MI300X")), runners_up=10)
    assert best is not None
    for found in best.plans:
        for mesh in found.placement.plan.meshes:
            assert not list(expert_rank_problems(mesh))
            assert of.num_experts % mesh.experts == 0
            assert mesh.tensor == 1 or mesh.sequence_parallel
        assert found.prediction.fits
    assert any(mesh.experts > 1 for mesh in best.first.placement.plan.meshes)


def test_a_layer_that_fits_on_no_gpu_alone_is_shared() -> None:
    """Its experts take 106 GB with their gradients, and a layer is on one stage."""
    wide = model(DEEPSEEK_LIKE, num_layers=1, moe_layer_freq="[1]", num_experts=2048)
    asked = problem(wide, nodes("H100-SXM"), experts=(1,), tensor=(1,))
    assert find_best_plans(asked) is None
    best = find_best_plans(replace(asked, space=replace(asked.space, experts=(1, 8))))
    assert best is not None
    assert best.first.placement.plan.meshes[0].experts == 8


def test_whole_replicas_share_experts_alike_and_hold_all_of_them() -> None:
    asked = problem(QWEN, nodes("H200", "MI325X"), recompute=("full",))
    found = list(search_replicas(asked, cutoff=np.inf, is_exact=True))
    assert found
    for replicas in found:
        placement = build_placement(
            asked, replicas.meshes, replicas.split.layers, shares=replicas.shares
        )
        meshes = placement.plan.meshes
        assert len({(mesh.experts, mesh.ranks_per_expert) for mesh in meshes}) == 1
        assert all(not list(expert_rank_problems(mesh)) for mesh in meshes)
    assert found[-1].meshes[0].shape.stage.experts > 1


def test_what_is_left_out_for_a_shape_that_is_no_worse_would_not_win() -> None:
    """Every other way to share the experts is no shorter in the same pipeline."""
    asked = problem(DEEPSEEK, nodes("H200"), tensor=(2,), micro_batch=(1,), replicas=False)
    best = search(asked).candidates[0].seconds
    for size, width in itertools.product((1, 2, 4, 8), (1, 2)):
        own = replace(asked, space=replace(asked.space, experts=(size,)))
        others = [one.seconds for one in search(own, num_candidates=20).candidates]
        assert all(seconds >= best * (1 - 1e-9) for seconds in others), (size, width)


def of_pattern(*pattern: int) -> ModelShape:
    return model(DEEPSEEK_LIKE, num_layers=len(pattern), moe_layer_freq=list(pattern))


@pytest.mark.parametrize(
    "of",
    [
        of_pattern(*[0] * 4, *[1] * 8),
        of_pattern(*[1, 0] * 6),
        of_pattern(*[1] * 12),
        replace(of_pattern(*[0] * 4, *[1] * 4), mtp_layers=1),
    ],
    ids=["dense first", "alternating", "all sparse", "mtp"],
)
def test_as_many_layers_as_memory_holds_do_fit_wherever_they_are(of: ModelShape) -> None:
    asked = problem(of, nodes("L40S", gpus_per_node=4), tensor=(1,), micro_batch=(1,))
    (kind,) = asked.cluster.kinds
    for shape in mesh_shapes(asked, kind, 1):
        for stages in (1, 2, 4):
            flights = np.array(
                [in_flight(one, stages=stages, micro_batches=64) for one in range(stages)]
            )
            most = shape.max_layers(of, flights, chunks=1, first=True, last=True)
            at_best = shape.max_layers(of, flights, chunks=1, first=False, last=False, at_best=True)
            assert (at_best >= most).all()
            candidate = next(
                (one for one in mesh_candidates(asked, shape, 1) if one.stages == stages), None
            )
            if candidate is None or most.sum() < of.layers:
                continue
            assert fits(asked, candidate, of.layers)


def fits(asked: Problem, mesh: MeshCandidate, layers: int) -> bool:
    pipeline = pipeline_model(asked, [mesh], micro_batches=asked.space.global_batch)
    split = best_split(pipeline, layers)
    assert split is not None
    found = next(
        one
        for one in search(asked, num_candidates=500).candidates
        if one.meshes[0].shape.stage == mesh.shape.stage and one.meshes[0].stages == mesh.stages
    )
    costs = simulate_candidate(asked, found).costs
    limit = mesh.shape.kind.accelerator.memory_gib * 2**30
    return all(rank.peak <= limit for ranks in costs.memory for rank in ranks)


@pytest.mark.parametrize("mtp_layers", [0, 2])
def test_the_estimate_of_a_model_of_equal_sparse_layers_is_that_of_its_costs(
    mtp_layers: int,
) -> None:
    of = replace(QWEN, mtp_layers=mtp_layers)
    asked = problem(of, nodes("H200", "MI325X"), replicas=False)
    for candidate in search(asked, num_candidates=5).candidates:
        pipeline = candidate.pipeline(asked)
        costs = simulate_candidate(asked, candidate).costs
        own = estimate(pipeline, np.array(candidate.split.layers))
        slowest = max(
            sum(forward) + sum(backward)
            for one in costs.pipelines
            for forward, backward in zip(one.forward, one.backward, strict=True)
        )
        assert own.period >= slowest * (1 - 1e-9)
        update = max(
            reduce + seconds for reduce, seconds in zip(costs.reduce, costs.update[0], strict=True)
        )
        assert own.update_seconds == pytest.approx(update, rel=0.02)


@pytest.mark.parametrize(
    ("name", "kinds", "batch", "sequence_parallel", "seconds", "layers"),
    [
        ("llama3-8b", 1, 64, False, 3.583725743137192, None),
        ("llama3-8b", 2, 256, True, 6.732295487460565, (16, 16)),
        ("llama3_70b", 4, 512, True, 60.917167947907224, None),
    ],
)
def test_a_dense_model_is_predicted_as_without_experts_to_the_digit(
    name: str,
    kinds: int,
    batch: int,
    sequence_parallel: bool,
    seconds: float,
    layers: tuple[int, ...] | None,
) -> None:
    cluster = nodes("H100-SXM", "MI300X", count=kinds)
    of = load_model(name)
    space = SearchSpace(global_batch=batch, sequence_parallel=sequence_parallel)
    asked = Problem(cluster, of, analytic_profile(of, cluster), space)
    best = find_best_plans(asked)
    assert best is not None
    assert best.first.seconds == pytest.approx(seconds, rel=1e-12)
    if layers is not None:
        assert best.first.candidate.split.layers == layers
