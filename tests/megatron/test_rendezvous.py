"""The addresses by which the ranks of a run reach each other."""

from __future__ import annotations

from typing import Any

import pytest

from hetero.errors import UserError
from megatron.hetero.rendezvous import agree_on_addresses, open_store
from tests.distributed.harness import free_port


class Others:
    """Rank 0's JobExchanges and Liveness; one other rank is there too, or elsewhere."""

    address, is_elsewhere = "127.0.0.1", False

    def __init__(self, *, elsewhere: bool) -> None:
        self._other = {"address": "127.0.0.1", "is elsewhere": elsewhere}

    def await_connection(self) -> None:
        return

    def exchange(
        self, what: str, *, payload: dict[str, Any], error: object, joining: bool
    ) -> list[dict]:
        return [payload, payload | self._other]

    def name(self, ranks: list[int]) -> str:
        return f"rank {ranks[0]}"


@pytest.mark.parametrize(
    ("named", "elsewhere", "refused"),
    [("lo", False, False), ("lo", True, True), ("nosuch0", False, True)],
)
def test_an_unreachable_gloo_interface_is_refused_with_the_ranks_that_name_it(
    monkeypatch: pytest.MonkeyPatch, named: str, elsewhere: bool, refused: bool
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
    others: Any = Others(elsewhere=elsewhere)
    if not refused:
        assert agree_on_addresses(others, others) == "127.0.0.1"
        return
    with pytest.raises(UserError, match=f"names {named} on rank 0; {named} on rank 1: no inter"):
        agree_on_addresses(others, others)


def test_a_rank_of_a_job_of_another_size_does_not_join_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two jobs were given one port; the second's rank 0 cannot open it, and its others find it."""
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    host = open_store(0, 2, 5.0)
    with pytest.raises(UserError, match=f"127.0.0.1:{port} has 2 ranks, and this .* of 4"):
        open_store(2, 4, 5.0)
    assert open_store(1, 2, 5.0).num_keys() == host.num_keys()
