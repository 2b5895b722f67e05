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
