"""The runtime of a tensor's device."""

from __future__ import annotations

import torch

from hetero.device.base import DeviceRuntime
from hetero.device.cpu import CpuRuntime
from hetero.device.gpu import GpuRuntime


def runtime_for(device: torch.device) -> DeviceRuntime:
    """The runtime of a tensor's device. Each call gives one with a side stream of its own."""
    return CpuRuntime() if device.type == "cpu" else GpuRuntime(device)
