"""Selects the driver of a device's vendor."""

from __future__ import annotations

import os
import warnings
from functools import cache

import torch

from hetero.device.cuda_driver import CudaDriver
from hetero.device.driver_base import GpuDriver
from hetero.device.hip_driver import HipDriver

__all__ = ["HIP_LIBRARY_VARIABLE", "GpuDriver", "driver_for"]

HIP_LIBRARY_VARIABLE = "HETERO_HIP_LIBRARY"


def driver_for(device: torch.device) -> GpuDriver:
    """The driver of a GPU, by the running PyTorch build; one for the whole process.

    HETERO_HIP_LIBRARY names another HIP runtime library to load. Set on a build without HIP, it
    selects the HIP driver over a library that emulates HIP: AMD is then *simulated*.

    Raises LinkError when the vendor's library cannot be used.
    """
    if device.type != "cuda":
        raise ValueError(f"{device} has no GPU driver")
    return _driver(os.environ.get(HIP_LIBRARY_VARIABLE) or None)


@cache
def _driver(hip_library: str | None) -> GpuDriver:
    if torch.version.hip:
        return HipDriver(hip_library)
    if hip_library is None:
        return CudaDriver()
    warnings.warn(
        f"{HIP_LIBRARY_VARIABLE} is set on a PyTorch build without HIP: AMD is simulated",
        stacklevel=3,
    )
    return HipDriver(hip_library)
