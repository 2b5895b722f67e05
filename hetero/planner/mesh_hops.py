"""Transfers between the stages of one mesh, as a search sees them: by the number of stages."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from hetero.planner.cluster_shape import Cluster, NodeKind
from hetero.planner.communication_costs import edge_costs, stage_rails
from hetero.planner.layer_split import FloatArray, IntArray
from hetero.planner.model_shape import ModelShape
from hetero.planner.stage_shape import StageShape
from hetero.planner.training_options import TrainingOptions


@dataclass(frozen=True, eq=False)
class MeshHops:
    """Of each stage but the last of a mesh's most stages, the transfer to the next one."""

    seconds: FloatArray
    """Latency included."""
    link_seconds: FloatArray
    """How long it occupies the link."""
    is_same_node: IntArray
    """1 where it uses no NIC."""
    rail_groups: IntArray
    """A number for each stage; stages that share a NIC have the same."""


def mesh_hops(
    cluster: Cluster,
    stage: StageShape,
    *,
    stages: int,
    model: ModelShape,
    options: TrainingOptions,
) -> MeshHops:
    """The transfers of a mesh of equal stages, which begins at the first GPU of a node."""
    kind = cluster.kind(stage.kind)
    size, ranks = kind.gpus_per_node, stage.ranks
    first = np.arange(stages - 1) * ranks
    is_same_node = first // size == (first + 2 * ranks - 1) // size

    def hop(first_gpu: int) -> tuple[float, float]:
        target = replace(stage, first_gpu=first_gpu)
        edge = edge_costs(cluster, stage, target, model=model, options=options)
        return edge.occupancy + edge.latency, edge.occupancy

    other_node = hop(size * 2**20)
    same_node = hop(ranks) if 2 * ranks <= size else other_node
    seconds, link_seconds = np.where(
        is_same_node, np.array(same_node)[:, None], np.array(other_node)[:, None]
    )
    groups = _rail_groups(cluster, kind, stage, stages)
    return MeshHops(seconds, link_seconds, is_same_node.astype(np.int64), groups)


def _rail_groups(cluster: Cluster, kind: NodeKind, stage: StageShape, stages: int) -> IntArray:
    if kind.rails >= kind.gpus_per_node:
        return np.arange(stages)
    rails = [stage_rails(cluster, replace(stage, first_gpu=n * stage.ranks)) for n in range(stages)]
    is_apart = [one.stop <= other.start for one, other in itertools.pairwise(rails)]
    return np.cumsum([0, *is_apart])


def busiest_rails(
    link_seconds: FloatArray, is_same_node: IntArray, rail_groups: IntArray
) -> FloatArray:
    """Of each edge of a pipeline, how long the busiest NIC of its ends sends for a micro-batch.

    A stage between two others sends an activation to one and a gradient to the other. An edge
    inside a node keeps its own seconds.
    """
    sent = np.where(is_same_node, 0.0, link_seconds)
    before, behind = rail_groups[:-1], rail_groups[1:]
    stages = len(rail_groups)
    busy = np.bincount(before, weights=sent, minlength=stages)
    busy += np.bincount(behind, weights=sent, minlength=stages)
    return np.where(is_same_node, link_seconds, np.maximum(busy[before], busy[behind]))
