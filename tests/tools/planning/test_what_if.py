"""What would change the step: plots whose values at the present setting are the plan's own."""

from __future__ import annotations

import re

import pytest

from hetero.planner.analytic_profile import analytic_profile
from hetero.planner.cluster_shape import cluster_from_mapping
from hetero.planner.model_shape import load_model
from hetero.planner.search_space import Problem, SearchSpace
from hetero.planner.solution import solve
from hetero.tools.planning.plan_page import draw_sweep
from hetero.tools.planning.what_if import Sweep, sweep


def test_the_plan_s_own_split_is_among_the_splits_and_memory_decides_where_layers_go() -> None:
    """Stages of 16 GiB: the first has room for fewer layers than time alone would give it."""
    nodes = [
        {"accelerator": "V100-SXM2-16GB", "gpus_per_node": 4},
        {"accelerator": "MI210", "gpus_per_node": 1},
    ]
    cluster = cluster_from_mapping({"nodes": nodes}, source="the test")
    model = load_model("llama3.2-1b", seq_length=8192)
    space = SearchSpace(
        global_batch=16, tensor=(1,), micro_batch=(1,), recompute=("none",), replicas=False
    )
    problem = Problem(cluster, model, analytic_profile(model, cluster), space)
    found = solve(problem)
    first = found.best.first
    stages = first.candidate.meshes[0].stages
    assert (len(first.candidate.meshes), stages > 1) == (2, True)
    (plot,) = sweep("split", problem, found, progress=lambda _: None)
    own = float(sum(first.candidate.split.layers[:stages]))
    assert dict(zip(plot.x, plot.y, strict=True))[own] == pytest.approx(first.seconds)
    assert own not in plot.not_fitting


def test_nodes_are_counted_in_whole_numbers() -> None:
    plot = Sweep(
        title="Other numbers of nodes",
        caption="",
        x_label="nodes",
        y_label="tokens/s",
        x=(0.0, 1.0, 2.0),
        y=(1.0, 2.0, 3.0),
    )
    texts = re.findall(r"<text[^>]*>([^<]*)<", draw_sweep(plot, {}))
    assert texts[: texts.index("nodes")] == ["0", "1", "2"]
