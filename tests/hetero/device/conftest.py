"""Libraries that play a vendor's driver, compiled on the spot."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.device import cuda_driver, hip_driver
from tests.hetero.device.fake_library import FakeLibrary
from tests.hip_on_cuda.library import COMPILER, LACKING


@pytest.fixture
def compiler() -> None:
    if COMPILER is None:
        pytest.skip(f"NOT CHECKED: {LACKING}")


@pytest.fixture
def fake_cuda(compiler: None, tmp_path: Path) -> FakeLibrary:
    return FakeLibrary(tmp_path, cuda_driver.SYMBOLS)


@pytest.fixture
def fake_hip(compiler: None, tmp_path: Path) -> FakeLibrary:
    return FakeLibrary(tmp_path, (*hip_driver.SYMBOLS, *hip_driver.HSA_SYMBOLS))
