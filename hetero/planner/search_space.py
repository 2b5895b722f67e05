"""The search space: what a mesh on one kind of node can be, and its cost coefficients.

Coefficients are the costs of `step_costs` as linear functions of a stage's layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hetero.plan import Mesh, Plan, split_over_chunks
from hetero.planner.cluster_shape import Cluster, NodeKind
from hetero.planner.communication_costs import (
    boundary_seconds,
    edge_costs,
    reduce_and_gather_seconds,
    tied_embedding_seconds,
)
from hetero.planner.context_costs import stage_costs
from hetero.planner.layer_profile import PartCosts, Profile, ProfileError
from hetero.planner.layer_split import FloatArray, IntArray, PipelineModel
from hetero.planner.mesh_hops import MeshHops, busiest_rails, mesh_hops
from hetero.planner.model_shape import ModelShape
from hetero.planner.peak_memory import in_flight
from hetero.planner.placement import Placement
from hetero.planner.stage_shape import StageShape
from hetero.planner.training_options import TrainingOptions

_LEAST_ROWS = 8192
"""Of a sequence that a rank keeps where context-parallel sizes are not given."""


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The values that the search may choose."""

    global_batch: int
    """Samples per training step."""
    tensor: tuple[int, ...] = (1, 2, 4, 8)
    context: tuple[int, ...] = (1,)
    """Context-parallel sizes; those that cannot share a sequence are skipped."""
    micro_batch: tuple[int, ...] = (1, 2, 4, 8)
    recompute: tuple[str, ...] = ("none", "full")
    chunks: tuple[int, ...] = (1,)
    """Model chunks per stage; more than one: interleaved 1F1B."""
    replicas: bool = True
    """Whether plans with whole replicas on each kind are searched, too."""
    distributed_optimizer: bool = True
    sequence_parallel: bool = False
    """Whether tensor-parallel ranks shard the sequence between layers."""
    whole_nodes: bool = False
    """Whether a mesh has all GPUs of each of its nodes, as where a launcher starts them all."""


@dataclass(frozen=True)
class Problem:
    """The input of the planner."""

    cluster: Cluster
    model: ModelShape
    profile: Profile
    space: SearchSpace
    options: TrainingOptions = field(default_factory=TrainingOptions)


def context_sizes(seq_length: int, gpus_per_node: int) -> tuple[int, ...]:
    """The context-parallel sizes to choose from: 1, and powers of two up to a node.

    Each leaves a rank so many rows that its kernels are as efficient as with whole sequences, which
    `context_costs` assumes. So short sequences have size 1 alone.
    """
    sizes = [1]
    while (size := 2 * sizes[-1]) <= min(gpus_per_node, seq_length // _LEAST_ROWS):
        sizes.append(size)
    return tuple(sizes)


def max_stages(kind: NodeKind, stage: StageShape) -> int:
    """The most stages like this one that the GPUs of a kind can hold."""
    return kind.usable_gpus(stage.tensor, stage.context) // stage.ranks


@dataclass(frozen=True, eq=False)
class MeshShape:
    """Parallel sizes of a mesh on one kind, for any number of stages. Costs are those of a rank."""

    kind: NodeKind
    stage: StageShape
    """One of its stages, without layers."""
    costs: PartCosts
    layer_seconds: float
    """Forward and backward pass of one micro-batch."""
    state_bytes: float
    """Weight, gradient and optimizer state per parameter."""
    usable_bytes: float
    """Memory available to the model."""
    update_seconds_per_parameter: FloatArray
    """Gradient reduction and optimizer update of each stage, which may lie over two nodes."""
    update_seconds_fixed: FloatArray
    hops: MeshHops
    """Of as many stages as there may be."""
    boundary_seconds: float
    """The least that a transfer to or from any other kind of node occupies this end."""

    @property
    def max_stages(self) -> int:
        return max_stages(self.kind, self.stage)

    def max_layers(
        self, model: ModelShape, in_flight: IntArray, *, chunks: int, first: bool, last: bool
    ) -> IntArray:
        """The most layers of each stage that fit into memory; below 1 where none does.

        `in_flight` are the passes in flight on each stage; `first` and `last` say whether the mesh
        has the pipeline's first and last stage.
        """
        costs = self.costs
        available = np.full(len(in_flight), self.usable_bytes - costs.layer_working_bytes)
        end = len(available) - 1
        for stage in {0, end}:
            available[stage] = self.usable_bytes - costs.working_bytes(
                embedding=first and stage == 0, head=last and stage == end
            )
        micro_batches = in_flight / chunks
        embedding, head = embedding_and_head_parameters(
            model, self.stage.tensor, single_stage=first and last and len(available) == 1
        )
        if first:
            available[0] -= embedding * self.state_bytes
            available[0] -= micro_batches[0] * costs.embedding_activation_bytes
        if last:
            available[-1] -= head * self.state_bytes + costs.head_activation_bytes
        # Chunks of a stage may differ by a layer: assume that the largest is in flight.
        available -= (chunks - 1) * micro_batches * costs.layer_activation_bytes
        states = model.layer_parameters / self.stage.tensor * self.state_bytes
        bytes_per_layer = states + micro_batches * costs.layer_activation_bytes
        return np.floor(np.maximum(available, -1.0) / bytes_per_layer).astype(np.int64)


@dataclass(frozen=True, eq=False)
class MeshCandidate:
    """A mesh shape with a number of stages: what the search combines."""

    shape: MeshShape
    stages: int
    max_layers: float
    """An upper bound: layers that fit at the end of the pipeline and without embedding and head."""
    transfer_seconds: float
    """All transfers between its stages, in both directions."""
    link_seconds: float
    """The longest that any of them keeps a link or a NIC busy for one micro-batch."""


def mesh_candidates(
    problem: Problem, shape: MeshShape, chunks: int, *, micro_batches: int = 0
) -> list[MeshCandidate]:
    """A shape with every number of stages that its GPUs and the model's layers allow.

    `micro_batches` per step; left out: those of a pipeline that processes the whole batch.
    """
    sequences = shape.stage.data * shape.stage.micro_batch
    micro_batches = micro_batches or max(1, problem.space.global_batch // sequences)
    max_stages = min(shape.max_stages, problem.model.layers // chunks)
    if max_stages < 1:
        return []
    # Stages are counted from the end of the pipeline, where the fewest passes are in flight.
    in_flights = np.minimum(np.arange(1, max_stages + 1), micro_batches)
    in_flights = in_flights if chunks == 1 else np.full(max_stages, chunks)
    fitting = shape.max_layers(problem.model, in_flights, chunks=chunks, first=False, last=False)
    max_layers = np.cumsum(np.maximum(fitting, 0))
    transfers = np.cumsum([0.0, *shape.hops.seconds[: max_stages - 1]])
    busy = np.maximum.accumulate([0.0, *shape.hops.link_seconds[: max_stages - 1]])
    return [
        MeshCandidate(shape, stages, float(layers), 2 * float(seconds), float(longest))
        for stages, layers, seconds, longest in zip(
            range(1, max_stages + 1), max_layers, transfers, busy, strict=True
        )
        if layers >= stages * chunks
        and not (
            problem.space.whole_nodes and stages * shape.stage.ranks % shape.kind.gpus_per_node
        )
    ]


def embedding_and_head_parameters(
    model: ModelShape, tensor: int, *, single_stage: bool
) -> tuple[float, float]:
    """A rank's parameters of (embedding, head); on a single stage a tied weight counts once."""
    head = model.head_parameters
    if single_stage and model.tied:
        head -= model.vocabulary * model.hidden
    return model.embedding_parameters / tensor, head / tensor


def mesh_shapes(problem: Problem, kind: NodeKind, sequences: int) -> Iterator[MeshShape]:
    """All shapes of a kind that process `sequences` sequences at once (DP size x micro-batch).

    Points that the profile lacks are skipped.
    """
    space = problem.space
    for tensor, context in layer_sizes(problem):
        for micro_batch in space.micro_batch:
            data, rest = divmod(sequences, micro_batch)
            ranks = tensor * context * data
            if rest or not data or ranks > kind.usable_gpus(tensor, context):
                continue
            for recompute in space.recompute:
                stage = stage_shape(
                    space,
                    kind,
                    tensor=tensor,
                    context=context,
                    data=data,
                    micro_batch=micro_batch,
                    recompute=recompute,
                )
                if (shape := mesh_shape(problem, kind, stage)) is not None:
                    yield shape


def layer_sizes(problem: Problem) -> Iterator[tuple[int, int]]:
    """The (tensor, context) sizes of the space that divide the model and its sequences."""
    space, model = problem.space, problem.model
    is_shared = space.sequence_parallel
    for tensor, context in itertools.product(space.tensor, space.context):
        if model.divides(tensor, sequence_parallel=is_shared) and model.shares_sequences(
            context, tensor, sequence_parallel=is_shared
        ):
            yield tensor, context


def stage_shape(
    space: SearchSpace,
    kind: NodeKind,
    *,
    tensor: int,
    context: int,
    data: int,
    micro_batch: int,
    recompute: str,
) -> StageShape:
    """A stage without layers, from the searched values and the fixed ones of the space."""
    return StageShape(
        kind=kind.name,
        layers=(),
        has_embedding=False,
        has_head=False,
        tensor=tensor,
        context=context,
        data=data,
        micro_batch=micro_batch,
        recompute=recompute,
        sequence_parallel=space.sequence_parallel and tensor > 1,
        distributed_optimizer=space.distributed_optimizer,
    )


def mesh_shape(
    problem: Problem, kind: NodeKind, stage: StageShape, *, copies: int = 0
) -> MeshShape | None:
    """A shape with its coefficients; None where the profile lacks its point.

    A distributed optimizer is sharded over so many `copies` of the weights, or over the mesh's own
    where left out.
    """
    model, options, profile = problem.model, problem.options, problem.profile
    try:
        costs = stage_costs(problem.cluster, stage, model=model, profile=profile, options=options)
    except ProfileError:
        return None
    shards = (copies or stage.copies) if stage.distributed_optimizer else 1
    fixed = profile.optimizer_seconds(kind.accelerator.name, 0.0)
    slope = (profile.optimizer_seconds(kind.accelerator.name, 1e9) - fixed) / 1e9 / shards
    reduction_fixed, reduction_slope = _reductions_of_stages(problem, kind, stage)
    return MeshShape(
        kind=kind,
        stage=stage,
        costs=costs,
        layer_seconds=costs.layer.forward + costs.layer.backward,
        state_bytes=options.parameter_bytes + options.gradient_bytes + options.state_bytes / shards,
        usable_bytes=kind.accelerator.memory_gib * 2**30 - options.reserved_bytes,
        update_seconds_per_parameter=slope + reduction_slope,
        update_seconds_fixed=fixed + reduction_fixed,
        hops=mesh_hops(
            problem.cluster,
            stage,
            stages=max(min(max_stages(kind, stage), model.layers), 1),
            model=model,
            options=options,
        ),
        boundary_seconds=boundary_seconds(problem.cluster, stage, model=model, options=options),
    )


def _reductions_of_stages(
    problem: Problem, kind: NodeKind, stage: StageShape
) -> tuple[FloatArray, FloatArray]:
    """`_reduction_costs` of each stage of a mesh, which differ where some lie over two nodes."""
    size, ranks = kind.gpus_per_node, stage.ranks
    first = np.arange(max(max_stages(kind, stage), 1)) * ranks % size
    if size % ranks == 0 or ranks % size == 0:
        first[:] = 0
    costs = {
        gpu: _reduction_costs(problem, replace(stage, first_gpu=gpu)) for gpu in set(first.tolist())
    }
    fixed, slope = zip(*(costs[gpu] for gpu in first.tolist()), strict=True)
    return np.array(fixed), np.array(slope)


def _reduction_costs(problem: Problem, stage: StageShape) -> tuple[float, float]:
    """Seconds of reducing and gathering as a linear function: fixed, per parameter of a rank."""

    def seconds(parameters: float) -> float:
        return sum(
            reduce_and_gather_seconds(
                problem.cluster,
                [stage],
                parameters=parameters,
                profile=problem.profile,
                options=problem.options,
            )
        )

    layer = problem.model.layer_parameters / stage.tensor
    one, two = seconds(layer), seconds(2 * layer)
    return max(2 * one - two, 0.0), (two - one) / layer


def pipeline_model(
    problem: Problem, meshes: Sequence[MeshCandidate], *, micro_batches: int, chunks: int = 1
) -> PipelineModel:
    """The cost model of consecutive meshes, for `best_split`."""
    model = problem.model
    stages = sum(mesh.stages for mesh in meshes)
    in_flights = np.array(
        [
            in_flight(stage, stages=stages, micro_batches=micro_batches, chunks=chunks)
            for stage in range(stages)
        ]
    )
    layer, extra, transfer, link, update, extra_update = np.zeros((6, stages))
    max_layers, is_same_node, rail_groups = np.zeros((3, stages), dtype=np.int64)
    start = 0
    for index, mesh in enumerate(meshes):
        shape, end = mesh.shape, start + mesh.stages
        own = slice(start, end)
        layer[own] = shape.layer_seconds
        parameters = model.layer_parameters / shape.stage.tensor
        update[own] = parameters * shape.update_seconds_per_parameter[: mesh.stages]
        extra_update[own] = shape.update_seconds_fixed[: mesh.stages]
        max_layers[own] = shape.max_layers(
            model,
            in_flights[own],
            chunks=chunks,
            first=index == 0,
            last=index == len(meshes) - 1,
        )
        inside, hops = slice(start, end - 1), shape.hops
        transfer[inside] = hops.seconds[: mesh.stages - 1]
        link[inside] = hops.link_seconds[: mesh.stages - 1]
        is_same_node[inside] = hops.is_same_node[: mesh.stages - 1]
        rail_groups[own] = start + hops.rail_groups[: mesh.stages]
        if end < stages:
            boundary = edge_costs(
                problem.cluster,
                shape.stage,
                meshes[index + 1].shape.stage,
                model=model,
                options=problem.options,
            )
            transfer[end - 1] = boundary.occupancy + boundary.latency
            link[end - 1] = boundary.occupancy
            extra[end] += boundary.gather_after * chunks
            extra[end - 1] += boundary.gather_before * chunks
        start = end
    link[:-1] = busiest_rails(link[:-1], is_same_node[:-1], rail_groups)
    first, last = meshes[0].shape, meshes[-1].shape
    single = stages == 1
    embedding, _ = embedding_and_head_parameters(model, first.stage.tensor, single_stage=single)
    _, head = embedding_and_head_parameters(model, last.stage.tensor, single_stage=single)
    extra[0] += first.costs.embedding.forward + first.costs.embedding.backward
    extra[-1] += last.costs.head.forward + last.costs.head.backward
    last_stage = meshes[-1].stages - 1
    extra_update[0] += embedding * first.update_seconds_per_parameter[0]
    extra_update[-1] += head * last.update_seconds_per_parameter[last_stage]
    if model.tied and stages > 1:
        final = replace(last.stage, first_gpu=last_stage * last.stage.ranks)
        tied = tied_embedding_seconds(
            problem.cluster, first.stage, final, model=model, options=problem.options
        )
        extra_update[0] += tied
        extra_update[-1] += tied
    return PipelineModel(
        layer_seconds=layer,
        extra_seconds=extra,
        max_layers=max_layers,
        transfer_seconds=transfer,
        link_seconds=link,
        update_seconds=update,
        extra_update_seconds=extra_update,
        micro_batches=micro_batches,
        chunks=chunks,
    )


def build_placement(
    problem: Problem,
    meshes: Sequence[MeshCandidate],
    layers: Sequence[int],
    *,
    chunks: int = 1,
    shares: Sequence[int] = (),
) -> Placement:
    """The placement of meshes with these layers a stage; with `shares`, of whole replicas."""
    plan = Plan(
        meshes=tuple(
            Mesh(
                vendor=mesh.shape.kind.vendor,
                stages=mesh.stages,
                tensor=mesh.shape.stage.tensor,
                context=mesh.shape.stage.context,
                data=mesh.shape.stage.data,
                share=shares[index] if shares else 1,
                micro_batch_size=mesh.shape.stage.micro_batch,
                recompute=mesh.shape.stage.recompute,
                distributed_optimizer=mesh.shape.stage.distributed_optimizer,
                sequence_parallel=mesh.shape.stage.sequence_parallel,
            )
            for index, mesh in enumerate(meshes)
        ),
        layers=tuple(split_over_chunks(stages, chunks) for stages in layers),
        whole_replicas=bool(shares),
    )
    kinds = tuple(mesh.shape.kind.name for mesh in meshes)
    return Placement(plan, kinds, problem.space.global_batch)
