"""Lower bounds of combinations: never above the best split, and near it."""

from __future__ import annotations

import itertools

import pytest

from hetero.planner.analytic_profile import analytic_profile
from hetero.planner.cluster_shape import cluster_from_mapping
from hetero.planner.combinations import Combinations, KindCandidates, lower_bounds
from hetero.planner.layer_split import best_split
from hetero.planner.model_shape import ModelShape
from hetero.planner.search_space import (
    MeshCandidate,
    Problem,
    SearchSpace,
    mesh_candidates,
    mesh_shapes,
    pipeline_model,
)

SMALL = ModelShape(
    layers=8,
    hidden=128,
    ffn=512,
    heads=8,
    query_groups=8,
    head_size=16,
    vocabulary=128_256,
    seq_length=128,
    gated=False,
    tied=False,
)
KINDS = [{"accelerator": name, "gpus_per_node": 2} for name in ("H100-SXM", "B200")]


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_output_layer_counts_where_it_is_most_of_the_work(chunks: int) -> None:
    """A bound that leaves it out is a tenth of the step, and nothing would be left out."""
    cluster = cluster_from_mapping({"nodes": KINDS}, source="the test")
    space = SearchSpace(global_batch=64, tensor=(1,), micro_batch=(1,), recompute=("none",))
    problem = Problem(cluster, SMALL, analytic_profile(SMALL, cluster), space)

    def meshes(index: int) -> list[MeshCandidate]:
        (shape,) = mesh_shapes(problem, cluster.kinds[index], 1)
        return mesh_candidates(problem, shape, chunks)

    for pair in itertools.product(meshes(0), meshes(1)):
        kinds = tuple(KindCandidates.of([mesh], model=SMALL) for mesh in pair)
        (bound,) = lower_bounds(Combinations(kinds, 64, chunks), problem)
        if bound == float("inf"):
            continue
        pipelines = [
            pipeline_model(problem, order, micro_batches=64, chunks=chunks)
            for order in itertools.permutations(pair)
        ]
        steps = [split.seconds for one in pipelines if (split := best_split(one, 8))]
        assert 0.8 * min(steps) < bound <= min(steps)
