"""What an all-reduce across vendors holds while it goes on."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from hetero.collectives.all_reduce import CHUNK_BYTES, all_reduce
from hetero.collectives.group_links import Message
from hetero.collectives.reductions import reduction_for
from hetero.collectives.vendor_layout import Layout, Member


class Peer:
    """The other vendor's only rank: what it sends is there at once."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    def to(self, rank: int) -> Peer:
        return self

    def start(self, messages: list[Message], *, tag: int) -> list[object]:
        for _, tensor, _, _, is_receive in messages:
            if is_receive:
                tensor.fill_(2.0)
                self.received.append(weakref.ref(tensor.untyped_storage()))
        return [object() for _ in messages]


def test_of_a_large_tensor_the_other_vendors_part_is_held_chunk_by_chunk() -> None:
    members = tuple(Member(r, r, "host", vendor) for r, vendor in enumerate(("nvidia", "amd")))
    peer, chunks = Peer(), 12
    context: Any = SimpleNamespace(
        layout=Layout(members, 0), library=None, links=peer, ring=peer, tag=0, may_block=True
    )
    flat = torch.ones(chunks * CHUNK_BYTES // 4)
    most = 0
    schedule = all_reduce(context, flat, reduction_for(dist.ReduceOp.SUM, flat.dtype, size=2))
    for _ in schedule:
        most = max(most, sum(storage() is not None for storage in peer.received))
    assert len(peer.received) == chunks
    assert most <= 4
    assert bool((flat == 3.0).all())
