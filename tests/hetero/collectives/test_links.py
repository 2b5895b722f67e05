"""The links of one group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from hetero.collectives.layout import Layout
from hetero.collectives.links import Links
from hetero.errors import LinkError
from tests.forked_ranks import values
from tests.hetero.collectives.ranks import Side, run_ranks
from tests.hetero.collectives.test_p2p import MEMBERS
from tests.hetero.link.ring.pair import opened


def test_a_link_that_opens_while_its_group_ends_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links(
        layout=Layout(MEMBERS, 0),
        store=dist.HashStore(),
        device=torch.device("cpu"),
        timeout=1.0,
        check_abort=lambda _: None,
        has_exited=lambda _: False,
    )
    with opened() as pair:

        def open_late(*_: Any) -> Any:
            links.close()
            return pair.sender

        monkeypatch.setattr(links, "_open", open_late)
        with pytest.raises(LinkError, match="the link is closed"):
            links.to(1).send(torch.ones(1)).wait()


def test_links_may_open_while_a_script_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group's thread opens them, and training counts their bytes after every step."""
    layout = Layout(MEMBERS, 0)
    links = Links(
        layout=layout,
        store=dist.HashStore(),
        device=torch.device("cpu"),
        timeout=1.0,
        check_abort=lambda _: None,
        has_exited=lambda _: False,
    )
    with opened() as pair:
        monkeypatch.setattr(links, "_open", lambda *_: pair.sender)
        links.to(1)
        vendor_of = Layout.vendor_of

        def opening(layout: Layout, rank: int) -> int:
            links.to(0)
            return vendor_of(layout, rank)

        assert layout.vendor == 0
        monkeypatch.setattr(Layout, "vendor_of", opening)
        assert links.inter_vendor() == [pair.sender]


def test_a_group_has_one_connection_to_its_store_whatever_it_opens() -> None:
    """PyTorch looks up names for each, which takes seconds where a resolver does not answer."""
    for counts in values(run_ranks(count_connections, ("nvidia", "amd", "amd"), backend=None)):
        assert counts == {"of the store": 1, "of a group": 1, "of its calls and messages": 0}


def count_connections(side: Side) -> dict[str, int]:
    port = int(side.store.get("port")) if side.rank > 0 else 0
    store = dist.TCPStore("127.0.0.1", port, is_master=side.rank == 0, wait_for_workers=False)
    if side.rank == 0:
        side.store.set("port", str(store.port))

    def made() -> int:
        found = psutil.Process().net_connections("tcp")
        return sum(bool(one.raddr) and one.raddr.port == store.port for one in found)

    alone = made()
    dist.init_process_group(
        "hetero",
        store=store,
        rank=side.rank,
        world_size=side.size,
        timeout=timedelta(seconds=60),
    )
    grouped = made()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    for to in range(side.size):  # every rank to each other
        work = [dist.irecv(torch.ones(3), r) for r in range(side.size) if r != to == side.rank]
        if side.rank != to:
            dist.send(tensor, to)
        for receipt in work:
            receipt.wait()
    used = made()
    return {
        "of the store": alone,
        "of a group": grouped - alone,
        "of its calls and messages": used - grouped,
    }
