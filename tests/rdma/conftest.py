"""Tests of RDMA over the emulated devices of `make test-rdma`; anywhere else they are skipped.

They take links down and may only do so to devices that play NICs, so that the presence of any
RDMA device is not enough: HETERO_TEST_RAILS names them, "rxa0,rxa1/rxb0,rxb1" for two ends of two
rails each.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import preloaded
from tests.hetero.link.contract import Pair
from tests.hetero.link.transports import TRANSPORTS
from tests.rdma.rails import Rail, rails_of

HERE = Path(__file__).parent
SMOKE = "test_smoke.py"
NEEDED = "HETERO_TEST_RAILS"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fork this process for the others, which need not import torch again: half a minute here."""
    if NEEDED in os.environ and session.items:
        os.environ[preloaded.FORKS_ITSELF] = "1"
        # Else each would look through all of this for garbage, and so copy the memory it is in.
        gc.collect()
        gc.freeze()
        if any("training" in item.path.name for item in session.items):
            # What else a rank that trains imports is imported while the links are tested.
            preloaded.address()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Without devices that work, the rest would only say the same thing again."""
    if report.failed and SMOKE in report.nodeid:
        pytest.exit("the emulated devices do not work", returncode=1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.rdma)
        if NEEDED not in os.environ:
            item.add_marker(
                pytest.mark.skip(reason="needs emulated RDMA devices: `make test-rdma` has them")
            )


@pytest.fixture(scope="session")
def rails() -> list[Rail]:
    return rails_of(os.environ[NEEDED])


@pytest.fixture(scope="session")
def pair() -> Iterator[Pair]:
    """The two processes that the tests here share; each says over which rails."""
    with Pair(next(one for one in TRANSPORTS if one.name == "verbs")) as both:
        yield both
