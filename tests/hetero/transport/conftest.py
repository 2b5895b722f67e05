"""Every transport of the contract in turn, and who puts an ordered link's entries into streams."""

from __future__ import annotations

import pytest

from hetero.native.library import LIBRARY, native
from tests.emulated_streams import EmulatedOrderedDevice
from tests.hetero.transport.transports import Transport, of_this_machine


@pytest.fixture(params=["by-python", "by-c"])
def enqueued(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Python, then C: the tests that use it run with either."""
    if request.param == "by-c" and native() is None:
        pytest.skip(LIBRARY.why_not() or "")
    monkeypatch.setattr(EmulatedOrderedDevice, "by_default_in_c", request.param == "by-c")
    return str(request.param)


@pytest.fixture(params=of_this_machine(present=True))
def transport(request: pytest.FixtureRequest) -> Transport:
    chosen: Transport = request.param
    return chosen


@pytest.fixture
def header_transport(transport: Transport) -> Transport:
    if not transport.has_header:
        pytest.skip(f"{transport} sends no header, so it cannot see that the two sides differ")
    return transport
