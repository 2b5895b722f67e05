"""The search space: what a mesh on one kind of node can be, and its cost coefficients.

Coefficients are the costs of `step_costs` as linear functions of a stage's layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hetero.plan import Mesh, Plan, split_over_chunks
from hetero.plan.plan import NO_FP8
from hetero.planner.cluster_shape import Cluster, NodeKind
from hetero.planner.communication_costs import (
    boundary_seconds,
    edge_costs,
    reduce_and_gather_seconds,
    tied_embedding_seconds,
)
from hetero.planner.fp8 import BF16, divides
from hetero.planner.layer_profile import PartCosts, Profile, ProfileError
from hetero.planner.layer_split import FloatArray, IntArray, PipelineModel
from hetero.planner.mesh_hops import MeshHops, busiest_rails, mesh_hops
from hetero.planner.model_shape import ModelShape
from hetero.planner.peak_memory import in_flight
from hetero.planner.placement import Placement
from hetero.planner.stage_costs import stage_costs
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
    experts: tuple[int, ...] = (1,)
    """Expert-parallel sizes; those that do not divide a stage's ranks are skipped. Above 1, the
    ranks that share an expert are one, or the tensor-parallel ones."""
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


def expert_sizes(model: ModelShape, gpus_per_node: int) -> tuple[int, ...]:
    """The expert-parallel sizes to choose from: those up to a node that divide the experts."""
    sizes = range(1, min(gpus_per_node, model.num_experts) + 1)
    return tuple(size for size in sizes if model.num_experts % size == 0) or (1,)


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
    """Forward and backward pass of one micro-batch, the mean of the model's layers."""
    bf16: PartCosts | None
    """Of layers that stay in bf16 where others are in fp8; None where there are none."""
    layer_activation_bytes: float
    """That a layer keeps of one micro-batch, the mean of the model's layers."""
    state_bytes: float
    """Weight, gradient and optimizer state per parameter."""
    expert_state_bytes: float
    """The same per parameter of experts, whose optimizer state goes over other ranks."""
    usable_bytes: float
    """Memory available to the model."""
    update_seconds_per_parameter: FloatArray
    """Gradient reduction and optimizer update of each stage, which may lie over two nodes."""
    expert_update_seconds_per_parameter: FloatArray
    """The same of experts."""
    update_seconds_fixed: FloatArray
    hops: MeshHops
    """Of as many stages as there may be."""
    boundary_seconds: float
    """The least that a transfer to or from any other kind of node occupies this end."""

    @property
    def max_stages(self) -> int:
        return max_stages(self.kind, self.stage)

    def is_no_better(self, other: MeshShape) -> bool:
        """Whether a pipeline with `other` in its place, which differs in the ranks of experts
        alone, is as short and takes as little memory."""
        own, others = self.costs, other.costs
        ranks, other_ranks = self.stage.ranks_of_experts, other.stage.ranks_of_experts
        is_fp8 = self.stage.fp8.is_used and self.stage.fp8.experts
        return (
            self.stage.fp8 == other.stage.fp8
            # Of experts in fp8, the copies of their weights, and the time of casting them.
            and (not is_fp8 or ranks <= other_ranks)
            and self.layer_seconds >= other.layer_seconds
            and self.expert_state_bytes / ranks >= other.expert_state_bytes / other_ranks
            and own.sparse_layer_activation_bytes >= others.sparse_layer_activation_bytes
            and own.sparse_layer_working_bytes >= others.sparse_layer_working_bytes
            and bool((self.update_seconds_fixed >= other.update_seconds_fixed).all())
            and bool(
                (
                    self.expert_update_seconds_per_parameter / ranks
                    >= other.expert_update_seconds_per_parameter / other_ranks
                ).all()
            )
        )

    def update_seconds_per_layer(self, model: ModelShape) -> FloatArray:
        """Gradient reduction and update of the mean layer, of each stage."""
        tensor, sparse = self.stage.tensor, model.all_sparse_layers
        cast = self._cast_seconds_per_layer(model)
        if not sparse:
            return cast + model.layer_parameters / tensor * self.update_seconds_per_parameter
        shared = (model.layers - sparse) * model.layer_parameters
        shared += sparse * model.sparse_layer_parameters
        experts = sparse * model.expert_parameters / self.stage.ranks_of_experts
        seconds = shared / tensor * self.update_seconds_per_parameter
        seconds += experts * self.expert_update_seconds_per_parameter
        return cast + seconds / model.layers

    def _cast_seconds_per_layer(self, model: ModelShape) -> float:
        """Of casting the mean layer's weights to fp8."""
        moved = self._whole(model).weight_cast_bytes(model) / model.layers
        return moved / self.kind.accelerator.memory_bandwidth

    def _whole(self, model: ModelShape) -> StageShape:
        """All layers of the model on one stage."""
        sparse = (model.all_sparse_layers,) if model.num_experts else ()
        return replace(self.stage, layers=(model.layers,), sparse_layers=sparse)

    def bf16_seconds(self, model: ModelShape) -> float:
        """What a layer takes longer that stays in bf16, the mean of the model's layers."""
        if self.bf16 is None:
            return 0.0
        return mean_layer_seconds(self.bf16, model) - self.layer_seconds

    def _bf16_bytes(self) -> float:
        """What a layer keeps more of one micro-batch that stays in bf16, at most."""
        if self.bf16 is None:
            return 0.0
        own, costs = self.bf16, self.costs
        return max(
            own.layer_activation_bytes - costs.layer_activation_bytes,
            own.sparse_layer_activation_bytes - costs.sparse_layer_activation_bytes,
            0.0,
        )

    def max_layers(
        self,
        model: ModelShape,
        in_flight: IntArray,
        *,
        chunks: int,
        first: bool,
        last: bool,
        at_best: bool = False,
    ) -> IntArray:
        """The most layers of each stage that fit into memory; below 1 where none does.

        `in_flight` are the passes in flight on each stage; `first` and `last` say whether the mesh
        has the pipeline's first and last stage. Where layers differ, as many as fit wherever a
        stage is in the model, or, `at_best`, somewhere.
        """
        costs, sparse = self.costs, model.all_sparse_layers > 0
        dense = model.all_sparse_layers < model.layers
        working = costs.working_bytes(embedding=False, head=False, dense=dense, sparse=sparse)
        available = np.full(len(in_flight), self.usable_bytes - working)
        end = len(available) - 1
        for stage in {0, end}:
            available[stage] = self.usable_bytes - costs.working_bytes(
                embedding=first and stage == 0,
                head=last and stage == end,
                dense=dense,
                sparse=sparse,
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
            available[-1] -= self._head_expert_parameters(model) * self.expert_state_bytes
            available[-1] -= self._head(model).fp8_weight_bytes(model)
        fp8 = self.stage.fp8
        available[0] -= first * fp8.bf16_at_start * micro_batches[0] * self._bf16_bytes()
        available[-1] -= last * fp8.bf16_at_end * micro_batches[-1] * self._bf16_bytes()
        # Chunks of a stage may differ by a layer: assume that the largest is in flight.
        kept = max(
            costs.layer_activation_bytes if dense else 0.0,
            costs.sparse_layer_activation_bytes if sparse else 0.0,
        )
        available -= (chunks - 1) * micro_batches * kept
        states = model.layer_parameters / self.stage.tensor * self.state_bytes
        states += self._fp8_bytes(model, sparse=False)
        bytes_per_layer = states + micro_batches * costs.layer_activation_bytes
        if not sparse:
            return np.floor(np.maximum(available, -1.0) / bytes_per_layer).astype(np.int64)
        states = model.sparse_layer_parameters / self.stage.tensor * self.state_bytes
        experts = model.expert_parameters / self.stage.ranks_of_experts
        states += experts * self.expert_state_bytes + self._fp8_bytes(model, sparse=True)
        bytes_per_sparse_layer = states + micro_batches * costs.sparse_layer_activation_bytes
        held = _held_bytes(bytes_per_layer, bytes_per_sparse_layer, model, at_best=at_best)
        if chunks == 1 and first:
            held[0] = _held_at(bytes_per_layer[0], bytes_per_sparse_layer[0], model.sparse_before)
        if chunks == 1 and last and not (first and end == 0):
            own = bytes_per_layer[end], bytes_per_sparse_layer[end]
            held[end] = _held_at(*own, model.sparse_behind)
        return np.asarray((held <= available[:, None]).sum(axis=1) - 1)

    def head_update_seconds(self, model: ModelShape, stage: int, *, parameters: float) -> float:
        """Seconds of gradient reduction and update of a last stage's head and MTP layers.

        Args:
            stage: its number in the mesh.
            parameters: of one rank, experts not included.
        """
        seconds = float(parameters * self.update_seconds_per_parameter[stage])
        if not model.mtp_layers:
            return seconds
        each = self.expert_update_seconds_per_parameter[stage]
        seconds += float(self._head_expert_parameters(model) * each)
        cast = self._head(model).weight_cast_bytes(model)
        return seconds + cast / self.kind.accelerator.memory_bandwidth

    def _head(self, model: ModelShape) -> StageShape:
        """A last stage without layers."""
        sparse = (0,) if model.num_experts else ()
        return replace(self.stage, layers=(0,), sparse_layers=sparse, has_head=True)

    def _head_expert_parameters(self, model: ModelShape) -> float:
        return model.head_expert_parameters / self.stage.ranks_of_experts

    def _fp8_bytes(self, model: ModelShape, *, sparse: bool) -> float:
        """Of a layer's weights in fp8."""
        layer = replace(self.stage, layers=(1,), sparse_layers=(int(sparse),))
        return layer.fp8_weight_bytes(model)


def _held_at(dense: float, sparse: float, counts: Sequence[int]) -> FloatArray:
    """Bytes of so many layers as an index says, of which `counts` are sparse."""
    own = np.array(counts)
    held: FloatArray = (np.arange(len(own)) - own) * dense + own * sparse
    return held


def _held_bytes(
    dense: FloatArray, sparse: FloatArray, model: ModelShape, *, at_best: bool
) -> FloatArray:
    """The most bytes of any consecutive layers, by stage (rows) and their number (columns).

    `at_best`: the fewest. `dense` and `sparse` are the bytes of a layer on each stage.
    """
    fewest, most = (np.array(counts) for counts in model.sparse_in_windows)
    numbers = np.arange(model.layers + 1)
    either = [
        (numbers - counts) * dense[:, None] + counts * sparse[:, None] for counts in (fewest, most)
    ]
    held: FloatArray = (np.minimum if at_best else np.maximum)(*either)
    return held


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
    fitting = shape.max_layers(
        problem.model, in_flights, chunks=chunks, first=False, last=False, at_best=True
    )
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
    """A rank's parameters of (embedding, head), experts of MTP layers apart.

    A single stage has no copy of its embedding.
    """
    head = model.head_parameters
    if single_stage:
        head -= model.copied_parameters
    return model.embedding_parameters / tensor, head / tensor


def mesh_shapes(problem: Problem, kind: NodeKind, sequences: int) -> Iterator[MeshShape]:
    """All shapes of a kind that process `sequences` sequences at once (DP size x micro-batch).

    Points that the profile lacks are skipped.
    """
    space = problem.space
    for (tensor, context), sizes in itertools.groupby(layer_sizes(problem), _without_experts):
        of_experts = list(sizes)
        for micro_batch in space.micro_batch:
            data, rest = divmod(sequences, micro_batch)
            ranks = tensor * context * data
            if rest or not data or ranks > kind.usable_gpus(tensor, context):
                continue
            for recompute in space.recompute:
                found = []
                for one in of_experts:
                    if not one.fit(ranks, kind):
                        continue
                    stage = stage_shape(
                        problem, kind, one, data=data, micro_batch=micro_batch, recompute=recompute
                    )
                    if (shape := mesh_shape(problem, kind, stage)) is not None:
                        found.append(shape)
                yield from _undominated(found)


def _without_experts(sizes: LayerSizes) -> tuple[int, int]:
    return sizes.tensor, sizes.context


def _undominated(shapes: Sequence[MeshShape]) -> Iterator[MeshShape]:
    """Of shapes that differ in the ranks of experts alone, those that another is no better than."""
    kept: list[MeshShape] = []
    for shape in shapes:
        if not any(map(shape.is_no_better, kept)):
            kept = [one for one in kept if not one.is_no_better(shape)]
            kept.append(shape)
    yield from kept


@dataclass(frozen=True)
class LayerSizes:
    """How the ranks of a stage share its layers."""

    tensor: int
    context: int
    experts: int = 1
    expert_tensor: int | None = None

    @property
    def ranks_of_experts(self) -> int:
        return self.experts * (self.expert_tensor or self.tensor)

    def fit(self, ranks: int, kind: NodeKind) -> bool:
        """Whether a stage of so many ranks holds all experts a whole number of times, on one node
        or on all GPUs of several."""
        own, size = self.ranks_of_experts, kind.gpus_per_node
        return self.experts == 1 or (ranks % own == 0 and (size % own == 0 or own % size == 0))


def layer_sizes(problem: Problem) -> Iterator[LayerSizes]:
    """The sizes of the space that divide the model and its sequences; equal ones but for those of
    experts follow each other."""
    space, model = problem.space, problem.model
    is_shared = space.sequence_parallel
    for tensor, context in itertools.product(space.tensor, space.context):
        if not model.divides(tensor, sequence_parallel=is_shared):
            continue
        if not model.shares_sequences(context, tensor, sequence_parallel=is_shared):
            continue
        if tensor > 1 and model.needs_sequence_parallel and not is_shared:
            continue
        if not model.num_experts:
            yield LayerSizes(tensor, context)
            continue
        for experts in space.experts:
            widths = {tensor} if experts == 1 else {1, tensor}
            for width in sorted(widths):
                if model.divides_experts(experts, width):
                    yield LayerSizes(tensor, context, experts, None if width == tensor else width)


def stage_shape(
    problem: Problem,
    kind: NodeKind,
    sizes: LayerSizes,
    *,
    data: int,
    micro_batch: int,
    recompute: str,
) -> StageShape:
    """A stage without layers, from the searched values and the fixed ones of the problem.

    It is in bf16 where the kind does not multiply its matrices in fp8.
    """
    space, model, fp8 = problem.space, problem.model, problem.options.fp8
    rows = micro_batch * model.seq_length // sizes.context
    fp8 = fp8.on(kind.accelerator)
    sliced = sizes.tensor if sizes.expert_tensor is None else sizes.expert_tensor
    has_experts = model.num_experts > 0 and fp8.experts
    can = kind.accelerator.fp8_flops is not None and divides(
        model,
        tensor=sizes.tensor,
        rows=rows,
        ranks_per_expert=sliced if has_experts else None,
    )
    return StageShape(
        kind=kind.name,
        layers=(),
        has_embedding=False,
        has_head=False,
        tensor=sizes.tensor,
        context=sizes.context,
        experts=sizes.experts,
        expert_tensor=sizes.expert_tensor,
        data=data,
        micro_batch=micro_batch,
        recompute=recompute,
        sequence_parallel=space.sequence_parallel and sizes.tensor > 1,
        distributed_optimizer=space.distributed_optimizer,
        fp8=fp8 if can and fp8.is_used else BF16,
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
        bf16 = None
        if stage.fp8.has_bf16_layers:
            bf16 = stage_costs(
                problem.cluster, stage.in_bf16(), model=model, profile=profile, options=options
            )
    except ProfileError:
        return None
    copies = copies or stage.copies
    shards = copies if stage.distributed_optimizer else 1
    expert_shards = 1
    if stage.distributed_optimizer:
        expert_shards = copies * stage.tensor // stage.ranks_of_experts
    fixed = profile.optimizer_seconds(kind.accelerator.name, 0.0)
    each = (profile.optimizer_seconds(kind.accelerator.name, 1e9) - fixed) / 1e9
    shared, experts = _reductions_of_stages(problem, kind, stage)
    return MeshShape(
        kind=kind,
        stage=stage,
        costs=costs,
        layer_seconds=mean_layer_seconds(costs, model),
        bf16=bf16,
        layer_activation_bytes=_mean_of_layers(
            model, costs.layer_activation_bytes, costs.sparse_layer_activation_bytes
        ),
        state_bytes=options.parameter_bytes + options.gradient_bytes + options.state_bytes / shards,
        expert_state_bytes=options.parameter_bytes
        + options.gradient_bytes
        + options.state_bytes / expert_shards,
        usable_bytes=kind.accelerator.memory_gib * 2**30 - options.reserved_bytes,
        update_seconds_per_parameter=each / shards + shared.slope,
        expert_update_seconds_per_parameter=each / expert_shards + experts.slope,
        update_seconds_fixed=fixed + shared.fixed + experts.fixed,
        hops=mesh_hops(
            problem.cluster,
            stage,
            stages=max(min(max_stages(kind, stage), model.layers), 1),
            model=model,
            options=options,
        ),
        boundary_seconds=boundary_seconds(problem.cluster, stage, model=model, options=options),
    )


def mean_layer_seconds(costs: PartCosts, model: ModelShape) -> float:
    """Forward and backward pass of the mean of the model's layers."""
    dense, sparse = costs.layer, costs.sparse_layer
    return _mean_of_layers(model, dense.forward + dense.backward, sparse.forward + sparse.backward)


def _mean_of_layers(model: ModelShape, dense: float, sparse: float) -> float:
    count = model.all_sparse_layers
    if not count:
        return dense
    return ((model.layers - count) * dense + count * sparse) / model.layers


@dataclass(frozen=True, eq=False)
class _Reductions:
    """Seconds of reducing and gathering as linear functions of a rank's parameters, by stage."""

    fixed: FloatArray
    slope: FloatArray
    """A parameter."""


def _reductions_of_stages(
    problem: Problem, kind: NodeKind, stage: StageShape
) -> tuple[_Reductions, _Reductions]:
    """Of what is not experts' and of experts, of each stage of a mesh.

    Stages differ where some lie over two nodes.
    """
    size, ranks = kind.gpus_per_node, stage.ranks
    first = np.arange(max(max_stages(kind, stage), 1)) * ranks % size
    if size % ranks == 0 or ranks % size == 0:
        first[:] = 0
    model = problem.model

    def of(parameters: float, *, experts: bool) -> _Reductions:
        costs = {}
        for gpu in set(first.tolist()):
            own = replace(stage, first_gpu=gpu)
            costs[gpu] = _reduction_costs(problem, own.of_experts() if experts else own, parameters)
        fixed, slope = zip(*(costs[gpu] for gpu in first.tolist()), strict=True)
        return _Reductions(np.array(fixed), np.array(slope))

    sparse = model.all_sparse_layers
    shared = model.layer_parameters if sparse < model.layers else model.sparse_layer_parameters
    of_shared = of(shared / stage.tensor, experts=False)
    if not sparse:
        return of_shared, _Reductions(np.zeros(len(first)), np.zeros(len(first)))
    return of_shared, of(model.expert_parameters / stage.ranks_of_experts, experts=True)


def _reduction_costs(problem: Problem, stage: StageShape, layer: float) -> tuple[float, float]:
    """The constant and the seconds a parameter, from those of a layer's and twice as many."""

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
        update[own] = shape.update_seconds_per_layer(model)[: mesh.stages]
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
    extra[0] += problem.options.fp8.bf16_at_start * first.bf16_seconds(model)
    extra[-1] += problem.options.fp8.bf16_at_end * last.bf16_seconds(model)
    last_stage = meshes[-1].stages - 1
    extra_update[0] += embedding * first.update_seconds_per_parameter[0]
    extra_update[-1] += last.head_update_seconds(model, last_stage, parameters=head)
    if model.copied_parameters and stages > 1:
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
    """The placement of meshes with these layers a stage; with `shares`, of whole replicas.

    A mesh says `fp8` where it is not the run's.
    """
    fp8 = problem.options.fp8
    plan = Plan(
        meshes=tuple(
            Mesh(
                vendor=mesh.shape.kind.vendor,
                stages=mesh.stages,
                tensor=mesh.shape.stage.tensor,
                context=mesh.shape.stage.context,
                data=mesh.shape.stage.data,
                experts=mesh.shape.stage.experts,
                expert_tensor=mesh.shape.stage.expert_tensor,
                share=shares[index] if shares else 1,
                micro_batch_size=mesh.shape.stage.micro_batch,
                recompute=mesh.shape.stage.recompute,
                distributed_optimizer=mesh.shape.stage.distributed_optimizer,
                sequence_parallel=mesh.shape.stage.sequence_parallel,
                fp8=None if mesh.shape.stage.fp8.format == fp8.format else NO_FP8,
            )
            for index, mesh in enumerate(meshes)
        ),
        layers=tuple(split_over_chunks(stages, chunks) for stages in layers),
        whole_replicas=bool(shares),
    )
    kinds = tuple(mesh.shape.kind.name for mesh in meshes)
    return Placement(plan, kinds, problem.space.global_batch)
