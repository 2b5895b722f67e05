"""The addresses by which the ranks of a run reach each other."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from hetero.addresses import Route
from hetero.errors import AgreedError
from megatron.training.rendezvous import agree_on_addresses


class Others:
    """Rank 0's Agreement and Liveness; the others are on these routes and say the same."""

    route = None

    def __init__(self, routes: list[Route]) -> None:
        self._routes = routes

    def await_connection(self) -> None:
        return

    def exchange(self, what: str, *, payload: dict[str, Any], error: object) -> list[dict]:
        return [payload, *(payload | {"route": asdict(route)} for route in self._routes)]

    def name(self, ranks: list[int]) -> str:
        return f"rank {ranks[0]}"


@pytest.mark.parametrize(
    ("named", "elsewhere", "refused"),
    [("lo", False, False), ("lo", True, True), ("nosuch0", False, True)],
)
def test_an_interface_of_gloo_by_which_nobody_gets_here_is_refused_with_the_ranks_that_name_it(
    monkeypatch: pytest.MonkeyPatch, named: str, elsewhere: bool, refused: bool
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
    others: Any = Others([Route("10.0.0.2" if elsewhere else "127.0.0.1", "127.0.0.1")])
    if not refused:
        assert agree_on_addresses(others, others, rank=0) == "127.0.0.1"
        return
    with pytest.raises(AgreedError, match=f"names {named} on rank 0; {named} on rank 1: no inter"):
        agree_on_addresses(others, others, rank=0)
