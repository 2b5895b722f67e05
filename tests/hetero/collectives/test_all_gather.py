"""What an all-gather across vendors asks of the vendor's library, and what it sends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero.collectives.all_gather import all_gather
from hetero.collectives.group_links import Message
from hetero.collectives.memory_segments import split_segments
from hetero.collectives.p2p_batch import CallContext
from hetero.collectives.vendor_layout import Layout, Member

ROW_BYTES = 12 << 20
"""So large that a table of rows is above what is small everywhere."""


class Library:
    """Counts its operations."""

    def __init__(self) -> None:
        self.gathered: list[int] = []
        """Bytes of what each operation has gathered."""

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Any:
        self.gathered.append(output.nbytes)
        return SimpleNamespace(wait=lambda: None)


class Ring:
    """Keeps the messages that are asked for."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def order(self, messages: list[Message], **_: int) -> list[object]:
        self.messages += messages
        return []

    start = order


@pytest.mark.parametrize(
    ("vendors", "hosts", "gathered", "sent"),
    [
        ("nnaa", 1, [2], [(2, 2)]),
        ("nana", 1, [2], [(1, 2)]),
        ("nnaacc", 1, [2], [(2, 2), (4, 2)]),
        ("nnaa", 2, [2, 2], [(2, 1)]),
        ("nnnaaa", 2, [3, 3], [(3, 1)]),
        ("nnaaaa", 1, [2], [(2, 2), (3, 2)]),
        ("naaa", 1, [], [(1, 1), (2, 1), (3, 1)]),
        ("nnaaaa", 2, [2, 4], [(2, 0.5), (3, 0.5)]),
    ],
)
def test_on_one_host_the_vendor_gathers_once_and_sends_all_that_it_has(
    vendors: str, hosts: int, gathered: list[int], sent: list[tuple[int, float]]
) -> None:
    """Between hosts its ranks send shards, which the receiving vendor gathers too.

    `gathered` and `sent` count rows; the latter with the peer.
    """
    size = len(vendors)
    members = tuple(
        Member(rank, rank, f"host{rank * hosts // size}", vendor)
        for rank, vendor in enumerate(vendors)
    )
    links: Any = SimpleNamespace(by_rank=dict(enumerate(range(size))))
    library: Any = Library() if len(Layout(members, 0).vendor_ranks) > 1 else None
    gpu = torch.device("cuda")
    context = CallContext(layout=Layout(members, 0), library=library, links=links, device=gpu)
    ring: Any = Ring()
    context.ring = ring

    table = torch.empty(size * ROW_BYTES, dtype=torch.uint8)
    rows = split_segments(table, [ROW_BYTES] * size)
    for batch in all_gather(context, rows, table[:ROW_BYTES], table=table):
        batch.wait()

    operations = library.gathered if library else []
    assert sorted(nbytes / ROW_BYTES for nbytes in operations) == gathered
    assert [
        (peer, nbytes / ROW_BYTES)
        for peer, _, _, nbytes, is_receive in ring.messages
        if not is_receive
    ] == sent
