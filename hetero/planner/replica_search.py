"""Search for plans of data parallelism across kinds of nodes: whole replicas on each kind.

All replicas have the same stages, tensor size, micro-batch size and layers. Micro-batches are
divided so that the makespan of all replicas is shortest.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from hetero.planner.cluster_shape import NodeKind
from hetero.planner.communication_costs import reduce_and_gather_seconds
from hetero.planner.layer_profile import ProfileError
from hetero.planner.layer_split import IntArray, PipelineModel, Split, best_split, estimate
from hetero.planner.prediction import estimate_seconds
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
_MAX_GPU_PRODUCT = 1024
"""Product of the kinds' GPUs up to which any numbers of replicas are searched."""
_MAX_SHAPES = 60  # evaluated by a heuristic search


@dataclass(frozen=True)
class ReplicaPlan:
    """A plan of whole replicas with its estimated step."""

    meshes: tuple[MeshCandidate, ...]
    split: Split
    shares: tuple[int, ...]
    """Micro-batches of each replica of each mesh."""


@dataclass(frozen=True)
class _ReplicaShape:
    """The parallel sizes of all replicas, and the number of replicas of each kind."""

    kinds: tuple[NodeKind, ...]
    tensor: int
    micro_batch: int
    stages: int
    data: tuple[int, ...]
    is_full: bool
    """Whether each kind has as many replicas as its GPUs allow."""
    lower_bound: float
    """Seconds of the passes."""


def search_replicas(problem: Problem, *, cutoff: float, is_exact: bool) -> Iterator[ReplicaPlan]:
    """Plans of whole replicas, each better than the last, the first below `cutoff` seconds.

    A heuristic search evaluates the shapes with the least lower bounds, of those with as many
    replicas as the GPUs allow and of those with fewer.
    """
    every = is_exact and not is_truncated(problem)
    shapes = sorted(_replica_shapes(problem, every=every), key=lambda shape: shape.lower_bound)
    if not every:
        full, fewer = ([one for one in shapes if one.is_full is which] for which in (True, False))
        shapes = [*full[: None if is_exact else _MAX_SHAPES], *fewer[:_MAX_SHAPES]]
    for shape in shapes:
        if shape.lower_bound >= cutoff:
            continue
        for found in _search_shape(problem, shape, cutoff):
            cutoff = found.split.seconds
            yield found


def is_truncated(problem: Problem) -> bool:
    """Whether there are so many GPUs that not all numbers of replicas are searched."""
    return math.prod(kind.gpus for kind in problem.cluster.kinds) > _MAX_GPU_PRODUCT


def _replica_shapes(problem: Problem, *, every: bool) -> Iterator[_ReplicaShape]:
    space, model = problem.space, problem.model
    sizes = [
        size
        for size in space.tensor
        if model.divides(size, sequence_parallel=space.sequence_parallel)
    ]
    for tensor, micro_batch in itertools.product(sizes, space.micro_batch):
        if space.global_batch % micro_batch:
            continue
        seconds = {
            kind: found
            for kind in problem.cluster.kinds
            if kind.usable_gpus(tensor) >= tensor
            and (found := _fastest_micro_batch(problem, kind, tensor, micro_batch)) is not None
        }
        for count in range(2, len(seconds) + 1):
            for kinds in itertools.combinations(seconds, count):
                ranks = [kind.usable_gpus(tensor) // tensor for kind in kinds]
                times = [seconds[kind] for kind in kinds]
                for stages in range(1, min(model.layers, *ranks) + 1):
                    most = tuple(count // stages for count in ranks)
                    for data in _replica_counts(most, every=every):
                        bound = _lower_bound(problem, times, micro_batch, stages, data)
                        shape = (kinds, tensor, micro_batch, stages, data, data == most, bound)
                        if bound < math.inf:
                            yield _ReplicaShape(*shape)


def _replica_counts(most: tuple[int, ...], *, every: bool) -> Iterator[tuple[int, ...]]:
    """Replicas of each kind: every number up to `most`, or fewer on one kind at a time."""
    if every:
        yield from itertools.product(*(range(1, count + 1) for count in most))
        return
    yield most
    for index, count in enumerate(most):
        for fewer in range(1, count):
            yield (*most[:index], fewer, *most[index + 1 :])


def _fastest_micro_batch(
    problem: Problem, kind: NodeKind, tensor: int, micro_batch: int
) -> float | None:
    """Seconds of one micro-batch through the whole model, with the fastest recomputation."""
    seconds = []
    for recompute in problem.space.recompute:
        stage = stage_shape(
            problem.space, kind, tensor=tensor, data=1, micro_batch=micro_batch, recompute=recompute
        )
        point = stage.point(problem.model)
        with contextlib.suppress(ProfileError):
            costs = problem.profile.costs(kind.accelerator.name, point)
            layers = problem.model.layers * (costs.layer.forward + costs.layer.backward)
            ends = (costs.embedding, costs.head)
            seconds.append(layers + sum(part.forward + part.backward for part in ends))
    return min(seconds, default=None)


def _lower_bound(
    problem: Problem, seconds: Sequence[float], micro_batch: int, stages: int, data: Sequence[int]
) -> float:
    """A lower bound of the passes: fractional layers, all replicas finish at once.

    A replica takes (n - 1) / stages + 1 times the `seconds` of one micro-batch for n of them.
    Infinite where the batch cannot be divided.
    """
    total = problem.space.global_batch // micro_batch
    if sum(data) > total or total % math.gcd(*data):
        return math.inf
    rates = sum(count / one for count, one in zip(data, seconds, strict=True))
    return (total + sum(data) * (stages - 1)) / stages / rates


def _reduction_lower_bound(problem: Problem, shape: _ReplicaShape) -> float:
    """A lower bound of the gradient reduction: of the first stage, with one layer."""
    model = problem.model
    parameters = float(model.embedding_parameters + model.layer_parameters)
    if shape.stages == 1:
        parameters = model.parameters
    parameters /= shape.tensor
    dp_group = [
        stage_shape(
            problem.space,
            kind,
            tensor=shape.tensor,
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
        reduce_and_gather_seconds(
            problem.cluster,
            dp_group,
            parameters=parameters,
            profile=problem.profile,
            options=options,
        )
    )


def _search_shape(problem: Problem, shape: _ReplicaShape, cutoff: float) -> Iterator[ReplicaPlan]:
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
    problem: Problem, shape: _ReplicaShape, kind: NodeKind, data: int, recompute: str
) -> MeshShape | None:
    stage = stage_shape(
        problem.space,
        kind,
        tensor=shape.tensor,
        data=data,
        micro_batch=shape.micro_batch,
        recompute=recompute,
    )
    return mesh_shape(problem, kind, stage, replicas=sum(shape.data))


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
    shape: _ReplicaShape,
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
