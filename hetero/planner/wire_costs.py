"""What transfers between stages, and reductions between replicas, take on a cluster's wires.

Nodes carry their transfers over all their NICs at once. GPUs that share a NIC share its bandwidth,
which is all the contention there is inside one transfer; what several transfers contend for is left
to the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hetero.planner.cluster_shape import Cluster, NodeKind, Wire
from hetero.planner.layer_profile import Profile
from hetero.planner.model_shape import ModelShape
from hetero.planner.stage_shape import StageShape
from hetero.planner.training_options import TrainingOptions

NCCL_BUFFER = 4 * 2**20
"""Bytes that NCCL buffers between two GPUs (NCCL_BUFFSIZE in its documentation)."""
_OVERLAPPED_CHUNKS = 4
"""In how many chunks a reduction across vendors overlaps what it does inside and between them."""


@dataclass(frozen=True)
class EdgeCosts:
    """Of one micro-batch between two stages, in seconds."""

    wire: float
    latency: float
    gather_after: float
    """What each rank of the later stage takes to gather an activation that came in parts."""
    gather_before: float
    """The same of the earlier stage and a gradient."""
    is_buffered: bool
    """Whether NCCL takes a rank's message into its buffer, so that a sender need not wait."""


def edge_costs(
    cluster: Cluster,
    source: StageShape,
    target: StageShape,
    *,
    model: ModelShape,
    options: TrainingOptions,
) -> EdgeCosts:
    """Inside one mesh each rank sends what it holds; between meshes each element crosses once."""
    size = model.boundary_bytes(source.micro_batch, options.activation_bytes)
    other = model.boundary_bytes(target.micro_batch, options.activation_bytes)
    is_boundary = (source.kind, source.tensor, source.data) != (
        target.kind,
        target.tensor,
        target.data,
    )
    is_gathered = is_boundary or options.deepspeed_transfers
    in_parts = is_gathered or source.sequence_parallel
    sent = size / source.tensor if in_parts else size
    received = other / target.tensor if in_parts else size
    gather_after = gather_before = 0.0
    if is_gathered:
        gather_after = _gather(cluster.kind(target.kind), target, other)
        gather_before = _gather(cluster.kind(source.kind), source, size)
    if shares_node(cluster, source, target):
        wire = cluster.kind(source.kind).inside
        seconds = max(wire.seconds(sent), wire.seconds(received))
    else:
        wire = cluster.rail(source.kind, target.kind)
        seconds = max(
            wire.seconds(sent * ranks_per_rail(cluster.kind(source.kind), source.ranks)),
            wire.seconds(received * ranks_per_rail(cluster.kind(target.kind), target.ranks)),
        )
    latency = 0.0 if wire.measured else wire.latency
    is_buffered = max(sent, received) <= NCCL_BUFFER
    return EdgeCosts(seconds - latency, latency, gather_after, gather_before, is_buffered)


def shares_node(cluster: Cluster, one: StageShape, other: StageShape) -> bool:
    """Whether two stages stand on one node with all their ranks."""
    if one.kind != other.kind:
        return False
    size = cluster.kind(one.kind).gpus_per_node
    gpus = [
        gpu
        for stage in (one, other)
        for gpu in (stage.first_gpu, stage.first_gpu + stage.ranks - 1)
    ]
    return len({gpu // size for gpu in gpus}) == 1


def ranks_per_rail(kind: NodeKind, ranks: int) -> int:
    """How many of `ranks` consecutive GPUs use the busiest NIC of a node."""
    return min(ranks, math.ceil(kind.gpus_per_node / kind.rails))


def rails_of(cluster: Cluster, stage: StageShape) -> range:
    """The NICs of a stage, counted over all nodes of its kind."""
    kind = cluster.kind(stage.kind)

    def rail(gpu: int) -> int:
        node, place = divmod(gpu, kind.gpus_per_node)
        return node * kind.rails + place * kind.rails // kind.gpus_per_node

    return range(rail(stage.first_gpu), rail(stage.first_gpu + stage.ranks - 1) + 1)


def _gather(kind: NodeKind, stage: StageShape, size: float) -> float:
    if stage.tensor == 1 or stage.sequence_parallel:
        return 0.0
    return ring_seconds(kind.inside, ranks=stage.tensor, size=size)


def ring_seconds(wire: Wire, *, ranks: int, size: float) -> float:
    """A reduce-scatter or an all-gather of `size` bytes, as a ring does it."""
    if ranks < 2:
        return 0.0
    return (ranks - 1) * wire.seconds(size / ranks)


def inside_mesh_seconds(cluster: Cluster, stage: StageShape, size: float) -> float:
    """A reduce-scatter or an all-gather of `size` bytes a rank over a stage's replicas.

    All tensor-parallel ranks do so at once, each among its likes, and share the NICs of their
    node. Over nodes the steps of latency are those of a tree.
    """
    kind, replicas = cluster.kind(stage.kind), stage.data
    if replicas < 2:
        return 0.0
    inside = max(1, min(replicas, kind.gpus_per_node // stage.tensor))
    nodes = math.ceil(replicas / inside)
    if nodes == 1:
        return ring_seconds(kind.inside, ranks=replicas, size=size)
    sharing = stage.tensor / kind.rails
    moved = (replicas - 1) / replicas * size
    slowest = max(moved / kind.inside.bandwidth, kind.rail.seconds(moved * sharing))
    return slowest + kind.rail.latency * math.log2(nodes) + kind.inside.latency * (inside - 1)


def reduce_seconds(
    cluster: Cluster,
    holders: Sequence[StageShape],
    *,
    parameters: float,
    profile: Profile,
    options: TrainingOptions,
) -> tuple[float, float]:
    """Reducing a stage's gradients over all who hold it, and gathering its weights afterwards.

    `parameters` are one rank's. Without a distributed optimizer the gradients are gathered and the
    weights are not. Inside a vendor the arithmetic hides behind the transfers.
    """
    gradients = parameters * options.gradient_bytes
    weights = parameters * options.parameter_bytes
    first = holders[0]
    scatter = [inside_mesh_seconds(cluster, stage, gradients) for stage in holders]
    gather = [
        inside_mesh_seconds(cluster, stage, weights if first.distributed_optimizer else gradients)
        for stage in holders
    ]
    across, added = _exchange_seconds(cluster, holders, gradients), 0.0
    if len(holders) > 1:
        kinds = {cluster.kind(stage.kind).accelerator.name for stage in holders}
        added = max(profile.reduction_seconds(kind, parameters) for kind in kinds)
    if first.distributed_optimizer:
        return _overlapped([max(scatter), across]) + added, max(gather)
    return _overlapped([max(scatter), across, max(gather)]) + added, 0.0


def _exchange_seconds(cluster: Cluster, holders: Sequence[StageShape], size: float) -> float:
    """Each rank exchanges its shard of the gradients with the other meshes, over every NIC."""
    seconds = 0.0
    for stage in holders:
        kind = cluster.kind(stage.kind)
        shard = size / stage.data * ranks_per_rail(kind, stage.ranks)
        wires = [
            kind.rail if stage.kind == other.kind else cluster.rail(stage.kind, other.kind)
            for other in holders
            if other is not stage
        ]
        seconds = max(seconds, sum(wire.exchange_seconds(shard) for wire in wires))
    return seconds


def _overlapped(parts: Sequence[float]) -> float:
    longest = max(parts)
    return longest + (sum(parts) - longest) / _OVERLAPPED_CHUNKS


def tied_seconds(
    cluster: Cluster,
    first: StageShape,
    last: StageShape,
    *,
    model: ModelShape,
    options: TrainingOptions,
) -> float:
    """Adding up the gradients of an embedding that first and last stage both hold."""
    wire = cluster.rail(first.kind, last.kind)
    sizes = []
    for stage in (first, last):
        size = model.vocabulary * model.hidden * options.gradient_bytes / stage.tensor
        sizes.append(size * ranks_per_rail(cluster.kind(stage.kind), stage.ranks))
    return wire.seconds(max(sizes))
