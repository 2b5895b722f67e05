"""A placement's costs, stage by stage: what the simulator plays and the quick estimate adds up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetero.planner.cluster_shape import Cluster
from hetero.planner.layer_profile import PartCosts, Profile
from hetero.planner.model_shape import ModelShape
from hetero.planner.peak_memory import RankMemory, in_flight, rank_memory
from hetero.planner.pipeline_events import Chain, EdgeSeconds
from hetero.planner.placement import Placement
from hetero.planner.stage_shape import StageShape, micro_batches, pipelines
from hetero.planner.training_options import TrainingOptions
from hetero.planner.wire_costs import (
    edge_costs,
    rails_of,
    reduce_seconds,
    shares_node,
    tied_seconds,
)


@dataclass(frozen=True)
class StepCosts:
    """Of one training step. Outer tuples are pipelines that differ, inner ones their stages."""

    stages: tuple[tuple[StageShape, ...], ...]
    chains: tuple[Chain, ...]
    reduce: tuple[float, ...]
    """Seconds until a stage's gradients are reduced, after the last of its replicas is through."""
    update: tuple[tuple[float, ...], ...]
    """Seconds of the optimizer's step and of gathering the weights, before the next forward."""
    memory: tuple[tuple[RankMemory, ...], ...]


def step_costs(
    placement: Placement,
    *,
    model: ModelShape,
    cluster: Cluster,
    profile: Profile,
    options: TrainingOptions | None = None,
) -> StepCosts:
    """Raises PlanError where the plan cannot be, ProfileError where the profile lacks a point."""
    options = options or TrainingOptions()
    placement.require_fit(cluster, model)
    work = StageWork(model, cluster, profile, options)
    stages = tuple(map(tuple, pipelines(placement, cluster)))
    counts = micro_batches(placement)
    all_holders = list(zip(*stages, strict=True))
    replicas = [sum(stage.data for stage in holders) for holders in all_holders]
    reduced = [work.reduction(holders) for holders in all_holders]
    return StepCosts(
        stages=stages,
        chains=tuple(
            work.chain(pipeline, count) for pipeline, count in zip(stages, counts, strict=True)
        ),
        reduce=work.with_tied([reduce for reduce, _ in reduced], stages),
        update=tuple(
            tuple(
                work.update(stage, sharing) + gather
                for stage, sharing, (_, gather) in zip(pipeline, replicas, reduced, strict=True)
            )
            for pipeline in stages
        ),
        memory=tuple(
            work.memory(pipeline, count, replicas)
            for pipeline, count in zip(stages, counts, strict=True)
        ),
    )


@dataclass(frozen=True)
class StageWork:
    """Costs of stages and of pipelines made of them, however a plan or a record puts them there."""

    model: ModelShape
    cluster: Cluster
    profile: Profile
    options: TrainingOptions

    def costs(self, stage: StageShape) -> PartCosts:
        accelerator = self.cluster.kind(stage.kind).accelerator.name
        return self.profile.costs(accelerator, stage.point(self.model))

    def chain(self, stages: Sequence[StageShape], count: int) -> Chain:
        """One pipeline, each pass with what gathering a tensor that came in parts adds to it."""
        forward, backward = [], []
        for stage in stages:
            ahead, back = pass_seconds(stage, self.costs(stage))
            forward.append(ahead)
            backward.append(back)
        edges = []
        rails = _rail_numbers(self.cluster, stages)
        last = len(stages) - (1 if len(stages[0].layers) == 1 else 0)
        for index in range(last if len(stages) > 1 else 0):
            after = (index + 1) % len(stages)
            source, target = stages[index], stages[after]
            edge = edge_costs(self.cluster, source, target, model=self.model, options=self.options)
            forward[after] = [seconds + edge.gather_after for seconds in forward[after]]
            backward[index] = [seconds + edge.gather_before for seconds in backward[index]]
            ends = (rails[index], rails[after])
            if shares_node(self.cluster, source, target):
                ends = (-1, -1)
            edges.append(EdgeSeconds(edge.wire, edge.latency, *ends, edge.is_buffered))
        return Chain(
            tuple(map(tuple, forward)),
            tuple(map(tuple, backward)),
            tuple(edges),
            count,
            self.options.deepspeed_transfers,
        )

    def reduction(self, holders: Sequence[StageShape]) -> tuple[float, float]:
        """Seconds of reducing and of gathering that are not hidden behind a pass."""
        parameters = max(stage.parameters(self.model) for stage in holders)
        reduce, gather = reduce_seconds(
            self.cluster,
            holders,
            parameters=parameters,
            profile=self.profile,
            options=self.options,
        )
        passes = [pass_seconds(stage, self.costs(stage)) for stage in holders]
        parts = sum(holders[0].layers)
        if self.options.overlap_grad_reduce:
            reduce = _exposed(reduce, min(sum(backward) for _, backward in passes), parts)
        if self.options.overlap_param_gather:
            gather = _exposed(gather, min(sum(forward) for forward, _ in passes), parts)
        return reduce, gather

    def with_tied(
        self, reduce: list[float], stages: Sequence[Sequence[StageShape]]
    ) -> tuple[float, ...]:
        if self.model.tied and len(reduce) > 1:
            first, last = stages[0][0], stages[0][-1]
            both = tied_seconds(self.cluster, first, last, model=self.model, options=self.options)
            reduce[0] += both
            reduce[-1] += both
        return tuple(reduce)

    def update(self, stage: StageShape, replicas: int) -> float:
        """The optimizer's step over what one rank owns of the parameters."""
        shards = replicas if stage.distributed_optimizer else 1
        accelerator = self.cluster.kind(stage.kind).accelerator.name
        return self.profile.optimizer_seconds(accelerator, stage.parameters(self.model) / shards)

    def memory(
        self, stages: Sequence[StageShape], count: int, replicas: Sequence[int]
    ) -> tuple[RankMemory, ...]:
        """`replicas` says of each stage how many hold it and share the optimizer's state."""
        return tuple(
            rank_memory(
                stage,
                passes=in_flight(
                    number, stages=len(stages), micro_batches=count, chunks=len(stage.layers)
                ),
                costs=self.costs(stage),
                model=self.model,
                options=self.options,
                replicas=replicas[number],
            )
            for number, stage in enumerate(stages)
        )


def pass_seconds(stage: StageShape, costs: PartCosts) -> tuple[list[float], list[float]]:
    """Forward and backward of one micro-batch, of each of a stage's chunks."""
    forward = [layers * costs.layer.forward for layers in stage.layers]
    backward = [layers * costs.layer.backward for layers in stage.layers]
    if stage.has_embedding:
        forward[0] += costs.embedding.forward
        backward[0] += costs.embedding.backward
    if stage.has_head:
        forward[-1] += costs.head.forward
        backward[-1] += costs.head.backward
    return forward, backward


def _exposed(seconds: float, beside: float, parts: int) -> float:
    """What is left of `seconds` that go on beside a pass: at least the last layer's part."""
    return max(seconds - beside * (parts - 1) / parts, seconds / parts)


def _rail_numbers(cluster: Cluster, stages: Sequence[StageShape]) -> list[int]:
    """One number for stages that share NICs."""
    numbers: list[int] = []
    for index, stage in enumerate(stages):
        own, number = rails_of(cluster, stage), index
        for earlier, other in zip(numbers, stages, strict=False):
            rails = rails_of(cluster, other)
            if other.kind == stage.kind and rails.start < own.stop and own.start < rails.stop:
                number = earlier
        numbers.append(number)
    return numbers
