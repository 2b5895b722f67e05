"""What users are told of the best plan: it is the best of what is simulated, not of estimates."""

from __future__ import annotations

from hetero.planner.accelerators import built_in_accelerators
from hetero.planner.analytic_profile import analytic_profile
from hetero.planner.cluster_shape import Cluster, LinkModel, NodeKind
from hetero.planner.model_shape import ModelShape
from hetero.planner.search_space import Problem, SearchSpace
from hetero.planner.solution import solve


def test_no_vendor_alone_is_faster_than_the_answer_where_estimates_are_too_short() -> None:
    """Over a slow link a pipeline waits longer than it is estimated to."""
    parts = {part.name: part for part in built_in_accelerators().values()}
    slow = LinkModel(1.25e8, 5e-6)
    kinds = tuple(
        NodeKind(name, parts[name], 1, gpus, gpus, LinkModel(3e10, 5e-6), LinkModel(2.5e10, 1.5e-5))
        for name, gpus in (("MI210", 4), ("H100-PCIe", 1))
    )
    cluster = Cluster(kinds, {frozenset(("MI210", "H100-PCIe")): slow})
    model = ModelShape(
        layers=48,
        hidden=2048,
        ffn=8192,
        heads=16,
        query_groups=2,
        head_size=128,
        vocabulary=151_936,
        seq_length=32_768,
        gated=False,
        tied=True,
    )
    space = SearchSpace(global_batch=16, tensor=(1,), micro_batch=(1,), replicas=False)
    found = solve(Problem(cluster, model, analytic_profile(model, cluster), space))
    assert found is not None
    assert found.best.search_result.candidates[0].seconds < 0.9 * found.best.first.seconds
    assert found.speedup_over_best_vendor >= 1
