"""What a collective across vendors holds while it goes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from hetero.collectives.all_reduce import CHUNK_BYTES, CHUNKS_AHEAD, all_reduce
from hetero.collectives.group_links import Message
from hetero.collectives.reductions import reduction_for
from hetero.collectives.row_collectives import reduce_scatter
from hetero.collectives.vendor_layout import Layout, Member

CHUNKS = 12


class Peer:
    """The other vendor's only rank: what it sends is there at once, and links keep what they use.

    So does a link to a GPU, whose CPU enqueues many chunks before the first has been received.
    """

    def __init__(self) -> None:
        self.used: list[torch.Tensor] = []
        self.buffers: set[int] = set()

    def to(self, rank: int) -> Peer:
        return self

    def start(self, messages: list[Message], *, tag: int) -> list[object]:
        for _, tensor, _, _, is_receive in messages:
            self.used.append(tensor)
            if is_receive:
                tensor.fill_(2.0)
                self.buffers.add(tensor.data_ptr())
        return [object() for _ in messages]


def context_of(peer: Peer) -> Any:
    members = tuple(Member(r, r, "host", vendor) for r, vendor in enumerate(("nvidia", "amd")))
    return SimpleNamespace(
        layout=Layout(members, 0), library=None, links=peer, ring=peer, tag=0, may_block=True
    )


def test_of_a_large_tensor_a_few_chunks_of_the_other_vendor_take_memory() -> None:
    peer = Peer()
    flat = torch.ones(CHUNKS * CHUNK_BYTES // 4 - 5)
    reduction = reduction_for(dist.ReduceOp.SUM, flat.dtype, size=2)
    for _ in all_reduce(context_of(peer), flat, reduction):
        pass
    assert len(peer.used) == 2 * CHUNKS
    assert len(peer.buffers) == 1 + CHUNKS_AHEAD["cpu"]
    assert bool((flat == 3.0).all())


def test_so_they_do_in_a_reduce_scatter() -> None:
    peer = Peer()
    result = torch.empty(CHUNKS * CHUNK_BYTES // 4 - 5)
    flat = torch.ones(2 * len(result))
    reduction = reduction_for(dist.ReduceOp.SUM, flat.dtype, size=2)
    for _ in reduce_scatter(context_of(peer), result, flat, reduction):
        pass
    assert len(peer.used) == 2 * CHUNKS
    assert len(peer.buffers) == 1 + CHUNKS_AHEAD["cpu"]
    assert bool((result == 3.0).all())
