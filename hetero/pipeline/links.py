"""Opens the links of one rank: which peer, and which transport, for every edge of the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from hetero.link.base import Link, LinkDescription
from hetero.link.handshake import Rendezvous
from hetero.link.names import FAMILIES
from hetero.link.open import ChannelOptions, Choice, open_link
from hetero.link.torch_links import GlooLink, VendorLink
from hetero.new_group import create_group
from hetero.plan import Coordinate, Edge, Plan
from hetero.store import Store


@dataclass(frozen=True)
class LinkOptions:
    """How the links of one run are opened; the same on every rank but for the addresses."""

    boundary_transport: str
    """What crosses from mesh to mesh: one of TRANSPORTS."""
    device: torch.device
    store: Store
    job: str
    """A name that only members of the job know; the token of each link follows from it."""
    timeout: float
    """Seconds before a blocked transfer is an error."""
    channel: ChannelOptions


@dataclass(frozen=True)
class PipelineLinks:
    """The links of one rank, by the neighbour they lead to. None at an end of the pipeline."""

    upstream: Link | None
    downstream: Link | None
    is_boundary: Mapping[str, bool]
    """Whether the "upstream" and the "downstream" neighbour belong to another mesh."""
    choices: tuple[Choice, ...] = ()
    """What `auto` chose for this rank's downstream link, and why; the peer chose alike."""

    def all(self) -> list[Link]:
        return [link for link in (self.upstream, self.downstream) if link is not None]

    def boundary(self) -> list[Link]:
        """The links that cross from one mesh to another."""
        sides = (("upstream", self.upstream), ("downstream", self.downstream))
        return [link for side, link in sides if link is not None and self.is_boundary[side]]

    def check(self) -> None:
        """Raise if a link has failed. Waiting for the device first makes the answer final."""
        for link in self.all():
            link.check()

    def close(self) -> None:
        for link in self.all():
            link.close()


def edge_transport(edge: Edge, *, boundary_transport: str, device_type: str) -> str:
    """Inside a mesh the vendor's library; across a boundary what `--hetero-transport` says."""
    if edge.is_boundary:
        return boundary_transport
    return "nccl" if device_type == "cuda" else "gloo"


def open_links(plan: Plan, rank: int, options: LinkOptions) -> PipelineLinks:
    """Open the links of every edge of the plan. Collective: every rank calls it with one plan."""
    here = plan.coordinate(rank)
    links: dict[str, Link | None] = {"upstream": None, "downstream": None}
    boundaries = {"upstream": False, "downstream": False}
    choices: list[Choice] = []
    for edge in plan.edges():
        transport = edge_transport(
            edge,
            boundary_transport=options.boundary_transport,
            device_type=options.device.type,
        )
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
                job=options.job,
                timeout=options.timeout,
            )
            boundaries[side] = edge.is_boundary
            if transport == "nccl":
                groups = _direction_groups(description, edge, options.timeout)
                links[side] = _open_vendor(description, side, groups)
            elif transport == "gloo":
                links[side] = _open_gloo(description, side, edge)
            else:
                choice = open_link(
                    transport,
                    _rendezvous(description, side, edge, options),
                    options=options.channel,
                    device=options.device,
                    last_resort=partial(_open_gloo, description, side, edge),
                )
                links[side] = choice.link
                if side == "downstream" and transport in FAMILIES:
                    choices.append(choice)
    return PipelineLinks(
        upstream=links["upstream"],
        downstream=links["downstream"],
        is_boundary=boundaries,
        choices=tuple(choices),
    )


def _peer(plan: Plan, here: Coordinate, stage: int) -> int:
    return plan.rank_at(stage, data=here.data, context=here.context, tensor=here.tensor)


def _open_vendor(
    description: LinkDescription,
    side: str,
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
) -> Link:
    forward, backward = groups
    send, recv = (forward, backward) if side == "downstream" else (backward, forward)
    return VendorLink(description, send_group=send, recv_group=recv)


def _open_gloo(description: LinkDescription, side: str, edge: Edge) -> Link:
    # Two tags an edge, so that the two edges of an interleaved pipeline of two never meet.
    forward_tag, backward_tag = 2 * edge.index + 1, 2 * edge.index + 2
    if side == "downstream":
        return GlooLink(description, send_tag=forward_tag, recv_tag=backward_tag)
    return GlooLink(description, send_tag=backward_tag, recv_tag=forward_tag)


def _rendezvous(
    description: LinkDescription, side: str, edge: Edge, options: LinkOptions
) -> Rendezvous:
    source, target = description.rank, description.peer
    if side == "upstream":
        source, target = target, source
    return Rendezvous(
        store=options.store,
        description=description,
        name=f"edge {edge.index}/{source}-{target}",
        listens=side == "downstream",
        secret=options.job.encode(),
    )


def _direction_groups(
    description: LinkDescription, edge: Edge, timeout: float
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Two communicators, one for each direction, for this rank's pair on the edge.

    Both ends create them, and no others; edges come in one order on all ranks.
    """
    pair = sorted((description.rank, description.peer))
    forward, backward = (
        create_group(
            f"edge {edge.index} {way} {pair[0]}-{pair[1]}",
            pair,
            backend="nccl",
            timeout=timedelta(seconds=timeout),
        )
        for way in ("forward", "backward")
    )
    return forward, backward
