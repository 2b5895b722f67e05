"""One pipeline stage as costs see it: its ranks, what they hold and how they compute."""

from __future__ import annotations

from dataclasses import dataclass

from hetero.plan import Mesh, Plan, PlanError
from hetero.planner.cluster_shape import Cluster, NodeKind
from hetero.planner.layer_profile import Point
from hetero.planner.model_shape import ModelShape
from hetero.planner.placement import Placement


@dataclass(frozen=True, kw_only=True)
class StageShape:
    """The ranks of one mesh that hold one stage."""

    kind: str
    """The kind of node that they stand on, and from which of its GPUs on."""
    first_gpu: int = 0
    layers: tuple[int, ...]
    """Decoder layers of each of its model chunks."""
    has_embedding: bool
    has_head: bool
    tensor: int = 1
    data: int = 1
    micro_batch: int = 1
    recompute: str = "none"
    sequence_parallel: bool = False
    distributed_optimizer: bool = False

    @classmethod
    def of(cls, plan: Plan, mesh: Mesh, stage: int, *, kind: str, first_gpu: int = 0) -> StageShape:
        """A stage of a plan, as one of its meshes holds it.

        What the mesh leaves to the run's global flags has Megatron's defaults here.
        """
        return cls(
            kind=kind,
            first_gpu=first_gpu,
            layers=plan.layers[stage],
            has_embedding=stage == 0,
            has_head=stage == plan.stages - 1,
            tensor=mesh.tensor,
            data=mesh.data,
            micro_batch=mesh.micro_batch_size or 1,
            recompute=mesh.recompute or "none",
            sequence_parallel=bool(mesh.sequence_parallel),
            distributed_optimizer=bool(mesh.distributed_optimizer),
        )

    @property
    def ranks(self) -> int:
        return self.tensor * self.data

    def point(self, model: ModelShape) -> Point:
        return Point(
            self.tensor,
            self.micro_batch,
            model.seq_length,
            self.recompute,
            self.sequence_parallel,
        )

    def parameters(self, model: ModelShape) -> float:
        """Of one rank. A stage with embedding and tied output layer holds their weight once."""
        count = sum(self.layers) * model.layer_parameters
        if self.has_embedding:
            count += model.embedding_parameters
        if self.has_head:
            count += model.head_parameters
        if self.has_embedding and self.has_head and model.tied:
            count -= model.vocabulary * model.hidden
        return count / self.tensor


def pipelines(placement: Placement, cluster: Cluster) -> list[list[StageShape]]:
    """The stages of each pipeline that differs: one, or of whole replicas one for each mesh."""
    plan = placement.plan
    taken: dict[str, int] = dict.fromkeys(placement.kinds, 0)
    stages: list[list[StageShape]] = [[]]
    for index, (kind, mesh) in enumerate(zip(placement.kinds, plan.meshes, strict=True)):
        _require_covered(mesh, cluster.kind(kind), taken[kind])
        if plan.whole_replicas and index:
            stages.append([])
        for _ in range(mesh.stages):
            stage = len(stages[-1])
            stages[-1].append(StageShape.of(plan, mesh, stage, kind=kind, first_gpu=taken[kind]))
            taken[kind] += mesh.ranks_per_stage
    return stages


def _require_covered(mesh: Mesh, kind: NodeKind, first_gpu: int) -> None:
    if mesh.context > 1:
        raise PlanError("costs are not known of plans with context parallelism; use context 1")
    size = kind.gpus_per_node
    if mesh.tensor > size:
        raise PlanError(
            f"tensor size {mesh.tensor} is more than the {size} GPUs of a node; costs are not "
            "known of tensor parallelism across nodes"
        )
    # Groups stand one behind the other from the mesh's first GPU on.
    fills_nodes = size % mesh.tensor == 0 and first_gpu % mesh.tensor == 0
    last = first_gpu % size + mesh.world_size
    if mesh.tensor > 1 and not fills_nodes and last > size:
        raise PlanError(
            f"a tensor-parallel group of {mesh.tensor} of {kind.name} would lie over two nodes of "
            f"{size} GPUs; give this mesh or the one before it another tensor size"
        )


def micro_batches(placement: Placement) -> list[int]:
    """How many each pipeline of `pipelines` takes in a step."""
    plan = placement.plan
    first = plan.meshes[0]
    per_row = plan.row(0) if plan.whole_replicas else first.data
    samples = per_row * (first.micro_batch_size or 1)
    rows, rest = divmod(placement.global_batch, samples)
    if rest or not rows:
        raise PlanError(
            f"the global batch {placement.global_batch} does not divide into steps of {samples} "
            "samples, which all replicas take together"
        )
    if plan.chunks > 1 and rows % plan.stages:
        raise PlanError(
            f"{rows} micro-batches do not divide by {plan.stages} stages, as an interleaved "
            "schedule needs it"
        )
    return [rows * mesh.share for mesh in plan.meshes] if plan.whole_replicas else [rows]
