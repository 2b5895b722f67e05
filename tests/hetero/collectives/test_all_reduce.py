"""What an all-reduce across vendors holds while it goes on."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from hetero.collectives.all_reduce import all_reduce
from hetero.collectives.layout import Layout, Member
from hetero.collectives.sizes import SIZES
from hetero.collectives.vendor_library import reduction_for
from hetero.link.ring_exchange import Message

SIZES_OF_CPUS = SIZES["cpu", False]
_, CHUNK_BYTES = SIZES_OF_CPUS.reduced_chunk


class Peer:
    """The other vendor's only rank, which has twos: what it sends is there at once."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat
        self.partials: list[Any] = []
        """Memory for what is to be added."""
        self.by_rank = {1: self}

    def start(self, messages: list[Message], *, tag: int) -> list[object]:
        for _, tensor, _, _, is_receive in messages:
            if is_receive and tensor._is_view():
                assert tensor._base is self._flat  # already reduced
                tensor.fill_(3.0)
            elif is_receive:
                tensor.fill_(2.0)
                assert tensor.nbytes == CHUNK_BYTES // 2
                self.partials.append(weakref.ref(tensor))
        return [object() for _ in messages]


def test_of_a_large_tensor_half_of_few_chunks_is_held_beside_it() -> None:
    members = tuple(Member(r, r, "host", vendor) for r, vendor in enumerate(("nvidia", "amd")))
    chunks, most = 12, 0
    flat = torch.ones(chunks * CHUNK_BYTES // 4)
    peer = Peer(flat)
    context: Any = SimpleNamespace(
        layout=Layout(members, 0),
        library=None,
        links=peer,
        ring=peer,
        device=flat.device,
        sizes=SIZES_OF_CPUS,
        tag=0,
        may_block=True,
    )
    for _ in all_reduce(context, flat, reduction_for(dist.ReduceOp.SUM, flat.dtype, size=2)):
        most = max(most, sum(partial() is not None for partial in peer.partials))
    assert len(peer.partials) == chunks
    assert most <= 3
    assert bool((flat == 3.0).all())
