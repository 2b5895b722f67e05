"""Opens a rank's links for every edge of the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from hetero.link.base import Link, LinkDescription
from hetero.link.gloo import GlooLink
from hetero.link.handshake import Rendezvous
from hetero.link.open import ChannelOptions, open_link
from hetero.pipeline.groups import create_group
from hetero.pipeline.reshard import End, ReshardedEdge
from hetero.pipeline.vendor_link import VendorLink
from hetero.plan import Edge, Plan
from hetero.plan.plan import layout_of
from hetero.startup.store import BoundedStore


@dataclass(frozen=True)
class LinkOptions:
    """How the links of one run are opened; the same on every rank but for the addresses."""

    boundary_transport: str
    """Between meshes: one of `hetero.link.TRANSPORTS`."""
    device: torch.device
    store: dist.Store
    secret: str
    """A secret of the job; the token of each link is derived from it."""
    timeout: float
    """Seconds before a blocked transfer is an error."""
    channel: ChannelOptions
    vendor_backend: str = "gloo"
    """Inside a mesh: `nccl`, which is RCCL on AMD, or `gloo`."""
    sequence: int = 0
    """Length of the pipeline's sequences, for stages that split them differently."""
    tensor_group: dist.ProcessGroup | None = None
    """This rank's tensor-parallel group, for stages whose tensor-parallel ranks hold the same."""
    has_exited: Callable[[int], bool] = lambda _: False
    """Returns whether a rank is known to have exited. Called from another thread; never blocks."""


_LEAST_RING_BYTES = 8 << 20
"""Of each link, where several share the memory of one."""

Neighbour = Link | ReshardedEdge


@dataclass(frozen=True)
class PipelineLinks:
    """The links of one rank, by neighbour: None at an end of the pipeline."""

    upstream: Neighbour | None
    downstream: Neighbour | None

    def choices(self) -> list[Link]:
        """This rank's downstream links whose path was chosen from a family; peers chose alike."""
        return [link for link in links_of(self.downstream) if link.passed_over is not None]

    def by_side(self) -> dict[str, list[Link]]:
        """The "upstream" and the "downstream" links."""
        sides = {"upstream": self.upstream, "downstream": self.downstream}
        return {name: links_of(neighbour) for name, neighbour in sides.items()}

    def all(self) -> list[Link]:
        return [link for links in self.by_side().values() for link in links]

    def boundary(self) -> list[Link]:
        """The links that cross from one mesh to another."""
        return [link for link in self.all() if link.description.is_boundary]

    def check(self) -> None:
        """Raise if a link has failed. Synchronize the device first for a final answer."""
        for link in self.all():
            link.check()

    def close(self) -> None:
        for link in self.all():
            link.close()


def links_of(neighbour: Neighbour | None) -> list[Link]:
    """The links to the ranks of a neighbouring stage."""
    if neighbour is None:
        return []
    return neighbour.links if isinstance(neighbour, ReshardedEdge) else [neighbour]


def open_links(plan: Plan, rank: int, options: LinkOptions) -> PipelineLinks:
    """Open the links of every edge of the plan. Collective over all ranks, with the same plan.

    Open them in the same order on all ranks (edge, source, target), or they deadlock.
    """
    here = plan.coordinate(rank).stage
    opener = _Opener(plan, rank, options)
    sides: dict[str, Neighbour | None] = {"upstream": None, "downstream": None}
    for edge in plan.edges():
        for side, stage in (("downstream", edge.source), ("upstream", edge.target)):
            if here == stage:
                sides[side] = opener.open_side(edge, side)
    return PipelineLinks(**sides)


class _Opener:
    """Opens the links of one rank."""

    def __init__(self, plan: Plan, rank: int, options: LinkOptions) -> None:
        self._plan, self._rank, self._options = plan, rank, options

    def open_side(self, edge: Edge, side: str) -> Neighbour:
        """Open this rank's links to the stage at the other end of an edge."""
        plan, is_source = self._plan, side == "downstream"
        stages = (edge.source, edge.target) if is_source else (edge.target, edge.source)
        ranks, peers = (plan.blocks_of_stage(stage)[0].ranks for stage in stages)
        place = ranks.index(self._rank)
        if _is_direct(plan, edge):
            return self._open_link(edge, side, peers[place], self._options.channel)
        own, other = (layout_of(plan, stage) for stage in stages)
        sequence = self._options.sequence
        end = End(own, other, place=place, sequence=sequence)
        links = {}
        for peer in end.peers():
            theirs = End(other, own, place=peer, sequence=sequence)
            # Split the memory of one link: neither end has more links than this.
            count = max(len(end.peers()), len(theirs.peers()))
            channel = self._options.channel
            ring = max(channel.ring_bytes // count, min(channel.ring_bytes, _LEAST_RING_BYTES))
            shared = replace(channel, ring_bytes=ring)
            links[peer] = self._open_link(edge, side, peers[peer], shared)
        return ReshardedEdge(end, links, tensor_group=self._options.tensor_group)

    def _open_link(self, edge: Edge, side: str, peer: int, channel: ChannelOptions) -> Link:
        link = self._open(edge, side, peer, channel)
        forward, backward = "activations", "gradients"
        if side == "downstream":
            link.record_messages(sends=forward, receives=backward)
        else:
            link.record_messages(sends=backward, receives=forward)
        return link

    def _open(self, edge: Edge, side: str, peer: int, channel: ChannelOptions) -> Link:
        options, is_source = self._options, side == "downstream"
        description = LinkDescription(
            rank=self._rank,
            peer=peer,
            stage=self._plan.coordinate(self._rank).stage,
            peer_stage=self._plan.coordinate(peer).stage,
            secret=options.secret,
            timeout=options.timeout,
            is_boundary=edge.is_boundary,
        )
        source, target = (self._rank, peer) if is_source else (peer, self._rank)
        transport = options.boundary_transport if edge.is_boundary else options.vendor_backend
        if transport == "nccl":  # inside a mesh
            groups = _vendor_groups(edge, sorted((source, target)), options.timeout)
            send_group, recv_group = groups if is_source else groups[::-1]
            return VendorLink(description, send_group=send_group, recv_group=recv_group)
        if transport == "gloo":
            # Two tags an edge, so that the two edges of an interleaved pipeline of two never meet.
            tags = (2 * edge.source + 1, 2 * edge.source + 2)
            send_tag, recv_tag = tags if is_source else tags[::-1]
            return GlooLink(description, send_tag=send_tag, recv_tag=recv_tag)
        rendezvous = Rendezvous(
            store=BoundedStore(options.store),
            description=description,
            name=f"edge {edge.source}/{source}-{target}",
            has_exited=partial(options.has_exited, peer),
        )
        return open_link(transport, rendezvous, options=channel, device=options.device)


def _is_direct(plan: Plan, edge: Edge) -> bool:
    """Whether each rank has one peer, and the two alone have the same part of the tensor.

    Inside a mesh, as in megatron-core, tensor-parallel ranks all send their equal copies.
    """
    source, target = (
        plan.meshes[plan.blocks_of_stage(stage)[0].mesh] for stage in (edge.source, edge.target)
    )
    shapes = {(mesh.tensor, mesh.context, mesh.data) for mesh in (source, target)}
    if len(shapes) > 1:
        return False
    splits = source.tensor == 1 or bool(source.sequence_parallel and target.sequence_parallel)
    return splits or not edge.is_boundary


def _vendor_groups(
    edge: Edge, pair: Sequence[int], timeout: float
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """A communicator for each direction between the two ranks of an edge, forward and backward.

    Only these two create them, in the order of the edges.
    """
    forward, backward = (
        create_group(
            f"edge {edge.source} {way} {pair[0]}-{pair[1]}",
            pair,
            backend="nccl",
            timeout=timedelta(seconds=timeout),
        )
        for way in ("forward", "backward")
    )
    return forward, backward
