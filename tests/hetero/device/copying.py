"""A copy on a stream of a GPU, by the function that the links' library in C calls for it."""

from __future__ import annotations

from hetero.device.driver_base import GpuDriver
from hetero.native.binding import native


def copy(driver: GpuDriver, target: int, source: int, nbytes: int, stream: int) -> None:
    """Returns at once; the addresses are those of registered host or of device memory."""
    entry = driver.entry_points
    code = native().driver_copy(entry.vendor, entry.copy, target, source, nbytes, stream)
    assert code == 0
