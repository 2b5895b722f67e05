"""The links of one group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetero.collectives.group_links import Links
from hetero.collectives.vendor_layout import Layout
from hetero.errors import LinkError
from tests.hetero.collectives.test_cpu_p2p import MEMBERS
from tests.hetero.link.ring.pair import opened


def test_a_link_that_opens_while_its_group_ends_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links(
        layout=Layout(MEMBERS, 0),
        store=dist.HashStore(),
        device=torch.device("cpu"),
        timeout=1.0,
        check_abort=lambda _: None,
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
