"""Plans in which every kind of node trains whole replicas, each kind with its share of the batch.

All replicas have the same stages, tensor size, micro-batch and layers; each kind as many of them as
its GPUs make, or fewer where the batch divides better then, and as many micro-batches a replica as
make all end at about the same time.
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
from hetero.planner.layer_profile import ProfileError
from hetero.planner.layer_split import Counts, Pipeline, Split, best_split, estimate
from hetero.planner.mesh_options import (
    MeshChoice,
    MeshOption,
    Problem,
    mesh_choices,
    mesh_option,
    pipeline_of,
    placement_of,
    stage_shape,
)
from hetero.planner.prediction import estimate_seconds
from hetero.planner.step_costs import step_costs
from hetero.planner.wire_costs import reduce_seconds

_ENUMERATED = 500
"""Splits of layers up to which all are looked at."""
_COUNTED = 1024
"""GPUs of the kinds, multiplied, up to which a kind may have fewer replicas than its GPUs make."""
_PROMISING = 60
"""Shapes that are looked at where not all can be."""


@dataclass(frozen=True)
class Replicas:
    """Whole replicas on several kinds."""

    meshes: tuple[MeshChoice, ...]
    split: Split
    shares: tuple[int, ...]
    """Micro-batches of each replica of each mesh."""


@dataclass(frozen=True)
class _Shape:
    """What all replicas have in common, and how many each kind has."""

    kinds: tuple[NodeKind, ...]
    tensor: int
    micro_batch: int
    stages: int
    data: tuple[int, ...]
    bound: float
    """Seconds that no step is shorter than."""


def search_replicas(problem: Problem, *, below: float, exact: bool) -> Iterator[Replicas]:
    """Ever better plans of whole replicas whose estimated step is shorter than `below` seconds.

    Where the search need not be `exact`, it looks at the most promising shapes of as many replicas
    as the GPUs make.
    """
    fewer = exact and not leaves_out(problem)
    shapes = sorted(_shapes(problem, fewer=fewer), key=lambda shape: shape.bound)
    for shape in shapes if exact else shapes[:_PROMISING]:
        if shape.bound >= below:
            break
        for found in _of_shape(problem, shape, below):
            below = found.split.seconds
            yield found


def leaves_out(problem: Problem) -> bool:
    """Whether the kinds have so many GPUs that no fewer replicas than they make are looked at."""
    return math.prod(kind.gpus for kind in problem.cluster.kinds) > _COUNTED


def _shapes(problem: Problem, *, fewer: bool) -> Iterator[_Shape]:
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
            if kind.gpus_in_groups(tensor) >= tensor
            and (found := _fastest(problem, kind, tensor, micro_batch)) is not None
        }
        for count in range(2, len(seconds) + 1):
            for kinds in itertools.combinations(seconds, count):
                ranks = [kind.gpus_in_groups(tensor) // tensor for kind in kinds]
                most = min(model.layers, *ranks)
                times = [seconds[kind] for kind in kinds]
                for stages in range(1, most + 1):
                    made = [count // stages for count in ranks]
                    least = [1] * len(made) if fewer else made
                    ranges = (range(a, b + 1) for a, b in zip(least, made, strict=True))
                    for data in itertools.product(*ranges):
                        bound = _bound(problem, times, micro_batch, stages, data)
                        if bound < math.inf:
                            yield _Shape(kinds, tensor, micro_batch, stages, data, bound)


def _fastest(problem: Problem, kind: NodeKind, tensor: int, micro_batch: int) -> float | None:
    """Seconds of a micro-batch through the whole model."""
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


def _bound(
    problem: Problem, seconds: Sequence[float], micro_batch: int, stages: int, data: Sequence[int]
) -> float:
    """All replicas end at once, and their layers are divided at will.

    One with n micro-batches takes, of the `seconds` of one, n - 1 parts in `stages` and a whole.
    """
    total = problem.space.global_batch // micro_batch
    if sum(data) > total or total % math.gcd(*data):
        return math.inf
    rates = sum(count / one for count, one in zip(data, seconds, strict=True))
    return (total + sum(data) * (stages - 1)) / stages / rates


def _least_reduction(problem: Problem, shape: _Shape) -> float:
    """Seconds of reducing what the first stage holds at least."""
    model = problem.model
    parameters = float(model.embedding_parameters + model.layer_parameters)
    if shape.stages == 1:
        parameters = model.parameters
    parameters /= shape.tensor
    holders = [
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
        reduce_seconds(
            problem.cluster,
            holders,
            parameters=parameters,
            profile=problem.profile,
            options=options,
        )
    )


def _of_shape(problem: Problem, shape: _Shape, below: float) -> Iterator[Replicas]:
    """Ever better ones, of each recomputation and each split of the layers worth a look."""
    reduction = _least_reduction(problem, shape)
    if shape.bound + reduction >= below:
        return
    total = problem.space.global_batch // shape.micro_batch
    about = max(1, total // sum(shape.data))
    for recompute in problem.space.recompute:
        meshes = [
            choice
            for kind, data in zip(shape.kinds, shape.data, strict=True)
            if (option := _option(problem, shape, kind, data, recompute)) is not None
            for choice in mesh_choices(problem, option, 1, micro_batches=about)
            if choice.count == shape.stages and choice.most >= problem.model.layers
        ]
        if len(meshes) < len(shape.kinds):
            continue
        alone = [pipeline_of(problem, [mesh], micro_batches=about) for mesh in meshes]
        for layers in _splits(problem.model.layers, shape.stages, alone):
            if not all(bool((layers <= pipeline.most_layers).all()) for pipeline in alone):
                continue
            if _least_running(alone, layers, shape.data, total) + reduction >= below:
                continue
            splits = [estimate(pipeline, layers) for pipeline in alone]
            for found in _shared(problem, shape, meshes, splits, total):
                if found.split.seconds < below:
                    below = found.split.seconds
                    yield found


def _least_running(
    alone: Sequence[Pipeline], layers: Counts, data: Sequence[int], total: int
) -> float:
    """Seconds that no division of the micro-batches is below: all end at once.

    A replica with n of them has n on its slowest stage, after the first came to it.
    """
    rates = waited = 0.0
    for pipeline, replicas in zip(alone, data, strict=True):
        times = pipeline.layer_seconds * layers + pipeline.extra_seconds
        slowest = int(times.argmax())
        rates += replicas / times[slowest]
        waited += replicas * times[:slowest].sum() / times[slowest]
    return float((total + waited) / rates)


def _option(
    problem: Problem, shape: _Shape, kind: NodeKind, data: int, recompute: str
) -> MeshOption | None:
    stage = stage_shape(
        problem.space,
        kind,
        tensor=shape.tensor,
        data=data,
        micro_batch=shape.micro_batch,
        recompute=recompute,
    )
    return mesh_option(problem, kind, stage, replicas=sum(shape.data))


def _splits(layers: int, stages: int, alone: Sequence[Pipeline]) -> Iterator[Counts]:
    """Every split where they are few, else the best for each kind."""
    if math.comb(layers - 1, stages - 1) <= _ENUMERATED:
        for ends in itertools.combinations(range(1, layers), stages - 1):
            yield np.diff([0, *ends, layers])
        return
    found = {split.layers for one in alone if (split := best_split(one, layers)) is not None}
    for counts in sorted(found):
        yield np.array(counts)


def _shared(
    problem: Problem,
    shape: _Shape,
    meshes: Sequence[MeshChoice],
    splits: Sequence[Split],
    total: int,
) -> Iterator[Replicas]:
    """Divide the step's micro-batches so that the last replica ends as soon as can be."""
    about = max(1, total // sum(shape.data))
    ends = [
        Ends(split.seconds - split.period * (about - 1), split.period, total // replicas)
        for split, replicas in zip(splits, shape.data, strict=True)
    ]
    shares = best_shares(ends, shape.data, total)
    if shares is None:
        return
    layers = splits[0].layers
    costs = step_costs(
        placement_of(problem, meshes, layers, shares=shares),
        model=problem.model,
        cluster=problem.cluster,
        profile=problem.profile,
        options=problem.options,
    )
    period = max(split.period for split in splits)
    update = max(split.update for split in splits)
    yield Replicas(tuple(meshes), Split(layers, estimate_seconds(costs), period, update), shares)


@dataclass(frozen=True)
class Ends(Sequence[float]):
    """When a replica with 1, 2 and more micro-batches ends: too many to write them all down."""

    first: float
    period: float
    most: int

    def __len__(self) -> int:
        return self.most

    @overload
    def __getitem__(self, index: int) -> float: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[float]: ...
    def __getitem__(self, index: int | slice) -> float | Sequence[float]:
        if isinstance(index, slice):
            return [self[one] for one in range(self.most)[index]]
        return self.first + self.period * range(self.most)[index]


def best_shares(
    ends: Sequence[Sequence[float]], replicas: Sequence[int], total: int
) -> tuple[int, ...] | None:
    """Micro-batches of each kind's replicas, `total` of all together, so that the last ends first.

    `ends[kind][n - 1]` is when a replica with n of them ends, which is later for more. None where
    no division adds up.
    """
    if total % math.gcd(*replicas) or any(len(times) == 0 for times in ends):
        return None

    def by(moment: float) -> list[int]:
        return [bisect_right(times, moment) for times in ends]

    over = 0
    while True:
        # What each ends by the soonest moment at which all could have taken `over` more together.
        def enough(moment: float, more: int = over) -> bool:
            most = by(moment)
            return all(most) and sum(map(int.__mul__, most, replicas)) >= total + more

        places = [bisect_left(times, True, key=enough) for times in ends]
        soonest = [times[at] for times, at in zip(ends, places, strict=True) if at < len(times)]
        most = by(min(soonest)) if soonest else [len(times) for times in ends]
        spare = sum(map(int.__mul__, most, replicas)) - total
        if spare < 0:
            return None
        found = _without(ends, replicas, most, spare)
        if found is not None or not soonest:
            return found
        over = max(2 * over, sum(replicas))


def _without(
    ends: Sequence[Sequence[float]], replicas: Sequence[int], most: Sequence[int], spare: int
) -> tuple[int, ...] | None:
    """At most so many each, and `spare` less of all together, so that the last ends first."""
    latest = np.full(spare + 1, np.inf)
    latest[0] = -np.inf
    taken = []
    for times, count, bound in zip(ends, replicas, most, strict=True):
        after = np.full(spare + 1, np.inf)
        chosen = np.zeros(spare + 1, dtype=np.int64)
        for left in range(min(bound - 1, spare // count) + 1):
            together = left * count
            candidate = np.maximum(latest[: spare + 1 - together], times[bound - left - 1])
            better = candidate < after[together:]
            after[together:][better] = candidate[better]
            chosen[together:][better] = left
        taken.append(chosen)
        latest = after
    if not np.isfinite(latest[spare]):
        return None
    shares = []
    for chosen, count, bound in zip(
        reversed(taken), reversed(replicas), reversed(most), strict=True
    ):
        left = int(chosen[spare])
        shares.append(bound - left)
        spare -= left * count
    return tuple(reversed(shares))
