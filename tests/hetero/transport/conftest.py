"""Who puts a link's entries into streams."""

from __future__ import annotations

import pytest

from hetero.native.library import LIBRARY, native
from tests.emulated_streams import EmulatedOrderedDevice


@pytest.fixture(params=["by-python", "by-c"])
def enqueued(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Python, then C: the tests that use it run with either."""
    if request.param == "by-c" and native() is None:
        pytest.skip(LIBRARY.why_not() or "")
    monkeypatch.setattr(EmulatedOrderedDevice, "by_default_in_c", request.param == "by-c")
    return str(request.param)
