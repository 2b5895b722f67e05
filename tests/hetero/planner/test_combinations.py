"""Lower bounds of combinations: never above the best split, and near it."""

from __future__ import annotations

import itertools

import pytest

from hetero.planner.analytic_profile import analytic_profile
from hetero.planner.cluster_shape import cluster_from_mapping
from hetero.planner.combinations import (
    Combinations,
    KindCandidates,
    lower_bounds,
    pipeline_lower_bounds,
)
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


@pytest.mark.parametrize("gbits", [400, 0.01])
@pytest.mark.parametrize("chunks", [1, 2])
def test_the_output_layer_and_a_slow_link_count_where_they_are_most_of_the_work(
    chunks: int, gbits: float
) -> None:
    """A bound that leaves them out is a tenth of the step, and nothing would be left out."""
    kinds = [{**kind, "rail_gbits": gbits} for kind in KINDS]
    cluster = cluster_from_mapping({"nodes": kinds}, source="the test")
    space = SearchSpace(global_batch=64, tensor=(1,), micro_batch=(1,), recompute=("none",))
    problem = Problem(cluster, SMALL, analytic_profile(SMALL, cluster), space)

    def meshes(index: int) -> list[MeshCandidate]:
        (shape,) = mesh_shapes(problem, cluster.kinds[index], 1)
        return mesh_candidates(problem, shape, chunks)

    pairs = list(itertools.product(meshes(0), meshes(1)))
    both = tuple(KindCandidates.of(meshes(index), model=SMALL) for index in range(2))
    bounds = lower_bounds(Combinations(both, 64, chunks), problem)
    one_by_one = pipeline_lower_bounds(pairs, problem, micro_batches=64, chunks=chunks)
    assert bounds == pytest.approx(one_by_one)
    for pair, bound in zip(pairs, bounds, strict=True):
        if bound == float("inf"):
            continue
        pipelines = [
            pipeline_model(problem, order, micro_batches=64, chunks=chunks)
            for order in itertools.permutations(pair)
        ]
        steps = [split.seconds for one in pipelines if (split := best_split(one, 8))]
        assert 0.8 * min(steps) < bound <= min(steps)
