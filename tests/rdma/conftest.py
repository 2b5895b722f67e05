"""Tests of RDMA over the emulated devices of `make test-rdma`; anywhere else they are skipped.

They take links down and may only do so to devices that play NICs, so that the presence of any
RDMA device is not enough: HETERO_TEST_RAILS names them, "rxa0,rxa1/rxb0,rxb1" for two ends of two
rails each.
"""

from __future__ import annotations

import os
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests import preloaded
from tests.rdma.rails import Rail, rails_of

HERE = Path(__file__).parent
SMOKE = "test_smoke.py"
NEEDED = "HETERO_TEST_RAILS"


def _starts_processes(session: pytest.Session) -> bool:
    return NEEDED in os.environ and any(SMOKE not in one for one in session.config.args)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Begin what the links' processes import, most of a minute here, while pytest collects."""
    if _starts_processes(session):
        forkserver.set_forkserver_preload(["tests.hetero.link.contract"])
        forkserver.ensure_running()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin what a rank that trains imports, while the links are tested."""
    if _starts_processes(session) and any("training" in item.path.name for item in session.items):
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
