"""A pipeline stage as the cost model sees it: its ranks, layers and parallel sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetero.errors import UserError
from hetero.plan import Mesh, Plan
from hetero.planner.cluster_shape import Cluster, NodeKind
from hetero.planner.fp8 import BF16, WEIGHT_COPIES, Fp8, cast_bytes, linear_parameters
from hetero.planner.layer_profile import Point
from hetero.planner.model_shape import ModelShape
from hetero.planner.placement import Placement


@dataclass(frozen=True, kw_only=True)
class StageShape:
    """One pipeline stage on one mesh."""

    kind: str
    """The kind of node that its ranks are on."""
    first_gpu: int = 0
    """The first of its GPUs, numbered over all nodes of the kind."""
    layers: tuple[int, ...]
    """Decoder layers of each model chunk."""
    sparse_layers: tuple[int, ...] = ()
    """How many of each chunk's layers are sparse; empty: none."""
    has_embedding: bool
    has_head: bool
    tensor: int = 1
    context: int = 1
    """Ranks that share each sequence."""
    data: int = 1
    experts: int = 1
    """Ranks that hold different experts of a layer."""
    expert_tensor: int | None = None
    """Ranks that share each expert; None: `tensor`."""
    micro_batch: int = 1
    recompute: str = "none"
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    fp8: Fp8 = BF16
    """Of its own mesh."""
    bf16_layers: tuple[tuple[int, int], ...] = ()
    """With fp8, how many dense and sparse layers of each chunk stay in bf16; empty: none."""

    @classmethod
    def of(
        cls,
        plan: Plan,
        mesh: Mesh,
        stage: int,
        *,
        model: ModelShape,
        kind: str,
        first_gpu: int = 0,
        fp8: Fp8 = BF16,
    ) -> StageShape:
        """A stage of `plan` on `mesh`. Options that are None there get Megatron's defaults, and
        `fp8` is the run's."""
        chunks = range(plan.chunks if model.num_experts else 0)
        own = replace(fp8, format=mesh.fp8 or fp8.format)
        return cls(
            kind=kind,
            first_gpu=first_gpu,
            layers=plan.layers[stage],
            sparse_layers=tuple(
                model.sparse_layers(plan.layer_range(stage, chunk)) for chunk in chunks
            ),
            has_embedding=stage == 0,
            has_head=stage == plan.stages - 1,
            tensor=mesh.tensor,
            context=mesh.context,
            data=mesh.data,
            experts=mesh.experts,
            expert_tensor=mesh.expert_tensor,
            micro_batch=mesh.micro_batch_size or 1,
            recompute=mesh.recompute or "none",
            sequence_parallel=bool(mesh.sequence_parallel),
            distributed_optimizer=bool(mesh.distributed_optimizer),
            fp8=own if own.is_used else BF16,
            bf16_layers=_bf16_layers(own, plan, stage, model),
        )

    @property
    def ranks(self) -> int:
        return self.tensor * self.copies

    @property
    def copies(self) -> int:
        """Ranks with the same weights, over which gradients and optimizer state go."""
        return self.context * self.data

    @property
    def ranks_per_expert(self) -> int:
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def ranks_of_experts(self) -> int:
        """Ranks that together hold all experts of a layer once."""
        return self.experts * self.ranks_per_expert

    @property
    def expert_copies(self) -> int:
        """Ranks with the same experts, over which their gradients and optimizer state go."""
        return self.ranks // self.ranks_of_experts

    def in_bf16(self) -> StageShape:
        """The stage without fp8."""
        return replace(self, fp8=BF16, bf16_layers=())

    def fp8_weight_bytes(self, model: ModelShape) -> float:
        """What one rank keeps of its linear layers' weights in fp8."""
        return WEIGHT_COPIES * self.fp8_parameters(model)

    def weight_cast_bytes(self, model: ModelShape) -> float:
        """Memory traffic of casting these weights, once a step."""
        return cast_bytes(self.fp8.recipe, transposed=True) * self.fp8_parameters(model)

    def fp8_parameters(self, model: ModelShape) -> float:
        """Those of one rank that are multiplied in fp8, with those of its experts."""
        if not self.fp8.is_used:
            return 0.0
        dense, sparse = (sum(counts) for counts in zip(*self.dense_and_sparse(), strict=True))
        for bf16_dense, bf16_sparse in self.bf16_layers:
            dense, sparse = dense - bf16_dense, sparse - bf16_sparse
        count = 0
        if self.has_head:
            count += model.mtp_layers * model.mtp_projection_parameters
            dense += 0 if model.mtp_is_sparse else model.mtp_layers
            sparse += model.mtp_layers if model.mtp_is_sparse else 0
        count += dense * linear_parameters(model, sparse=False)
        if not sparse:
            return count / self.tensor
        count += sparse * linear_parameters(model, sparse=True)
        of_experts = sparse * model.expert_parameters if self.fp8.experts else 0
        return count / self.tensor + of_experts / self.ranks_of_experts

    def of_experts(self) -> StageShape:
        """The stage as the gradients of experts see it: these are reduced over `copies` of it."""
        return replace(self, tensor=self.ranks_of_experts, context=1, data=self.expert_copies)

    def dense_and_sparse(self) -> tuple[tuple[int, int], ...]:
        """The numbers of dense and of sparse layers of each chunk."""
        sparse = self.sparse_layers or (0,) * len(self.layers)
        return tuple((every - own, own) for every, own in zip(self.layers, sparse, strict=True))

    def point(self, model: ModelShape) -> Point:
        """Of whole sequences, whatever the context size: see `context_costs`."""
        return Point(
            self.tensor,
            self.micro_batch,
            model.seq_length,
            self.recompute,
            self.sequence_parallel,
            *((self.fp8.recipe, self.fp8.weight_gradients) if self.fp8.is_used else ()),
        )

    def parameters(self, model: ModelShape) -> float:
        """Parameters of one rank. A single stage has no copy of its embedding."""
        return self.shared_parameters(model) + self.expert_parameters(model)

    def expert_parameters(self, model: ModelShape) -> float:
        """Those of one rank that belong to experts; of experts that every token passes none."""
        count = sum(self.sparse_layers) * model.expert_parameters
        if self.has_head:
            count += model.head_expert_parameters
        return count / self.ranks_of_experts

    def shared_parameters(self, model: ModelShape) -> float:
        """All others of one rank."""
        sparse = sum(self.sparse_layers)
        count = (sum(self.layers) - sparse) * model.layer_parameters
        count += sparse * model.sparse_layer_parameters
        if self.has_embedding:
            count += model.embedding_parameters
        if self.has_head:
            count += model.head_parameters
        if self.has_embedding and self.has_head:
            count -= model.copied_parameters
        return count / self.tensor


def _bf16_layers(
    fp8: Fp8, plan: Plan, stage: int, model: ModelShape
) -> tuple[tuple[int, int], ...]:
    chunks = range(plan.chunks if fp8.has_bf16_layers else 0)
    found = tuple(fp8.bf16_layers(plan.layer_range(stage, chunk), model) for chunk in chunks)
    return found if any(map(any, found)) else ()


def pipeline_stages(
    placement: Placement, cluster: Cluster, model: ModelShape, *, fp8: Fp8 = BF16
) -> list[list[StageShape]]:
    """The stages of each distinct pipeline: one, or one for each mesh of whole replicas.

    `fp8` is the run's.
    """
    plan = placement.plan
    gpus_used: dict[str, int] = dict.fromkeys(placement.kinds, 0)
    stages: list[list[StageShape]] = [[]]
    for index, (kind, mesh) in enumerate(zip(placement.kinds, plan.meshes, strict=True)):
        node = cluster.kind(kind)
        _require_supported(mesh, node, gpus_used[kind])
        if plan.whole_replicas and index:
            stages.append([])
        for _ in range(mesh.stages):
            stage = len(stages[-1])
            stages[-1].append(
                StageShape.of(
                    plan,
                    mesh,
                    stage,
                    model=model,
                    kind=kind,
                    first_gpu=gpus_used[kind],
                    fp8=fp8.on(node.accelerator),
                )
            )
            gpus_used[kind] += mesh.ranks_per_stage
    return stages


def _require_supported(mesh: Mesh, kind: NodeKind, first_gpu: int) -> None:
    size = kind.gpus_per_node
    if mesh.tensor > size:
        raise UserError(
            f"tensor size {mesh.tensor} is more than the {size} GPUs of a node; costs are not "
            "known of tensor parallelism across nodes"
        )
    # Tensor-parallel groups are consecutive from the mesh's first GPU on.
    fills_nodes = size % mesh.tensor == 0 and first_gpu % mesh.tensor == 0
    last = first_gpu % size + mesh.world_size
    if mesh.tensor > 1 and not fills_nodes and last > size:
        raise UserError(
            f"a tensor-parallel group of {mesh.tensor} of {kind.name} would lie over two nodes of "
            f"{size} GPUs; give this mesh or the one before it another tensor size"
        )


def micro_batch_counts(placement: Placement) -> list[int]:
    """Micro-batches per training step of each pipeline of `pipeline_stages`."""
    plan = placement.plan
    first = plan.meshes[0]
    micro_batches_per_round = plan.row(0) if plan.whole_replicas else first.data
    samples = micro_batches_per_round * (first.micro_batch_size or 1)
    rounds, rest = divmod(placement.global_batch, samples)
    if rest or not rounds:
        raise UserError(
            f"the global batch {placement.global_batch} does not divide into steps of {samples} "
            "samples, which all replicas take together"
        )
    if plan.chunks > 1 and rounds % plan.stages:
        raise UserError(
            f"{rounds} micro-batches do not divide by {plan.stages} stages, as an interleaved "
            "schedule needs it"
        )
    return [rounds * mesh.share for mesh in plan.meshes] if plan.whole_replicas else [rounds]
