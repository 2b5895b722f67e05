"""Every transport of the contract in turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hetero.link.contract import Pair
from tests.hetero.link.transports import Transport, of_this_machine


@pytest.fixture(scope="module", params=of_this_machine(present=True))
def transport(request: pytest.FixtureRequest) -> Transport:
    chosen: Transport = request.param
    return chosen


@pytest.fixture(scope="module")
def pair(transport: Transport) -> Iterator[Pair]:
    """The two processes that a module's tests of a transport share."""
    with Pair(transport) as both:
        yield both


@pytest.fixture
def header_pair(transport: Transport, pair: Pair) -> Pair:
    if not transport.has_header:
        pytest.skip(f"{transport} sends no header, so it cannot see that the two sides differ")
    return pair
