"""The contract of all transports is kept over these devices too."""

from __future__ import annotations

import pytest


def test_the_contract_is_checked_in_this_session(request: pytest.FixtureRequest) -> None:
    """It lies elsewhere and is chosen by name, so that a new name could leave it out unseen."""
    checked = [
        item.name
        for item in request.session.items
        if item.path.name in ("test_contract.py", "test_contract_failures.py")
        and "verbs" in item.name
    ]
    assert len(checked) >= 20, checked
