"""The search finds the best plan: on small made-up problems no other plan is shorter."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from hetero.planner.accelerators import Accelerator
from hetero.planner.cluster_shape import Cluster, LinkModel, NodeKind
from hetero.planner.layer_profile import PartCosts, PassTimes, Point, ProfileError
from hetero.planner.layer_split import estimate
from hetero.planner.model_shape import ModelShape
from hetero.planner.replica_search import CompletionTimes, best_shares, search_replicas
from hetero.planner.search import search
from hetero.planner.search_space import (
    MeshCandidate,
    Problem,
    SearchSpace,
    mesh_candidates,
    mesh_shapes,
    pipeline_model,
)
from hetero.planner.solution import simulate_candidate
from hetero.planner.training_options import TrainingOptions
from tests.hetero.planner.test_layer_split import splits


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
            embedding_working_bytes=kept / 3,
            head_working_bytes=kept / 2,
        )

    def optimizer_seconds(self, accelerator: str, parameters: float) -> float:
        return 0.05 + parameters * 1e-5 * self._speed[accelerator]

    def reduction_seconds(self, accelerator: str, parameters: float) -> float:
        return parameters * 2e-6 * self._speed[accelerator]


def small_part(name: str, vendor: str, *, mib: float) -> Accelerator:
    return Accelerator(
        name=name,
        vendor=vendor,
        memory_gib=mib / 1024,
        flops=1e12,
        memory_bandwidth=1e12,
        link_bandwidth=1e9,
        link_latency=1e-5,
        nic_bandwidth=1e8,
        source="",
        link_source="",
        nic_source="",
    )


def small_model(layers: int, *, tied: bool) -> ModelShape:
    return ModelShape(
        layers=layers,
        hidden=64,
        ffn=128,
        heads=4,
        query_groups=2,
        head_size=16,
        vocabulary=512,
        seq_length=64,
        gated=True,
        tied=tied,
    )


def random_problem(seed: int) -> Problem:
    """Two or three kinds of one or two small nodes, a model of a few layers, scarce memory."""
    draw = random.Random(seed)
    names = ["one", "two", "three"][: draw.choice((1, 2, 2, 2, 3))]
    kinds = []
    for name in names:
        accelerator = small_part(name, draw.choice(("nvidia", "amd")), mib=draw.uniform(1, 30))
        per_node = draw.choice((1, 2) if len(names) > 2 else (1, 2, 4))
        inside, rail = LinkModel(1e8, 1e-3), LinkModel(draw.choice((1e5, 1e6, 1e8)), 1e-2)
        if seed % 2:
            rail = replace(rail, duplex_bandwidth=0.6 * rail.bandwidth)
        nodes = draw.randint(1, 2)
        kinds.append(NodeKind(name, accelerator, nodes, per_node, per_node, inside, rail))
    model = small_model(draw.randint(2, 4 if len(names) > 2 else 6), tied=draw.random() < 0.5)
    space = SearchSpace(
        global_batch=draw.choice((4, 6, 8)),
        tensor=(1, 2),
        micro_batch=(1, 2),
        chunks=draw.choice(((1,), (1, 2))),
        replicas=False,
        distributed_optimizer=draw.random() < 0.5,
        context=draw.choice(((1,), (1, 2))),
    )
    options = TrainingOptions(reserved_bytes=0.0)
    return Problem(Cluster(tuple(kinds), {}), model, DrawnProfile(draw, names), space, options)


def even_problem(*, memory: tuple[int, int], layers: int, batch: int) -> Problem:
    """Two kinds of one GPU each, as fast as each other, with so many MiB."""
    kinds = []
    for name, vendor, size in zip(("one", "two"), ("nvidia", "amd"), memory, strict=True):
        accelerator = small_part(name, vendor, mib=size)
        kinds.append(
            NodeKind(name, accelerator, 1, 1, 1, LinkModel(1e9, 1e-5), LinkModel(1e9, 1e-5))
        )
    model = small_model(layers, tied=False)
    space = SearchSpace(global_batch=batch, tensor=(1,), micro_batch=(1,), replicas=False)
    profile = EqualProfile()
    options = TrainingOptions(reserved_bytes=0.0)
    return Problem(Cluster(tuple(kinds), {}), model, profile, space, options)


class EqualProfile:
    """A layer keeps a MiB, or an eighth where it is computed again."""

    def costs(self, accelerator: str, point: Point) -> PartCosts:
        again = 1.0 if point.recompute == "full" else 0.0
        kept = 2**17 if again else 2**20
        return PartCosts(
            PassTimes(1, 2 + again), PassTimes(0.1, 0.1), PassTimes(0.1, 0.1), kept * 4
        )

    def optimizer_seconds(self, accelerator: str, parameters: float) -> float:
        return 1e-3

    def reduction_seconds(self, accelerator: str, parameters: float) -> float:
        return 0.0


def every_pipeline(problem: Problem) -> Iterator[float]:
    """The seconds of each plan that there is: kinds in every order, each in every shape."""
    batch, layers = problem.space.global_batch, problem.model.layers
    for step in (step for step in range(1, batch + 1) if batch % step == 0):
        for chunks in problem.space.chunks:
            choices: dict[str, list[MeshCandidate]] = {
                kind.name: [
                    choice
                    for option in mesh_shapes(problem, kind, step)
                    for choice in mesh_candidates(problem, option, chunks)
                ]
                for kind in problem.cluster.kinds
            }
            for count in range(1, len(choices) + 1):
                for order in itertools.permutations(choices, count):
                    for meshes in itertools.product(*(choices[name] for name in order)):
                        stages = sum(mesh.stages for mesh in meshes)
                        if stages * chunks > layers:
                            continue
                        if chunks > 1 and (batch // step % stages or stages == 1):
                            continue
                        pipeline = pipeline_model(
                            problem, meshes, micro_batches=batch // step, chunks=chunks
                        )
                        for split in splits(layers, stages, chunks):
                            counts = np.array(split)
                            if all(counts <= pipeline.max_layers):
                                yield estimate(pipeline, counts).seconds


LARGEST = 6
"""Of the first problems: it has as many pipelines as the others together."""


@pytest.mark.parametrize(
    "seed",
    [pytest.param(n, marks=[pytest.mark.slow] * (n >= 40 or n == LARGEST)) for n in range(220)],
)
def test_no_other_pipeline_is_shorter(seed: int) -> None:
    problem = random_problem(seed)
    found = search(problem)
    assert found.is_exact
    shortest = min(every_pipeline(problem), default=None)
    if shortest is None:
        assert not found.candidates
    else:
        assert found.candidates[0].seconds == pytest.approx(shortest, rel=1e-9)


def with_mtp_layers(problem: Problem, layers: int) -> Problem:
    return replace(problem, model=replace(problem.model, mtp_layers=layers))


@pytest.mark.parametrize("seed", range(0, 220, 20))
def test_no_other_pipeline_with_mtp_layers_is_shorter(seed: int) -> None:
    problem = with_mtp_layers(random_problem(seed), 1 + seed % 3)
    found = search(problem)
    shortest = min(every_pipeline(problem), default=None)
    if shortest is None:
        assert not found.candidates
    else:
        assert found.candidates[0].seconds == pytest.approx(shortest, rel=1e-9)


def test_what_few_micro_batches_keep_in_flight_leaves_room_for_layers() -> None:
    """One micro-batch is in flight on every stage, however many stages there are."""
    problem = even_problem(memory=(12, 1), layers=4, batch=1)
    kind = replace(problem.cluster.kinds[0], gpus_per_node=2)
    problem = replace(problem, cluster=Cluster((kind,), {}))
    shortest = min(every_pipeline(problem), default=None)
    assert shortest is not None
    assert search(problem).candidates[0].seconds == pytest.approx(shortest)


def test_groups_that_would_lie_over_two_nodes_are_not_proposed() -> None:
    """Nodes of 3 GPUs: tensor-parallel pairs stand on the first one alone."""
    problem = even_problem(memory=(400, 400), layers=4, batch=8)
    kinds = [replace(kind, nodes=2, gpus_per_node=3) for kind in problem.cluster.kinds]
    space = replace(problem.space, tensor=(2, 4), replicas=True)
    problem = replace(problem, cluster=Cluster(tuple(kinds), {}), space=space)
    found = search(problem).candidates
    assert found
    for candidate in found:
        assert simulate_candidate(problem, candidate).placement.plan.world_size <= 4


def test_only_interleaved_pipelines_are_no_whole_replicas() -> None:
    problem = even_problem(memory=(400, 400), layers=3, batch=8)
    for chunks, proposed in (((1,), True), ((2,), False)):
        space = replace(problem.space, chunks=chunks, replicas=True)
        assert bool(search(replace(problem, space=space)).candidates) is proposed


@pytest.mark.parametrize("mtp_layers", [0, 2])
@pytest.mark.parametrize("seed", range(0, 220, 10))
def test_a_plan_costs_what_the_planner_says_of_it_and_fits(seed: int, mtp_layers: int) -> None:
    problem = with_mtp_layers(random_problem(seed), mtp_layers)
    if mtp_layers:
        # Of chunks of so unequal cost the estimate says less.
        problem = replace(problem, space=replace(problem.space, chunks=(1,)))
    for candidate in search(problem).candidates:
        played = simulate_candidate(problem, candidate).prediction
        assert played.fits
        # With few micro-batches 1F1B waits less than the search's estimate allows for.
        assert candidate.seconds == pytest.approx(played.seconds, rel=0.25)
        assert candidate.seconds > 0.85 * played.seconds


@pytest.mark.parametrize("seed", range(0, 220, 11))
def test_leaving_combinations_out_costs_little(seed: int) -> None:
    problem = random_problem(seed)
    exact, pruned = search(problem), search(problem, exact_limit=10)
    if exact.candidates:
        shortest = exact.candidates[0].seconds
        assert pruned.candidates[0].seconds == pytest.approx(shortest, rel=0.01)


def test_the_vendor_with_more_memory_holds_what_is_in_flight() -> None:
    """The same speed, half the memory: 1F1B keeps most activations on the first stages."""
    problem = even_problem(memory=(40, 20), layers=8, batch=8)
    first = search(problem).candidates[0]
    assert [mesh.shape.kind.name for mesh in first.meshes] == ["one", "two"]


def test_the_last_stage_gets_fewer_layers_the_more_mtp_layers_it_has() -> None:
    """Each takes 4/3 of a layer there, of which the first of two equal stages takes half over."""
    even = even_problem(memory=(400, 400), layers=16, batch=64)
    found = [search(with_mtp_layers(even, count)).candidates[0] for count in range(5)]
    behind = [one.split.layers[-1] for one in found]
    assert behind == [8, 7, 7, 6, 5]
    assert all(sum(one.split.layers) == 16 for one in found)


@pytest.mark.parametrize("total", [7, 12, 30])
def test_shares_end_together_as_soon_as_can_be(total: int) -> None:
    draw = random.Random(total)
    for _ in range(50):
        replicas = [draw.randint(1, 3) for _ in range(draw.randint(1, 3))]
        ends = [
            draw.uniform(0, 3) + np.arange(1, total // count + 1) * draw.uniform(0.3, 3)
            for count in replicas
        ]
        every = [
            max(times[share - 1] for times, share in zip(ends, shares, strict=True))
            for shares in itertools.product(*(range(1, len(times) + 1) for times in ends))
            if sum(s * count for s, count in zip(shares, replicas, strict=True)) == total
        ]
        found = best_shares(ends, replicas, total)
        if not every:
            assert found is None
        else:
            assert found is not None
            latest = max(times[share - 1] for times, share in zip(ends, found, strict=True))
            assert latest == min(every)


def test_however_many_micro_batches_are_shared_at_once() -> None:
    ends = [CompletionTimes(period, period, 10**12) for period in (1.0, 3.0)]
    shares = best_shares(ends, [8, 6], 10**12)
    assert shares is not None
    assert 8 * shares[0] + 6 * shares[1] == 10**12
    assert max(shares[0] * 1.0, shares[1] * 3.0) == pytest.approx(1e12 / 10, rel=1e-4)


def test_whole_replicas_win_where_links_between_vendors_are_slow_and_layers_few() -> None:
    problem = even_problem(memory=(400, 400), layers=3, batch=24)
    slow = {frozenset(("one", "two")): LinkModel(1e6, 0.5)}
    problem = replace(
        problem,
        cluster=replace(problem.cluster, inter_kind_links=slow),
        space=replace(problem.space, replicas=True),
    )
    first = search(problem).candidates[0]
    assert len(first.shares) == 2
    counts = [mesh.shape.stage.data for mesh in first.meshes]
    assert sum(share * count for share, count in zip(first.shares, counts, strict=True)) == 24


def test_a_kind_has_fewer_replicas_than_its_gpus_make_where_the_batch_divides_better() -> None:
    """13 samples are no sum of sixes and eights: one GPU has to stand idle."""
    found = search(six_and_eight_gpus(batch=13))
    first = found.candidates[0]
    assert found.is_exact
    assert first.shares == (1, 1)
    assert sum(mesh.shape.stage.data for mesh in first.meshes) == 13


def test_truncated_search_keeps_plans_of_many_replicas() -> None:
    fourteen = list(search_replicas(six_and_eight_gpus(batch=14), cutoff=math.inf, is_exact=False))
    assert fourteen[-1].shares == (1, 1)
    thirteen = list(search_replicas(six_and_eight_gpus(batch=13), cutoff=math.inf, is_exact=False))
    assert sum(mesh.shape.stage.data for mesh in thirteen[-1].meshes) == 13


def six_and_eight_gpus(*, batch: int) -> Problem:
    """Each GPU holds a replica of its own."""
    problem = even_problem(memory=(400, 400), layers=1, batch=batch)
    kinds = tuple(
        replace(kind, gpus_per_node=gpus)
        for kind, gpus in zip(problem.cluster.kinds, (6, 8), strict=True)
    )
    space = replace(problem.space, replicas=True)
    return replace(problem, cluster=Cluster(kinds, {}), space=space)
