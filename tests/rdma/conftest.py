"""Tests of RDMA over the emulated devices of `make test-rdma`; anywhere else they are skipped.

They take links down and may only do so to devices that play NICs, so that the presence of any
RDMA device is not enough: HETERO_TEST_RAILS names them, "rxa0,rxa1/rxb0,rxb1" for two ends of two
rails each.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.rdma.rails import Rail, rails_of

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.rdma)
        if "HETERO_TEST_RAILS" not in os.environ:
            item.add_marker(
                pytest.mark.skip(reason="needs emulated RDMA devices: `make test-rdma` has them")
            )


@pytest.fixture(scope="session")
def rails() -> list[Rail]:
    return rails_of(os.environ["HETERO_TEST_RAILS"])
