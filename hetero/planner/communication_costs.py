"""Times of communication: transfers between stages, gradient reduction between replicas.

A transfer between nodes uses all NICs at once; GPUs that share a NIC share its bandwidth. That is
the only contention modelled here: contention between transfers is left to the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetero.planner.cluster_shape import Cluster, LinkModel, NodeKind
from hetero.planner.layer_profile import Profile
from hetero.planner.model_shape import ModelShape
from hetero.planner.stage_shape import StageShape
from hetero.planner.training_options import TrainingOptions

NCCL_BUFFER_BYTES = 4 * 2**20
"""NCCL's default buffer between two GPUs (NCCL_BUFFSIZE)."""
_PIPELINE_CHUNKS = 4
"""Chunks in which a reduction across vendors pipelines its intra- and inter-vendor steps."""


@dataclass(frozen=True)
class EdgeCosts:
    """Seconds of transferring one micro-batch's activation, or its gradient, between two stages."""

    occupancy: float
    """How long the transfer occupies the link."""
    latency: float
    """How much later it arrives."""
    gather_after: float
    """All-gather of a sharded activation on the later stage."""
    gather_before: float
    """All-gather of a sharded gradient on the earlier stage."""
    is_buffered: bool
    """Whether the message fits NCCL's buffer, so that the sender does not wait for the receiver."""


def edge_costs(
    cluster: Cluster,
    source: StageShape,
    target: StageShape,
    *,
    model: ModelShape,
    options: TrainingOptions,
) -> EdgeCosts:
    """Costs of an edge of the pipeline.

    Inside a mesh each rank sends what it holds; between meshes each element is sent once.
    """
    size, other = (_held_bytes(stage, model, options) for stage in (source, target))
    shapes = {(one.kind, one.tensor, one.context, one.data) for one in (source, target)}
    is_boundary = len(shapes) > 1
    is_gathered = is_boundary or options.deepspeed_transfers
    is_sharded = is_gathered or source.sequence_parallel
    sent = size / source.tensor if is_sharded else size
    received = other / target.tensor if is_sharded else size
    gather_after = gather_before = 0.0
    if is_gathered:
        gather_after = _all_gather_seconds(cluster.kind(target.kind), target, other)
        gather_before = _all_gather_seconds(cluster.kind(source.kind), source, size)
    links, moved = _ends(cluster, source, target), (sent, received)
    latencies = [0.0 if link.measured else link.latency for link, _ in links]
    occupancy = max(
        link.seconds(size * ranks) - latency
        for (link, ranks), size, latency in zip(links, moved, latencies, strict=True)
    )
    is_buffered = max(moved) <= NCCL_BUFFER_BYTES
    return EdgeCosts(occupancy, max(latencies), gather_after, gather_before, is_buffered)


def boundary_seconds(
    cluster: Cluster, stage: StageShape, *, model: ModelShape, options: TrainingOptions
) -> float:
    """The least that a transfer to another kind of nodes occupies this end; 0 without another."""
    size = _held_bytes(stage, model, options) / stage.tensor * _sharing_ranks(cluster, stage)
    rails = [cluster.rail(stage.kind, one.name) for one in cluster.kinds if one.name != stage.kind]
    return min(
        (rail.seconds(size) - (0.0 if rail.measured else rail.latency) for rail in rails),
        default=0.0,
    )


def _held_bytes(stage: StageShape, model: ModelShape, options: TrainingOptions) -> float:
    """The hidden state of one micro-batch in the rows that a tensor-parallel group holds."""
    return model.boundary_bytes(stage.micro_batch, options.activation_bytes) / stage.context


def _ends(
    cluster: Cluster, source: StageShape, target: StageShape
) -> tuple[tuple[LinkModel, float], tuple[LinkModel, float]]:
    """For both ends of a transfer: the link that a rank uses, and how many ranks share it."""
    if on_same_node(cluster, source, target):
        link = cluster.kind(source.kind).intra_node.within(2)
        return (link, 1), (link, 1)
    return (
        (cluster.rail(source.kind, target.kind), _sharing_ranks(cluster, source)),
        (cluster.rail(target.kind, source.kind), _sharing_ranks(cluster, target)),
    )


def _sharing_ranks(cluster: Cluster, stage: StageShape) -> float:
    return ranks_per_rail(cluster.kind(stage.kind), stage.ranks)


def on_same_node(cluster: Cluster, one: StageShape, other: StageShape) -> bool:
    """Whether all ranks of two stages are on one node."""
    if one.kind != other.kind:
        return False
    size = cluster.kind(one.kind).gpus_per_node
    gpus = [
        gpu
        for stage in (one, other)
        for gpu in (stage.first_gpu, stage.first_gpu + stage.ranks - 1)
    ]
    return len({gpu // size for gpu in gpus}) == 1


def ranks_per_rail(kind: NodeKind, ranks: int) -> float:
    """How many of `ranks` consecutive GPUs share the busiest NIC of a node.

    A part of one where each GPU has several NICs, over which it divides what it sends.
    """
    if kind.rails > kind.gpus_per_node:
        return 1 / (kind.rails // kind.gpus_per_node)
    return min(ranks, math.ceil(kind.gpus_per_node / kind.rails))


def stage_rails(cluster: Cluster, stage: StageShape) -> range:
    """The NICs that a stage uses, numbered over all nodes of its kind."""
    kind = cluster.kind(stage.kind)

    def rail(gpu: int) -> int:
        node, local_rank = divmod(gpu, kind.gpus_per_node)
        return node * kind.rails + local_rank * kind.rails // kind.gpus_per_node

    return range(rail(stage.first_gpu), rail(stage.first_gpu + stage.ranks - 1) + 1)


def _all_gather_seconds(kind: NodeKind, stage: StageShape, size: float) -> float:
    if stage.tensor == 1 or stage.sequence_parallel:
        return 0.0
    return ring_seconds(kind.intra_node, ranks=stage.tensor, size=size)


def ring_seconds(link: LinkModel, *, ranks: int, size: float) -> float:
    """A ring reduce-scatter or all-gather of `size` bytes, inside a node.

    Where each pair has a link of its own, as many rings as there are other ranks share the bytes.
    """
    if ranks < 2:
        return 0.0
    return (ranks - 1) * link.within(ranks).seconds(size / ranks)


def intra_mesh_seconds(cluster: Cluster, stage: StageShape, size: float) -> float:
    """A reduce-scatter or all-gather of `size` bytes a rank over the copies of a stage's weights.

    All tensor-parallel ranks run theirs at once and share the NICs of their GPUs; the node with the
    fewest of them is the slowest. Between nodes, latency is that of a tree.
    """
    kind, copies = cluster.kind(stage.kind), stage.copies
    if copies < 2:
        return 0.0
    ranks = _ranks_on_nodes(kind, stage)
    if len(ranks) == 1:
        return ring_seconds(kind.intra_node, ranks=copies, size=size)
    # Slices of experts may lie on several nodes: then a node has some of them, once.
    slices = min(stage.tensor, max(ranks))
    ranks_per_nic = slices / max(1, min(ranks) * kind.rails // kind.gpus_per_node)
    moved_bytes = (copies - 1) / copies * size
    slowest = max(
        moved_bytes / kind.intra_node.within(max(ranks) // slices).bandwidth,
        kind.rail.exchange_seconds(moved_bytes * ranks_per_nic),
    )
    return (
        slowest
        + kind.rail.latency * math.log2(len(ranks))
        + kind.intra_node.latency * (max(ranks) // slices - 1)
    )


def gather_seconds(cluster: Cluster, stage: StageShape, *, ranks: int, size: float) -> float:
    """A reduce-scatter or all-gather of `size` bytes in all over consecutive ranks of a stage.

    Where they are on one node, every other such group of the node runs its own over its own links.
    """
    return intra_mesh_seconds(cluster, replace(stage, tensor=1, context=1, data=ranks), size)


def all_to_all_seconds(cluster: Cluster, stage: StageShape, size: float) -> float:
    """Each rank sends `size` bytes, an equal part to each rank that holds other experts, itself
    included, all at once.

    Of ranks on several nodes, those of a node share its NICs.
    """
    kind, peers = cluster.kind(stage.kind), stage.experts
    if peers < 2:
        return 0.0
    group = stage.ranks_of_experts
    ranks = _ranks_on_nodes(kind, replace(stage, tensor=1, context=1, data=group))
    near = max(max(ranks) * peers // group, 1)
    inside = kind.intra_node.within(near).seconds(size * (near - 1) / peers)
    if len(ranks) == 1:
        return inside
    outside = size * (1 - min(ranks) / group)
    return max(inside, kind.rail.exchange_seconds(outside * ranks_per_rail(kind, max(ranks))))


def next_rank_seconds(cluster: Cluster, stage: StageShape, size: float) -> float:
    """Each rank of the context-parallel groups sends `size` bytes to the next, all at once.

    Inside a node from GPU to GPU, over one link. Of a group on several nodes, the last
    tensor-parallel group of each node sends over the NICs of its GPUs.
    """
    kind, group = cluster.kind(stage.kind), stage.tensor * stage.context
    seconds = kind.intra_node.within(2).seconds(size)
    is_aligned = kind.gpus_per_node % group == 0 and stage.first_gpu % group == 0
    if is_aligned or len(_ranks_on_nodes(kind, stage)) == 1:
        return seconds
    return max(seconds, kind.rail.exchange_seconds(size * ranks_per_rail(kind, stage.tensor)))


def _ranks_on_nodes(kind: NodeKind, stage: StageShape) -> list[int]:
    """How many of a stage's ranks are on each of its nodes."""
    size, first, end = kind.gpus_per_node, stage.first_gpu, stage.first_gpu + stage.ranks
    return [
        min(end, (node + 1) * size) - max(first, node * size)
        for node in range(first // size, (end - 1) // size + 1)
    ]


def reduce_and_gather_seconds(
    cluster: Cluster,
    dp_group: Sequence[StageShape],
    *,
    parameters: float,
    profile: Profile,
    options: TrainingOptions,
) -> tuple[float, float]:
    """Seconds of reducing a stage's gradients, and of all-gathering its updated weights.

    `dp_group` is the stage as each mesh that holds it sees it; `parameters` are those of one rank.
    Without a distributed optimizer the gradients are all-gathered instead of the weights, as part
    of the reduction. Inside a vendor the arithmetic is hidden behind the transfers.
    """
    gradients = parameters * options.gradient_bytes
    weights = parameters * options.parameter_bytes
    is_distributed = dp_group[0].distributed_optimizer
    scatter = max(intra_mesh_seconds(cluster, stage, gradients) for stage in dp_group)
    gather = max(
        intra_mesh_seconds(cluster, stage, weights if is_distributed else gradients)
        for stage in dp_group
    )
    cross_mesh, arithmetic = _cross_mesh_seconds(cluster, dp_group, gradients), 0.0
    if len(dp_group) > 1:
        kinds = {cluster.kind(stage.kind).accelerator.name for stage in dp_group}
        arithmetic = max(profile.reduction_seconds(kind, parameters) for kind in kinds)
    # What follows each other over the same links adds up.
    inside = scatter if is_distributed else scatter + gather
    if any(len(_ranks_on_nodes(cluster.kind(stage.kind), stage)) > 1 for stage in dp_group):
        reduce = inside + cross_mesh
    else:
        longer, shorter = max(inside, cross_mesh), min(inside, cross_mesh)
        reduce = longer + shorter / _PIPELINE_CHUNKS
    return reduce + arithmetic, gather if is_distributed else 0.0


def stage_reduction_seconds(
    cluster: Cluster,
    dp_group: Sequence[StageShape],
    *,
    shared: float,
    experts: float,
    profile: Profile,
    options: TrainingOptions,
) -> tuple[float, float]:
    """`reduce_and_gather_seconds` of all parameters of one rank: `experts` of them are reduced
    over the ranks with the same experts, after the `shared` ones over theirs."""
    reduce, gather = reduce_and_gather_seconds(
        cluster, dp_group, parameters=shared, profile=profile, options=options
    )
    if not experts:
        return reduce, gather
    more_reduce, more_gather = reduce_and_gather_seconds(
        cluster,
        [stage.of_experts() for stage in dp_group],
        parameters=experts,
        profile=profile,
        options=options,
    )
    return reduce + more_reduce, gather + more_gather


def _cross_mesh_seconds(cluster: Cluster, dp_group: Sequence[StageShape], size: float) -> float:
    """Each rank exchanges its gradient shard with every other mesh, using all NICs."""
    seconds = 0.0
    for stage in dp_group:
        kind = cluster.kind(stage.kind)
        shard = size / stage.copies * ranks_per_rail(kind, stage.ranks)
        links = [cluster.rail(stage.kind, other.kind) for other in dp_group if other is not stage]
        seconds = max(seconds, sum(link.exchange_seconds(shard) for link in links))
    return seconds


def tied_embedding_seconds(
    cluster: Cluster,
    first: StageShape,
    last: StageShape,
    *,
    model: ModelShape,
    options: TrainingOptions,
) -> float:
    """Summing the gradients of an embedding of which the last stage has a copy."""
    gradient = model.copied_parameters * options.gradient_bytes
    ends = zip((first, last), _ends(cluster, first, last), strict=True)
    return max(
        link.exchange_seconds(gradient / stage.tensor * ranks) for stage, (link, ranks) in ends
    )
