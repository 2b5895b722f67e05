"""The library that plays HIP: complete, and clear about a machine on which it cannot."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from hetero.device.hip_driver import HipDriver
from hetero.errors import LinkError

REASON = r"hipErrorNoDevice: no CUDA on this machine to play HIP"


def has_cuda() -> bool:
    try:
        return int(ctypes.CDLL("libcuda.so.1").cuInit(0)) == 0
    except OSError:
        return False


def test_without_cuda_it_says_so(hip_on_cuda: Path) -> None:
    if has_cuda():
        pytest.skip("NOT CHECKED: this machine has CUDA")
    with pytest.raises(LinkError, match=REASON):
        HipDriver(str(hip_on_cuda))
