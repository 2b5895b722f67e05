"""The search finds the best plan: on small made-up problems no other plan is shorter."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest

from hetero.planner.accelerators import Accelerator
from hetero.planner.cluster_shape import Cluster, NodeKind, Wire
from hetero.planner.layer_profile import PartCosts, PassTimes, Point, ProfileError
from hetero.planner.layer_split import estimate
from hetero.planner.mesh_options import (
    MeshChoice,
    Problem,
    SearchSpace,
    mesh_choices,
    mesh_options,
    pipeline_of,
)
from hetero.planner.model_shape import ModelShape
from hetero.planner.search import search
from hetero.planner.training_options import TrainingOptions


class DrawnProfile:
    """Costs of every accelerator drawn at random, larger for larger pieces."""

    def __init__(self, draw: random.Random, names: list[str]) -> None:
        self._speed = {name: draw.uniform(0.3, 3) for name in names}
        self._kept = {name: draw.uniform(0.5, 2) for name in names}
        self._missing = draw.random() < 0.2

    def costs(self, accelerator: str, point: Point) -> PartCosts:
        if self._missing and point.tensor == 2 and point.recompute == "full":
            raise ProfileError(f"the profile lacks {point}")
        work = self._speed[accelerator] * point.micro_batch / point.tensor**0.8
        again = work if point.recompute == "full" else 0.0
        kept = self._kept[accelerator] * point.micro_batch / point.tensor * 2**20
        return PartCosts(
            layer=PassTimes(work, 2 * work + again),
            embedding=PassTimes(0.1 * work, 0.2 * work),
            head=PassTimes(0.5 * work, work),
            layer_activation_bytes=kept / 8 if again else kept,
            layer_working_bytes=kept / 4,
        )

    def optimizer_seconds(self, accelerator: str, parameters: float) -> float:
        return 0.05 + parameters * 1e-5 * self._speed[accelerator]


def random_problem(seed: int) -> Problem:
    """Two or three kinds of one or two small nodes, a model of a few layers, scarce memory."""
    draw = random.Random(seed)
    names = ["one", "two", "three"][: draw.choice((1, 2, 2, 2, 3))]
    kinds = []
    for name in names:
        accelerator = Accelerator(
            name=name,
            vendor=draw.choice(("nvidia", "amd")),
            memory_gib=draw.uniform(1, 30) / 1024,
            flops=1e12,
            memory_bandwidth=1e12,
            link_bandwidth=1e9,
            link_latency=1e-5,
            nic_bandwidth=1e8,
            source="",
            link_source="",
            nic_source="",
        )
        per_node = draw.choice((1, 2) if len(names) > 2 else (1, 2, 4))
        inside, rail = Wire(1e8, 1e-3), Wire(draw.choice((1e5, 1e6, 1e8)), 1e-2)
        nodes = draw.randint(1, 2)
        kinds.append(NodeKind(name, accelerator, nodes, per_node, per_node, inside, rail))
    model = ModelShape(
        layers=draw.randint(2, 4 if len(names) > 2 else 6),
        hidden=64,
        ffn=128,
        heads=4,
        query_groups=2,
        head_size=16,
        vocabulary=512,
        seq_length=64,
        gated=True,
        tied=draw.random() < 0.5,
    )
    space = SearchSpace(
        global_batch=draw.choice((4, 6, 8)),
        tensor=(1, 2),
        micro_batch=(1, 2),
        chunks=draw.choice(((1,), (1, 2))),
        replicas=False,
        distributed_optimizer=draw.random() < 0.5,
    )
    options = TrainingOptions(reserved_bytes=0.0)
    return Problem(Cluster(tuple(kinds), {}), model, DrawnProfile(draw, names), space, options)


def splits(layers: int, stages: int, least: int) -> Iterator[tuple[int, ...]]:
    if stages == 1:
        yield (layers,)
        return
    for first in range(least, layers - least * (stages - 1) + 1):
        for rest in splits(layers - first, stages - 1, least):
            yield (first, *rest)


def every_pipeline(problem: Problem) -> Iterator[float]:
    """The seconds of each plan that there is: kinds in every order, each in every shape."""
    batch, layers = problem.space.global_batch, problem.model.layers
    for step in (step for step in range(1, batch + 1) if batch % step == 0):
        for chunks in problem.space.chunks:
            choices: dict[str, list[MeshChoice]] = {
                kind.name: [
                    choice
                    for option in mesh_options(problem, kind, step)
                    for choice in mesh_choices(problem, option, chunks)
                ]
                for kind in problem.cluster.kinds
            }
            for count in range(1, len(choices) + 1):
                for order in itertools.permutations(choices, count):
                    for meshes in itertools.product(*(choices[name] for name in order)):
                        stages = sum(mesh.count for mesh in meshes)
                        if stages * chunks > layers:
                            continue
                        if chunks > 1 and (batch // step % stages or stages == 1):
                            continue
                        pipeline = pipeline_of(
                            problem, meshes, micro_batches=batch // step, chunks=chunks
                        )
                        for split in splits(layers, stages, chunks):
                            counts = np.array(split)
                            if all(counts <= pipeline.most_layers):
                                yield estimate(pipeline, counts).seconds


@pytest.mark.parametrize("seed", range(220))
def test_no_other_pipeline_is_shorter(seed: int) -> None:
    problem = random_problem(seed)
    found = search(problem)
    assert found.is_exact
    shortest = min(every_pipeline(problem), default=None)
    if shortest is None:
        assert not found.candidates
    else:
        assert found.candidates[0].seconds == pytest.approx(shortest, rel=1e-9)
