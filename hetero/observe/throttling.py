"""Tells of a GPU whose driver slows its clocks for its temperature."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from hetero.observe.record import THROTTLED, Recorder

_LOOKS = 2
"""In a row that have to find it: a moment of it costs nothing."""
_NVIDIA_REASONS = {
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Bits of NVML's clock event reasons. A power cap is usual, and none of them."""
_AMD_REASONS = {
    "active_prochot_thrm": "processor hot",
    "active_socket_thrm": "socket temperature",
    "active_vr_thrm": "voltage regulator temperature",
    "active_hbm_thrm": "memory temperature",
}
"""Fields of AMD SMI's violation status."""


class ThrottleWatch:
    """Adds one incident to this rank's record. Call `look` about once a second, from any thread."""

    def __init__(self, record: Recorder, read: Callable[[], str]) -> None:
        """`read`: returns why the clocks are slowed, or an empty string."""
        self._record, self._read = record, read
        self._found, self._is_over = 0, False

    def look(self) -> None:
        """Never raises: a driver that does not tell ends the watch."""
        if self._is_over:
            return
        try:
            reason = self._read()
        except Exception:
            self._is_over = True
            return
        self._found = self._found + 1 if reason else 0
        if self._found == _LOOKS:
            self._is_over = True
            self._record.add_incident(THROTTLED, f"its GPU slows its clocks: {reason}")


def reader_for(device: torch.device) -> Callable[[], str] | None:
    """Asks the driver of a GPU. None without one, or without its package (nvidia-ml-py, amdsmi)."""
    if device.type != "cuda":
        return None
    try:
        return _amd_reader(device) if torch.version.hip else _nvidia_reader(device)
    except Exception:
        return None


def _nvidia_reader(device: torch.device) -> Callable[[], str]:
    library: Any = importlib.import_module("pynvml")
    handle = torch.cuda._get_pynvml_handler(device)
    reasons_of = (
        getattr(library, "nvmlDeviceGetCurrentClocksEventReasons", None)
        or library.nvmlDeviceGetCurrentClocksThrottleReasons
    )

    def read() -> str:
        found = int(reasons_of(handle))
        names = [name for bit, name in _NVIDIA_REASONS.items() if found & bit]
        if not names:
            return ""
        degrees = library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU)
        return f"{', '.join(names)}, at {degrees} C"

    return read


def _amd_reader(device: torch.device) -> Callable[[], str]:
    library: Any = importlib.import_module("amdsmi")
    handle = torch.cuda._get_amdsmi_handler(device)

    def read() -> str:
        status = library.amdsmi_get_violation_status(handle)
        names = [name for field, name in _AMD_REASONS.items() if status.get(field) is True]
        return f"{', '.join(names)}, at {torch.cuda.temperature(device)} C" if names else ""

    return read
