"""A process whose monotonic clock is ahead of the others', as on another host: a time namespace."""

from __future__ import annotations

import functools
import subprocess
import sys

BEFORE = """
import ctypes, os
_libc = ctypes.CDLL(None, use_errno=True)
_TIME = 0x80
if _libc.unshare(_TIME):
    raise OSError(ctypes.get_errno(), "no time namespace can be made")
with open("/proc/self/timens_offsets", "w") as _file:
    _file.write("monotonic {seconds} 0")
if _libc.setns(os.open("/proc/self/ns/time_for_children", os.O_RDONLY), _TIME):
    raise OSError(ctypes.get_errno(), "the time namespace cannot be entered")
"""


def shift(seconds: int) -> str:
    """Lines of Python after which CLOCK_MONOTONIC is so many seconds ahead; before any thread."""
    return BEFORE.format(seconds=seconds)


@functools.cache
def why_impossible() -> str | None:
    """Why no clock can be shifted here; None where it can."""
    code = shift(60) + "print('shifted')"
    tried = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    if tried.stdout == "shifted\n":
        return None
    return f"clocks cannot be shifted here: {(tried.stderr.splitlines() or ['?'])[-1]}"
