"""Every transport of the contract in turn."""

from __future__ import annotations

import pytest

from tests.hetero.link.transports import Transport, of_this_machine


@pytest.fixture(params=of_this_machine(present=True))
def transport(request: pytest.FixtureRequest) -> Transport:
    chosen: Transport = request.param
    return chosen


@pytest.fixture
def header_transport(transport: Transport) -> Transport:
    if not transport.has_header:
        pytest.skip(f"{transport} sends no header, so it cannot see that the two sides differ")
    return transport
