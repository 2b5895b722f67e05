"""What an emulated NIC met, told on stderr: pytest shows it with the test that failed."""

from __future__ import annotations

import os
import sys
import time


def report(who: str, what: str) -> None:
    """Say it at once, with a clock that all processes of a machine share."""
    line = f"emulated NIC {who}, process {os.getpid()}, at {time.monotonic():.3f} s: {what}\n"
    # One write, so that the lines of two processes do not run into each other.
    sys.stderr.write(line)
    sys.stderr.flush()
