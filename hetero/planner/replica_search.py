"""Search for plans of data parallelism across kinds of nodes: whole replicas on each kind.

All replicas have the same stages, tensor size, micro-batch size and layers. Micro-batches are
divided so that the makespan of all replicas is shortest.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np

from hetero.planner.cluster_shape import NodeKind
from hetero.planner.communication_costs import stage_reduction_seconds
from hetero.planner.fp8 import BF16
from hetero.planner.layer_split import IntArray, PipelineModel, Split, best_split, estimate
from hetero.planner.prediction import estimate_seconds
from hetero.planner.replica_shapes import ReplicaShape, candidate_shapes
from hetero.planner.search_space import (
    MeshCandidate,
    MeshShape,
    Problem,
    build_placement,
    mesh_candidates,
    mesh_shape,
    pipeline_model,
    stage_shape,
)
from hetero.planner.step_costs import step_costs

_MAX_ENUMERATED_SPLITS = 500
"""Splits of layers up to which all are evaluated."""


@dataclass(frozen=True)
class ReplicaPlan:
    """A plan of whole replicas with its estimated step."""

    meshes: tuple[MeshCandidate, ...]
    split: Split
    shares: tuple[int, ...]
    """Micro-batches of each replica of each mesh."""


def search_replicas(problem: Problem, *, cutoff: float, is_exact: bool) -> Iterator[ReplicaPlan]:
    """Plans of whole replicas, each better than the last, the first below `cutoff` seconds.

    Their flags are the same on all kinds, so without fp8 where a kind has none.
    """
    if any(kind.accelerator.fp8_flops is None for kind in problem.cluster.kinds):
        problem = replace(problem, options=replace(problem.options, fp8=BF16))
    for shape in candidate_shapes(problem, is_exact=is_exact):
        if shape.lower_bound >= cutoff:
            continue
        for found in _search_shape(problem, shape, cutoff):
            cutoff = found.split.seconds
            yield found


def _reduction_lower_bound(problem: Problem, shape: ReplicaShape) -> float:
    """A lower bound of the gradient reduction: of the first stage, with one layer."""
    model = problem.model
    sparse = model.all_sparse_layers if shape.stages == 1 else model.sparse_pattern[:1].count(1)
    experts = float(sparse * model.expert_parameters)
    layer = model.sparse_layer_parameters if sparse else model.layer_parameters
    parameters = float(model.embedding_parameters + layer)
    if shape.stages == 1:
        experts += model.head_expert_parameters
        parameters = model.parameters - experts
    parameters /= shape.sizes.tensor
    experts /= shape.sizes.ranks_of_experts
    dp_group = [
        stage_shape(
            problem,
            kind,
            shape.sizes,
            data=data,
            micro_batch=shape.micro_batch,
            recompute="none",
        )
        for kind, data in zip(shape.kinds, shape.data, strict=True)
    ]
    options = problem.options
    if options.overlap_grad_reduce or options.overlap_param_gather:
        return 0.0
    return sum(
        stage_reduction_seconds(
            problem.cluster,
            dp_group,
            shared=parameters,
            experts=experts,
            profile=problem.profile,
            options=options,
        )
    )


def _search_shape(problem: Problem, shape: ReplicaShape, cutoff: float) -> Iterator[ReplicaPlan]:
    """Plans of a shape, each better than the last: every recomputation and candidate split."""
    reduction = _reduction_lower_bound(problem, shape)
    if shape.lower_bound + reduction >= cutoff:
        return
    total = problem.space.global_batch // shape.micro_batch
    mean_micro_batches = max(1, total // sum(shape.data))
    for recompute in problem.space.recompute:
        meshes = [
            mesh
            for kind, data in zip(shape.kinds, shape.data, strict=True)
            if (candidate := _mesh_shape(problem, shape, kind, data, recompute)) is not None
            for mesh in mesh_candidates(problem, candidate, 1, micro_batches=mean_micro_batches)
            if mesh.stages == shape.stages and mesh.max_layers >= problem.model.layers
        ]
        if len(meshes) < len(shape.kinds):
            continue
        pipelines = [
            pipeline_model(problem, [mesh], micro_batches=mean_micro_batches) for mesh in meshes
        ]
        for layers in _candidate_splits(problem.model.layers, shape.stages, pipelines):
            if not all(bool((layers <= pipeline.max_layers).all()) for pipeline in pipelines):
                continue
            if _passes_lower_bound(pipelines, layers, shape.data, total) + reduction >= cutoff:
                continue
            splits = [estimate(pipeline, layers) for pipeline in pipelines]
            found = _with_best_shares(problem, shape, meshes, splits, total)
            if found is not None and found.split.seconds < cutoff:
                cutoff = found.split.seconds
                yield found


def _passes_lower_bound(
    pipelines: Sequence[PipelineModel], layers: IntArray, data: Sequence[int], total: int
) -> float:
    """A lower bound of the passes over all divisions of the micro-batches: all finish at once.

    A replica's n micro-batches pass its slowest stage one by one, after the stages before it.
    """
    rates = fill = 0.0
    for pipeline, replicas in zip(pipelines, data, strict=True):
        times = pipeline.layer_seconds * layers + pipeline.extra_seconds
        slowest = int(times.argmax())
        rates += replicas / times[slowest]
        fill += replicas * times[:slowest].sum() / times[slowest]
    return float((total + fill) / rates)


def _mesh_shape(
    problem: Problem, shape: ReplicaShape, kind: NodeKind, data: int, recompute: str
) -> MeshShape | None:
    stage = stage_shape(
        problem,
        kind,
        shape.sizes,
        data=data,
        micro_batch=shape.micro_batch,
        recompute=recompute,
    )
    return mesh_shape(problem, kind, stage, copies=shape.sizes.context * sum(shape.data))


def _candidate_splits(
    layers: int, stages: int, pipelines: Sequence[PipelineModel]
) -> Iterator[IntArray]:
    """Every split where there are few, else the best one for each kind."""
    if math.comb(layers - 1, stages - 1) <= _MAX_ENUMERATED_SPLITS:
        for ends in itertools.combinations(range(1, layers), stages - 1):
            yield np.diff([0, *ends, layers])
        return
    found = {split.layers for one in pipelines if (split := best_split(one, layers)) is not None}
    for counts in sorted(found):
        yield np.array(counts)


def _with_best_shares(
    problem: Problem,
    shape: ReplicaShape,
    meshes: Sequence[MeshCandidate],
    splits: Sequence[Split],
    total: int,
) -> ReplicaPlan | None:
    """The plan with the shortest makespan; None where `total` micro-batches cannot be divided."""
    mean_micro_batches = max(1, total // sum(shape.data))
    completion = [
        CompletionTimes(
            first=split.seconds - split.period * (mean_micro_batches - 1),
            period=split.period,
            max_micro_batches=total // replicas,
        )
        for split, replicas in zip(splits, shape.data, strict=True)
    ]
    shares = best_shares(completion, shape.data, total)
    if shares is None:
        return None
    layers = splits[0].layers
    costs = step_costs(
        build_placement(problem, meshes, layers, shares=shares),
        model=problem.model,
        cluster=problem.cluster,
        profile=problem.profile,
        options=problem.options,
    )
    period = max(split.period for split in splits)
    update = max(split.update_seconds for split in splits)
    split = Split(layers, estimate_seconds(costs), period, update)
    return ReplicaPlan(tuple(meshes), split, shares)


@dataclass(frozen=True)
class CompletionTimes(Sequence[float]):
    """A virtual list: element n - 1 is when a replica with n micro-batches finishes."""

    first: float
    period: float
    max_micro_batches: int

    def __len__(self) -> int:
        return self.max_micro_batches

    @overload
    def __getitem__(self, index: int) -> float: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[float]: ...
    def __getitem__(self, index: int | slice) -> float | Sequence[float]:
        if isinstance(index, slice):
            return [self[one] for one in range(self.max_micro_batches)[index]]
        return self.first + self.period * range(self.max_micro_batches)[index]


def best_shares(
    completion: Sequence[Sequence[float]], replicas: Sequence[int], total: int
) -> tuple[int, ...] | None:
    """Micro-batches of each kind's replicas, `total` over all, with the shortest makespan.

    `completion[kind][n - 1]` is when a replica with n micro-batches finishes, ascending in n. None
    where no division adds up.

    Finds the earliest deadline by which `total` can be finished by binary search, then removes the
    surplus. Where no removal adds up to it, the search is repeated with a larger surplus.
    """
    if total % math.gcd(*replicas) or any(len(times) == 0 for times in completion):
        return None

    def most_within(deadline: float) -> list[int]:
        return [bisect_right(times, deadline) for times in completion]

    extra = 0
    while True:

        def is_enough(deadline: float, extra: int = extra) -> bool:
            most = most_within(deadline)
            return all(most) and sum(map(int.__mul__, most, replicas)) >= total + extra

        indices = [bisect_left(times, True, key=is_enough) for times in completion]
        deadlines = [
            times[index]
            for times, index in zip(completion, indices, strict=True)
            if index < len(times)
        ]
        most = most_within(min(deadlines)) if deadlines else [len(times) for times in completion]
        surplus = sum(map(int.__mul__, most, replicas)) - total
        if surplus < 0:
            return None
        found = _remove_surplus(completion, replicas, most, surplus)
        if found is not None or not deadlines:
            return found
        extra = max(2 * extra, sum(replicas))


def _remove_surplus(
    completion: Sequence[Sequence[float]],
    replicas: Sequence[int],
    most: Sequence[int],
    surplus: int,
) -> tuple[int, ...] | None:
    """The division with the shortest makespan that takes `surplus` micro-batches off `most`.

    Dynamic programming over kinds; state: the micro-batches removed so far.
    """
    makespan = np.full(surplus + 1, np.inf)
    makespan[0] = -np.inf
    removed_by_kind = []
    for times, count, limit in zip(completion, replicas, most, strict=True):
        extended = np.full(surplus + 1, np.inf)
        removed = np.zeros(surplus + 1, dtype=np.int64)
        for each in range(min(limit - 1, surplus // count) + 1):
            total = each * count
            candidate = np.maximum(makespan[: surplus + 1 - total], times[limit - each - 1])
            better = candidate < extended[total:]
            extended[total:][better] = candidate[better]
            removed[total:][better] = each
        removed_by_kind.append(removed)
        makespan = extended
    if not np.isfinite(makespan[surplus]):
        return None
    shares = []
    for removed, count, limit in zip(
        reversed(removed_by_kind), reversed(replicas), reversed(most), strict=True
    ):
        each = int(removed[surplus])
        shares.append(limit - each)
        surplus -= each * count
    return tuple(reversed(shares))
