"""The cost model: durations and memory of every stage of a placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetero.planner.cluster_shape import Cluster
from hetero.planner.communication_costs import (
    edge_costs,
    on_same_node,
    stage_rails,
    stage_reduction_seconds,
    tied_embedding_seconds,
)
from hetero.planner.layer_profile import PartCosts, Profile
from hetero.planner.model_shape import ModelShape
from hetero.planner.peak_memory import RankMemory, in_flight, rank_memory
from hetero.planner.pipeline_simulator import EdgeTimes, PipelineTimes
from hetero.planner.placement import Placement
from hetero.planner.stage_costs import stage_costs
from hetero.planner.stage_shape import StageShape, micro_batch_counts, pipeline_stages
from hetero.planner.training_options import TrainingOptions


@dataclass(frozen=True)
class StepCosts:
    """Costs of one training step. Nested tuples: a distinct pipeline, a stage."""

    stages: tuple[tuple[StageShape, ...], ...]
    pipelines: tuple[PipelineTimes, ...]
    reduce: tuple[float, ...]
    """Seconds of reducing each stage's gradients, after the last of its replicas has finished."""
    update: tuple[tuple[float, ...], ...]
    """Seconds of optimizer step and weight all-gather, before the next forward pass."""
    memory: tuple[tuple[RankMemory, ...], ...]


def step_costs(
    placement: Placement,
    *,
    model: ModelShape,
    cluster: Cluster,
    profile: Profile,
    options: TrainingOptions | None = None,
) -> StepCosts:
    """The costs of a placement.

    Raises UserError for an invalid plan, ProfileError where the profile lacks a point.
    """
    placement.require_fit(cluster, model)
    options = options or TrainingOptions()
    cost_model = CostModel(model, cluster, profile, options)
    stages = tuple(map(tuple, pipeline_stages(placement, cluster, model, fp8=options.fp8)))
    dp_groups = list(zip(*stages, strict=True))
    return cost_model.step_costs(stages, micro_batch_counts(placement), dp_groups)


@dataclass(frozen=True)
class Copies:
    """Ranks with the same weights of a stage, over all meshes that hold it."""

    shared: int
    experts: int
    """With the same experts."""

    @classmethod
    def of(cls, dp_group: Sequence[StageShape]) -> Copies:
        return cls(
            sum(stage.copies for stage in dp_group),
            sum(stage.expert_copies for stage in dp_group),
        )


@dataclass(frozen=True)
class CostModel:
    """Costs of stages and of the pipelines they form, whether or not a Plan can express them."""

    model: ModelShape
    cluster: Cluster
    profile: Profile
    options: TrainingOptions

    def step_costs(
        self,
        pipelines: Sequence[Sequence[StageShape]],
        micro_batches: Sequence[int],
        dp_groups: Sequence[Sequence[StageShape]],
    ) -> StepCosts:
        """The costs of distinct pipelines with so many micro-batches each.

        `dp_groups` has, for each stage, the meshes whose copies of its weights reduce together.
        """
        copies = [Copies.of(dp_group) for dp_group in dp_groups]
        reductions = [self.gradient_reduction(dp_group) for dp_group in dp_groups]
        return StepCosts(
            stages=tuple(map(tuple, pipelines)),
            pipelines=tuple(
                self.pipeline_times(stages, count)
                for stages, count in zip(pipelines, micro_batches, strict=True)
            ),
            reduce=self._with_tied_embedding([reduce for reduce, _ in reductions], pipelines),
            update=tuple(
                tuple(
                    self.update(stage, shards) + gather
                    for stage, shards, (_, gather) in zip(stages, copies, reductions, strict=True)
                )
                for stages in pipelines
            ),
            memory=tuple(
                self._memory(stages, count, copies)
                for stages, count in zip(pipelines, micro_batches, strict=True)
            ),
        )

    def costs(self, stage: StageShape) -> PartCosts:
        return stage_costs(
            self.cluster, stage, model=self.model, profile=self.profile, options=self.options
        )

    def bf16_costs(self, stage: StageShape) -> PartCosts | None:
        """Of its layers that stay in bf16; None where there are none."""
        return self.costs(stage.in_bf16()) if stage.bf16_layers else None

    def _pass_seconds(self, stage: StageShape) -> tuple[list[float], list[float]]:
        return pass_seconds(stage, self.costs(stage), self.bf16_costs(stage))

    def pipeline_times(self, stages: Sequence[StageShape], count: int) -> PipelineTimes:
        """Durations of one pipeline with `count` micro-batches.

        A pass includes the all-gather of the sharded tensor that it receives.
        """
        forward, backward = [], []
        for stage in stages:
            forward_seconds, backward_seconds = self._pass_seconds(stage)
            forward.append(forward_seconds)
            backward.append(backward_seconds)
        edges = []
        rails = _rail_groups(self.cluster, stages)
        last = len(stages) - (1 if len(stages[0].layers) == 1 else 0)
        for index in range(last if len(stages) > 1 else 0):
            following = (index + 1) % len(stages)
            source, target = stages[index], stages[following]
            edge = edge_costs(self.cluster, source, target, model=self.model, options=self.options)
            forward[following] = [seconds + edge.gather_after for seconds in forward[following]]
            backward[index] = [seconds + edge.gather_before for seconds in backward[index]]
            ends = (rails[index], rails[following])
            if on_same_node(self.cluster, source, target):
                ends = (-1, -1)
            edges.append(EdgeTimes(edge.occupancy, edge.latency, *ends, edge.is_buffered))
        return PipelineTimes(
            tuple(map(tuple, forward)),
            tuple(map(tuple, backward)),
            tuple(edges),
            count,
            self.options.deepspeed_transfers,
        )

    def gradient_reduction(self, dp_group: Sequence[StageShape]) -> tuple[float, float]:
        """Exposed seconds of gradient reduction and of the weight all-gather."""
        reduce, gather = stage_reduction_seconds(
            self.cluster,
            dp_group,
            shared=max(stage.shared_parameters(self.model) for stage in dp_group),
            experts=max(stage.expert_parameters(self.model) for stage in dp_group),
            profile=self.profile,
            options=self.options,
        )
        passes = [self._pass_seconds(stage) for stage in dp_group]
        layers = sum(dp_group[0].layers)
        if self.options.overlap_grad_reduce:
            reduce = _exposed_seconds(reduce, min(sum(backward) for _, backward in passes), layers)
        if self.options.overlap_param_gather:
            gather = _exposed_seconds(gather, min(sum(forward) for forward, _ in passes), layers)
        return reduce, gather

    def _with_tied_embedding(
        self, reduce: list[float], stages: Sequence[Sequence[StageShape]]
    ) -> tuple[float, ...]:
        if self.model.copied_parameters and len(reduce) > 1:
            seconds = max(
                tied_embedding_seconds(
                    self.cluster, one[0], one[-1], model=self.model, options=self.options
                )
                for one in stages
            )
            reduce[0] += seconds
            reduce[-1] += seconds
        return tuple(reduce)

    def update(self, stage: StageShape, copies: Copies) -> float:
        """Seconds of the optimizer step over one rank's parameters, and of casting its weights."""
        accelerator = self.cluster.kind(stage.kind).accelerator
        shared, experts = (
            stage.shared_parameters(self.model),
            stage.expert_parameters(self.model),
        )
        if stage.distributed_optimizer:
            shared /= copies.shared
            experts /= copies.experts
        seconds = self.profile.optimizer_seconds(accelerator.name, shared + experts)
        return seconds + stage.weight_cast_bytes(self.model) / accelerator.memory_bandwidth

    def _memory(
        self, stages: Sequence[StageShape], count: int, copies: Sequence[Copies]
    ) -> tuple[RankMemory, ...]:
        """Peak memory of each stage; `copies` of its weights shard its optimizer state."""
        return tuple(
            rank_memory(
                stage,
                passes=in_flight(
                    number, stages=len(stages), micro_batches=count, chunks=len(stage.layers)
                ),
                costs=self.costs(stage),
                bf16=self.bf16_costs(stage),
                model=self.model,
                options=self.options,
                copies=copies[number].shared,
                expert_copies=copies[number].experts,
            )
            for number, stage in enumerate(stages)
        )


def pass_seconds(
    stage: StageShape, costs: PartCosts, bf16: PartCosts | None = None
) -> tuple[list[float], list[float]]:
    """Forward and backward seconds of one micro-batch for each chunk of a stage.

    `bf16` are the costs of its layers that stay in bf16, where there are any.
    """
    chunks = stage.dense_and_sparse()
    layer, other = costs.layer, costs.sparse_layer
    forward = [dense * layer.forward + sparse * other.forward for dense, sparse in chunks]
    backward = [dense * layer.backward + sparse * other.backward for dense, sparse in chunks]
    for chunk, (dense, sparse) in enumerate(stage.bf16_layers if bf16 is not None else ()):
        assert bf16 is not None
        own, others = bf16.layer, bf16.sparse_layer
        forward[chunk] += dense * (own.forward - layer.forward)
        forward[chunk] += sparse * (others.forward - other.forward)
        backward[chunk] += dense * (own.backward - layer.backward)
        backward[chunk] += sparse * (others.backward - other.backward)
    if stage.has_embedding:
        forward[0] += costs.embedding.forward
        backward[0] += costs.embedding.backward
    if stage.has_head:
        forward[-1] += costs.head.forward
        backward[-1] += costs.head.backward
    return forward, backward


def _exposed_seconds(seconds: float, overlapped: float, layers: int) -> float:
    """The part of a communication not hidden behind a pass: at least one layer's."""
    return max(seconds - overlapped * (layers - 1) / layers, seconds / layers)


def _rail_groups(cluster: Cluster, stages: Sequence[StageShape]) -> list[int]:
    """A group number for each stage; stages that share a NIC have the same."""
    groups: list[int] = []
    for index, stage in enumerate(stages):
        own, group = stage_rails(cluster, stage), index
        for earlier, other in zip(groups, stages, strict=False):
            rails = stage_rails(cluster, other)
            if other.kind == stage.kind and rails.start < own.stop and own.start < rails.stop:
                group = earlier
        groups.append(group)
    return groups
