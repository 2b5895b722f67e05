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

from tests.rdma.rails import Rail, rails_of

HERE = Path(__file__).parent
NEEDED = "HETERO_TEST_RAILS"
# What every process that a test starts would else import for itself, the last most slowly.
PRELOADED = [
    "tests.hetero.link.contract",
    "megatron.training.session",
    "megatron.core.tokenizers.text",
]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Begin the imports, which take a minute here, while pytest still collects."""
    only_smoke = all("test_smoke" in argument for argument in session.config.args)
    if NEEDED in os.environ and not only_smoke:
        forkserver.set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()


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
