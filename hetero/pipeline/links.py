"""Opens the links of one rank: which peer, and which transport, for every edge of the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from hetero.groups import rank_sets
from hetero.plan import Coordinate, Edge, Plan
from hetero.transport.base import Link, LinkDescription
from hetero.transport.gloo import GlooLink
from hetero.transport.vendor import VendorLink

BOUNDARY_TRANSPORTS = ("gloo", "nccl")


@dataclass(frozen=True)
class PipelineLinks:
    """The links of one rank, by the neighbour they lead to. None at an end of the pipeline."""

    upstream: Link | None
    downstream: Link | None
    is_boundary: Mapping[str, bool]
    """Whether the "upstream" and the "downstream" neighbour belong to another mesh."""

    def all(self) -> list[Link]:
        return [link for link in (self.upstream, self.downstream) if link is not None]

    def boundary(self) -> list[Link]:
        """The links that cross from one mesh to another."""
        sides = (("upstream", self.upstream), ("downstream", self.downstream))
        return [link for side, link in sides if link is not None and self.is_boundary[side]]

    def close(self) -> None:
        for link in self.all():
            link.close()


def edge_transport(edge: Edge, *, boundary_transport: str, device_type: str) -> str:
    """Inside a mesh the vendor's library; across a boundary what `--hetero-transport` says."""
    if edge.is_boundary:
        return boundary_transport
    return "nccl" if device_type == "cuda" else "gloo"


def open_links(
    plan: Plan,
    rank: int,
    *,
    boundary_transport: str,
    device: torch.device,
    job: str,
    timeout: float,
) -> PipelineLinks:
    """Open the links of every edge of the plan. Collective: every rank calls it with one plan."""
    here = plan.coordinate(rank)
    upstream = downstream = None
    boundaries = {"upstream": False, "downstream": False}
    for edge in plan.edges():
        transport = edge_transport(
            edge, boundary_transport=boundary_transport, device_type=device.type
        )
        groups = _direction_groups(plan, edge, rank, timeout) if transport == "nccl" else None
        for side, stage, other in (
            ("downstream", edge.source, edge.target),
            ("upstream", edge.target, edge.source),
        ):
            if here.stage != stage:
                continue
            description = LinkDescription(
                rank=rank,
                peer=_peer(plan, here, other),
                stage=stage,
                peer_stage=other,
                job=job,
                timeout=timeout,
            )
            link = _open(description, edge, side=side, groups=groups)
            boundaries[side] = edge.is_boundary
            if side == "downstream":
                downstream = link
            else:
                upstream = link
    return PipelineLinks(upstream=upstream, downstream=downstream, is_boundary=boundaries)


def _peer(plan: Plan, here: Coordinate, stage: int) -> int:
    return plan.rank_at(stage, data=here.data, context=here.context, tensor=here.tensor)


def _open(
    description: LinkDescription,
    edge: Edge,
    *,
    side: str,
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None,
) -> Link:
    if groups is not None:
        forward, backward = groups
        send, recv = (forward, backward) if side == "downstream" else (backward, forward)
        return VendorLink(description, send_group=send, recv_group=recv)
    # Two tags an edge, so that the two edges of an interleaved pipeline of two never meet.
    forward_tag, backward_tag = 2 * edge.index + 1, 2 * edge.index + 2
    if side == "downstream":
        return GlooLink(description, send_tag=forward_tag, recv_tag=backward_tag)
    return GlooLink(description, send_tag=backward_tag, recv_tag=forward_tag)


def _direction_groups(
    plan: Plan, edge: Edge, rank: int, timeout: float
) -> tuple[dist.ProcessGroup, dist.ProcessGroup] | None:
    """Two communicators, one for each direction, for this rank's pair on the edge."""
    mine = None
    lines = rank_sets(plan, lambda c: (c.data, c.context, c.tensor))
    for line in lines:
        pair = [line[edge.source], line[edge.target]]
        forward, backward = (
            dist.new_group(pair, backend="nccl", timeout=timedelta(seconds=timeout))
            for _ in range(2)
        )
        if rank in pair:
            mine = (forward, backward)
    return mine
