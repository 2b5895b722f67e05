"""The shapes of whole replicas on each kind of nodes that a search looks at, the best first."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from hetero.planner.cluster_shape import NodeKind
from hetero.planner.layer_profile import ProfileError
from hetero.planner.search_space import (
    LayerSizes,
    Problem,
    layer_sizes,
    mean_layer_seconds,
    stage_shape,
)
from hetero.planner.stage_costs import stage_costs

_MAX_GPU_PRODUCT = 1024
"""Product of the kinds' GPUs up to which any numbers of replicas are searched."""
_MAX_SHAPES = 60  # evaluated by a heuristic search
_MAX_FEWER = 64
"""Numbers of replicas below what a kind's GPUs allow that a search of large clusters looks at."""
_MAX_ROUNDED = 8
"""Micro-batches by which a bound is raised until as many are whole as there have to be."""
_LOWER_BOUND = attrgetter("lower_bound")


@dataclass(frozen=True)
class ReplicaShape:
    """The parallel sizes of all replicas, and the number of replicas of each kind."""

    kinds: tuple[NodeKind, ...]
    sizes: LayerSizes
    micro_batch: int
    stages: int
    data: tuple[int, ...]
    seconds: tuple[float, ...]
    """Of one micro-batch through all layers, on each kind."""
    lower_bound: float
    """Seconds of the passes."""


def candidate_shapes(problem: Problem, *, is_exact: bool) -> list[ReplicaShape]:
    """All shapes or, of a large cluster or in a heuristic search, the most promising ones.

    These are the shapes with the least lower bounds, of those with as many replicas as the GPUs
    allow and of those with fewer on one kind or two, which may divide the batch better.
    """
    every = is_exact and not is_truncated(problem)
    shapes = sorted(_replica_shapes(problem, every=every), key=_LOWER_BOUND)
    full = [shape for shape in shapes if _divides_batch(problem, shape)]
    if every:
        return full
    fewer = _best_with_fewer(problem, shapes[:_MAX_SHAPES])
    fewer += _best_with_fewer(problem, fewer)
    return [*(full if is_exact else full[:_MAX_SHAPES]), *fewer]


def _best_with_fewer(problem: Problem, shapes: Sequence[ReplicaShape]) -> list[ReplicaShape]:
    fewer = {one for shape in shapes for one in _with_fewer(problem, shape)}
    return sorted(fewer, key=_LOWER_BOUND)[:_MAX_SHAPES]


def is_truncated(problem: Problem) -> bool:
    """Whether there are so many GPUs that not all numbers of replicas are searched."""
    return math.prod(kind.gpus for kind in problem.cluster.kinds) > _MAX_GPU_PRODUCT


def _replica_shapes(problem: Problem, *, every: bool) -> Iterator[ReplicaShape]:
    space, model = problem.space, problem.model
    for sizes, micro_batch in itertools.product(layer_sizes(problem), space.micro_batch):
        if space.global_batch % micro_batch:
            continue
        tensor, context = sizes.tensor, sizes.context
        size = tensor * context
        seconds = {
            kind: found
            for kind in problem.cluster.kinds
            if kind.usable_gpus(tensor, context) >= size
            and (found := _fastest_micro_batch(problem, kind, sizes, micro_batch)) is not None
        }
        for count in range(2, len(seconds) + 1):
            for kinds in itertools.combinations(seconds, count):
                ranks = [kind.usable_gpus(tensor, context) // size for kind in kinds]
                times = tuple(seconds[kind] for kind in kinds)
                for stages in range(1, min(model.layers, *ranks) + 1):
                    most = tuple(count // stages for count in ranks)
                    each = (range(1, count + 1) for count in most)
                    for data in itertools.product(*each) if every else (most,):
                        if not _hold_experts(sizes, kinds, data):
                            continue
                        bound = _lower_bound(problem, times, micro_batch, stages, data)
                        yield ReplicaShape(kinds, sizes, micro_batch, stages, data, times, bound)


def _hold_experts(sizes: LayerSizes, kinds: Sequence[NodeKind], data: Sequence[int]) -> bool:
    """Whether the ranks of a stage hold all experts a whole number of times on each kind."""
    ranks = sizes.tensor * sizes.context
    return all(sizes.fit(count * ranks, kind) for kind, count in zip(kinds, data, strict=True))


def _with_fewer(problem: Problem, shape: ReplicaShape) -> Iterator[ReplicaShape]:
    """The shape with fewer replicas on one kind: the next lower numbers that the batch allows."""
    total = problem.space.global_batch // shape.micro_batch
    for index, count in enumerate(shape.data):
        most = min(count - 1, total - sum(shape.data) + count)
        for fewer in range(max(1, most - _MAX_FEWER + 1), most + 1):
            data = (*shape.data[:index], fewer, *shape.data[index + 1 :])
            bound = _lower_bound(problem, shape.seconds, shape.micro_batch, shape.stages, data)
            found = replace(shape, data=data, lower_bound=bound)
            if _divides_batch(problem, found) and _hold_experts(shape.sizes, shape.kinds, data):
                yield found


def _fastest_micro_batch(
    problem: Problem, kind: NodeKind, sizes: LayerSizes, micro_batch: int
) -> float | None:
    """Seconds of one micro-batch through the whole model, with the fastest recomputation."""
    seconds = []
    for recompute in problem.space.recompute:
        stage = stage_shape(
            problem,
            kind,
            sizes,
            data=1,
            micro_batch=micro_batch,
            recompute=recompute,
        )
        with contextlib.suppress(ProfileError):
            costs = stage_costs(
                problem.cluster,
                stage,
                model=problem.model,
                profile=problem.profile,
                options=problem.options,
            )
            layers = problem.model.layers * mean_layer_seconds(costs, problem.model)
            ends = (costs.embedding, costs.head)
            seconds.append(layers + sum(part.forward + part.backward for part in ends))
    return min(seconds, default=None)


def _lower_bound(
    problem: Problem, seconds: Sequence[float], micro_batch: int, stages: int, data: Sequence[int]
) -> float:
    """A lower bound of the passes: fractional layers, and whole micro-batches.

    A replica takes (n - 1) / stages + 1 times the `seconds` of one micro-batch for n of them.
    """
    total = problem.space.global_batch // micro_batch
    rates = sum(count / one for count, one in zip(data, seconds, strict=True))
    bound = (total + sum(data) * (stages - 1)) / stages / rates
    for _ in range(_MAX_ROUNDED):
        # By then each has finished so many; the first to finish another one comes next.
        finished = [int(bound * stages / one * (1 + 1e-9)) - stages + 1 for one in seconds]
        if sum(map(int.__mul__, finished, data)) >= total:
            break
        bound = min(
            (count + stages) * one / stages for count, one in zip(finished, seconds, strict=True)
        )
    return bound


def _divides_batch(problem: Problem, shape: ReplicaShape) -> bool:
    """Whether the replicas of each kind can have a whole number of micro-batches each."""
    total = problem.space.global_batch // shape.micro_batch
    return sum(shape.data) <= total and total % math.gcd(*shape.data) == 0
