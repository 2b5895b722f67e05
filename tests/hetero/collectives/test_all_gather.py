"""What an all-gather across vendors asks of the vendor's library, and what it sends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero.collectives.all_gather import all_gather
from hetero.collectives.layout import Layout, Member, split_segments
from hetero.collectives.schedule import CallContext
from hetero.link.ring_exchange import Message

ROW_BYTES = 1 << 20
"""So large that a table of rows goes in shards between hosts, and so small that in one chunk."""


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
    ("device", "vendors", "hosts", "gathered", "sent"),
    [
        ("cpu", "nnaa", 1, [2], [(2, 2)]),
        ("cpu", "nana", 1, [2], [(1, 2)]),
        ("cpu", "nnaacc", 1, [2], [(2, 2), (4, 2)]),
        ("cpu", "nnaaaa", 1, [2], [(2, 2), (3, 2)]),
        ("cpu", "naaa", 1, [], [(1, 1), (2, 1), (3, 1)]),
        ("cpu", "nnaa", 2, [2, 2], [(2, 1)]),
        ("cuda", "nnaa", 1, [2, 2], [(2, 1)]),
        ("cuda", "nnaa", 2, [2, 2], [(2, 1)]),
        ("cuda", "nnnaaa", 2, [3, 3], [(3, 1)]),
        ("cuda", "nnaaaa", 2, [2, 4], [(2, 0.5), (3, 0.5)]),
    ],
)
def test_cpus_of_one_host_gather_once_within_the_vendor_and_send_all_that_they_have(
    device: str, vendors: str, hosts: int, gathered: list[int], sent: list[tuple[int, float]]
) -> None:
    """Elsewhere ranks send shards, which the receiving vendor gathers too.

    `gathered` and `sent` count rows; the latter with the peer.
    """
    size = len(vendors)
    members = tuple(
        Member(rank, rank, f"host{rank * hosts // size}", vendor)
        for rank, vendor in enumerate(vendors)
    )
    links: Any = SimpleNamespace(by_rank=dict(enumerate(range(size))))
    library: Any = Library() if len(Layout(members, 0).vendor_ranks) > 1 else None
    context = CallContext(
        layout=Layout(members, 0), library=library, links=links, device=torch.device(device)
    )
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
