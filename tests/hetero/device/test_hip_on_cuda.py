"""The library that plays HIP: complete, and clear about a machine on which it cannot."""

from __future__ import annotations

import ctypes

import pytest

from hetero.errors import LinkError
from tests.hip_on_cuda.library import hip_over_cuda_driver

REASON = r"hipErrorNoDevice: no CUDA on this machine to play HIP"


def has_cuda() -> bool:
    try:
        return int(ctypes.CDLL("libcuda.so.1").cuInit(0)) == 0
    except OSError:
        return False


def test_without_cuda_it_says_so(compiler) -> None:
    if has_cuda():
        pytest.skip("NOT CHECKED: this machine has CUDA")
    with pytest.raises(LinkError, match=REASON):
        hip_over_cuda_driver()
