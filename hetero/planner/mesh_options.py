"""What one kind of node could be in a plan, and what that costs: the numbers that a search adds up.

They are those of `step_costs`, taken apart: what a layer adds, and what there is beside layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hetero.plan import Mesh, Plan, split_over_chunks
from hetero.planner.cluster_shape import Cluster, NodeKind
from hetero.planner.layer_profile import PartCosts, Profile, ProfileError
from hetero.planner.layer_split import Counts, Numbers, Pipeline
from hetero.planner.model_shape import ModelShape
from hetero.planner.placement import Placement
from hetero.planner.stage_shape import StageShape
from hetero.planner.training_options import TrainingOptions
from hetero.planner.wire_costs import edge_costs, reduce_seconds, tied_seconds


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Between what the search chooses."""

    global_batch: int
    """Samples of a step."""
    tensor: tuple[int, ...] = (1, 2, 4, 8)
    micro_batch: tuple[int, ...] = (1, 2, 4, 8)
    recompute: tuple[str, ...] = ("none", "full")
    chunks: tuple[int, ...] = (1,)
    """Model chunks of a stage; more than one is interleaved 1F1B."""
    replicas: bool = True
    """Whether whole replicas on each kind are looked at too."""
    distributed_optimizer: bool = True
    sequence_parallel: bool = False
    """Whether tensor-parallel ranks divide the sequence between their layers."""


@dataclass(frozen=True)
class Problem:
    """What is to be planned."""

    cluster: Cluster
    model: ModelShape
    profile: Profile
    space: SearchSpace
    options: TrainingOptions = field(default_factory=TrainingOptions)


@dataclass(frozen=True, eq=False)
class MeshOption:
    """A shape of one kind's ranks, at any number of stages. Seconds and bytes are one rank's."""

    kind: NodeKind
    stage: StageShape
    """One of its stages, without layers."""
    costs: PartCosts
    layer_seconds: float
    """Both passes."""
    state_bytes: float
    """Weight, gradient and optimizer state of a parameter."""
    room_bytes: float
    """What memory holds of a model."""
    parameter_update: float
    """Seconds of reducing and updating a parameter, and, beside parameters, of each update."""
    fixed_update: float
    near: tuple[float, float]
    """Seconds to the next of its stages on the same node: until arrival, and on the wire."""
    far: tuple[float, float]
    """The same on another node."""

    @property
    def most_stages(self) -> int:
        return self.kind.gpus_in_groups(self.stage.tensor) // self.stage.ranks

    def edges(self, count: int) -> Numbers:
        """Of each of `count` stages to the next: two rows, until arrival and on the wire."""
        size, ranks = self.kind.gpus_per_node, self.stage.ranks
        first = np.arange(count - 1) * ranks
        together = first // size == (first + 2 * ranks - 1) // size
        return np.where(together, np.array(self.near)[:, None], np.array(self.far)[:, None])

    def most_layers(
        self, model: ModelShape, in_flight: Counts, *, chunks: int, first: bool, last: bool
    ) -> Counts:
        """Layers that fit beside the activations of so many passes in flight; below 1 for none."""
        costs = self.costs
        room = np.full(len(in_flight), self.room_bytes - costs.layer_working_bytes)
        end = len(room) - 1
        for stage in {0, end}:
            room[stage] = self.room_bytes - costs.working_bytes(
                embedding=first and stage == 0, head=last and stage == end
            )
        flying = in_flight / chunks
        embedding, head = outer_parameters(
            model, self.stage.tensor, alone=first and last and len(room) == 1
        )
        if first:
            room[0] -= embedding * self.state_bytes
            room[0] -= flying[0] * costs.embedding_activation_bytes
        if last:
            room[-1] -= head * self.state_bytes + costs.head_activation_bytes
        # Chunks of a stage may differ by a layer, and the largest be in flight.
        room -= (chunks - 1) * flying * costs.layer_activation_bytes
        layer = model.layer_parameters / self.stage.tensor * self.state_bytes
        each = layer + flying * costs.layer_activation_bytes
        return np.floor(np.maximum(room, -1.0) / each).astype(np.int64)


@dataclass(frozen=True, eq=False)
class MeshChoice:
    """A mesh: what its ranks are, and in how many stages."""

    option: MeshOption
    count: int
    most: float
    """Layers that fit if it is the pipeline's end and holds no embedding: more never do."""
    inner: float
    """Seconds of all transfers between its stages, both directions."""


def mesh_choices(
    problem: Problem, option: MeshOption, chunks: int, *, micro_batches: int = 0
) -> list[MeshChoice]:
    """A shape in every number of stages that its GPUs and the layers allow.

    `micro_batches` of a step: left out, those of a pipeline that takes the whole batch.
    """
    batch, together = problem.space.global_batch, option.stage.data * option.stage.micro_batch
    micro_batches = micro_batches or max(1, batch // together)
    most = min(option.most_stages, problem.model.layers // chunks)
    if most < 1:
        return []
    in_flight = np.minimum(np.arange(1, most + 1), micro_batches)
    in_flight = in_flight if chunks == 1 else np.full(most, chunks)
    fitting = option.most_layers(problem.model, in_flight, chunks=chunks, first=False, last=False)
    total = np.cumsum(np.maximum(fitting, 0))
    inner = np.cumsum([0.0, *option.edges(most)[0]])
    return [
        MeshChoice(option, count, float(total[count - 1]), 2 * float(inner[count - 1]))
        for count in range(1, most + 1)
        if total[count - 1] >= count * chunks
    ]


def outer_parameters(model: ModelShape, tensor: int, *, alone: bool) -> tuple[float, float]:
    """A rank's parameters of embedding and head; a stage that has both holds a tied one once."""
    head = model.head_parameters
    if alone and model.tied:
        head -= model.vocabulary * model.hidden
    return model.embedding_parameters / tensor, head / tensor


def mesh_options(problem: Problem, kind: NodeKind, step: int) -> Iterator[MeshOption]:
    """All shapes of a kind that take `step` sequences at once. Points not profiled are left out."""
    space, model = problem.space, problem.model
    for tensor in space.tensor:
        if not model.divides(tensor, sequence_parallel=space.sequence_parallel):
            continue
        for micro_batch in space.micro_batch:
            data, rest = divmod(step, micro_batch)
            if rest or not data or tensor * data > kind.gpus_in_groups(tensor):
                continue
            for recompute in space.recompute:
                stage = stage_shape(
                    space,
                    kind,
                    tensor=tensor,
                    data=data,
                    micro_batch=micro_batch,
                    recompute=recompute,
                )
                if (option := mesh_option(problem, kind, stage)) is not None:
                    yield option


def stage_shape(
    space: SearchSpace,
    kind: NodeKind,
    *,
    tensor: int,
    data: int,
    micro_batch: int,
    recompute: str,
) -> StageShape:
    """A stage without layers."""
    return StageShape(
        kind=kind.name,
        layers=(),
        has_embedding=False,
        has_head=False,
        tensor=tensor,
        data=data,
        micro_batch=micro_batch,
        recompute=recompute,
        sequence_parallel=space.sequence_parallel and tensor > 1,
        distributed_optimizer=space.distributed_optimizer,
    )


def mesh_option(
    problem: Problem, kind: NodeKind, stage: StageShape, *, replicas: int = 0
) -> MeshOption | None:
    """The numbers of a shape; `replicas` shard the optimizer, those of the mesh where left out."""
    model, options, profile = problem.model, problem.options, problem.profile
    try:
        costs = profile.costs(kind.accelerator.name, stage.point(model))
    except ProfileError:
        return None
    shards = (replicas or stage.data) if stage.distributed_optimizer else 1
    fixed = profile.optimizer_seconds(kind.accelerator.name, 0.0)
    each = (profile.optimizer_seconds(kind.accelerator.name, 1e9) - fixed) / 1e9 / shards
    latency, reduction = _reduction(problem, [stage])
    return MeshOption(
        kind=kind,
        stage=stage,
        costs=costs,
        layer_seconds=costs.layer.forward + costs.layer.backward,
        state_bytes=options.parameter_bytes + options.gradient_bytes + options.state_bytes / shards,
        room_bytes=kind.accelerator.memory_gib * 2**30 - options.reserved_bytes,
        parameter_update=each + reduction,
        fixed_update=fixed + latency,
        near=_edge(problem, stage, stage, near=True),
        far=_edge(problem, stage, stage, near=False),
    )


def _reduction(problem: Problem, holders: Sequence[StageShape]) -> tuple[float, float]:
    """Seconds of reducing a stage's gradients: beside parameters, and for each of a rank's."""
    count = problem.model.layer_parameters / min(stage.tensor for stage in holders)

    def both(parameters: float) -> float:
        return sum(
            reduce_seconds(
                problem.cluster,
                holders,
                parameters=parameters,
                profile=problem.profile,
                options=problem.options,
            )
        )

    one, many = both(count), both(2 * count)
    return max(2 * one - many, 0.0), (many - one) / count


def _edge(
    problem: Problem, source: StageShape, target: StageShape, *, near: bool
) -> tuple[float, float]:
    """Two neighbours of a mesh, on one node or on two."""
    if near and 2 * source.ranks > problem.cluster.kind(source.kind).gpus_per_node:
        near = False
    size = problem.cluster.kind(source.kind).gpus_per_node
    placed = StageShape(**{**vars(target), "first_gpu": source.ranks if near else size * 2**20})
    edge = edge_costs(problem.cluster, source, placed, model=problem.model, options=problem.options)
    return edge.wire + edge.latency, edge.wire


def pipeline_of(
    problem: Problem, meshes: Sequence[MeshChoice], *, micro_batches: int, chunks: int = 1
) -> Pipeline:
    """The stages of meshes one after the other, for `best_split`."""
    model = problem.model
    stages = sum(mesh.count for mesh in meshes)
    in_flight = in_flight_counts(stages, micro_batches=micro_batches, chunks=chunks)
    layer, extra, edge, wire, update, update_extra = np.zeros((6, stages))
    most = np.zeros(stages, dtype=np.int64)
    start = 0
    for index, mesh in enumerate(meshes):
        option, count = mesh.option, mesh.count
        own = slice(start, start + count)
        parameters = model.layer_parameters / option.stage.tensor
        layer[own] = option.layer_seconds
        update[own] = parameters * option.parameter_update
        update_extra[own] = option.fixed_update
        most[own] = option.most_layers(
            model,
            in_flight[own],
            chunks=chunks,
            first=index == 0,
            last=index == len(meshes) - 1,
        )
        edge[start : start + count - 1], wire[start : start + count - 1] = option.edges(count)
        start += count
        if start < stages:
            crossing = edge_costs(
                problem.cluster,
                option.stage,
                meshes[index + 1].option.stage,
                model=model,
                options=problem.options,
            )
            edge[start - 1], wire[start - 1] = crossing.wire + crossing.latency, crossing.wire
            extra[start] += crossing.gather_after * chunks
            extra[start - 1] += crossing.gather_before * chunks
    first, last = meshes[0].option, meshes[-1].option
    embedding, _ = outer_parameters(model, first.stage.tensor, alone=stages == 1)
    _, head = outer_parameters(model, last.stage.tensor, alone=stages == 1)
    extra[0] += first.costs.embedding.forward + first.costs.embedding.backward
    extra[-1] += last.costs.head.forward + last.costs.head.backward
    update_extra[0] += embedding * first.parameter_update
    update_extra[-1] += head * last.parameter_update
    if model.tied and stages > 1:
        both = tied_seconds(
            problem.cluster, first.stage, last.stage, model=model, options=problem.options
        )
        update_extra[0] += both
        update_extra[-1] += both
    return Pipeline(
        layer_seconds=layer,
        extra_seconds=extra,
        most_layers=most,
        edge_seconds=edge,
        wire_seconds=wire,
        update_seconds=update,
        update_extra=update_extra,
        micro_batches=micro_batches,
        chunks=chunks,
    )


def in_flight_counts(stages: int, *, micro_batches: int, chunks: int) -> Counts:
    """Passes in flight on each stage, as `peak_memory.in_flight` has them."""
    ahead = np.arange(stages - 1, -1, -1)
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * stages
    return np.minimum(ahead + 1, micro_batches * chunks)


def placement_of(
    problem: Problem,
    meshes: Sequence[MeshChoice],
    layers: Sequence[int],
    *,
    chunks: int = 1,
    shares: Sequence[int] = (),
) -> Placement:
    """The plan that meshes and layers describe. `shares` makes the meshes whole replicas."""
    plan = Plan(
        meshes=tuple(
            Mesh(
                vendor=mesh.option.kind.vendor,
                stages=mesh.count,
                tensor=mesh.option.stage.tensor,
                data=mesh.option.stage.data,
                share=shares[index] if shares else 1,
                micro_batch_size=mesh.option.stage.micro_batch,
                recompute=mesh.option.stage.recompute,
                distributed_optimizer=mesh.option.stage.distributed_optimizer,
                sequence_parallel=mesh.option.stage.sequence_parallel,
            )
            for index, mesh in enumerate(meshes)
        ),
        layers=tuple(split_over_chunks(count, chunks) for count in layers),
        whole_replicas=bool(shares),
    )
    kinds = tuple(mesh.option.kind.name for mesh in meshes)
    return Placement(plan, kinds, problem.space.global_batch)
