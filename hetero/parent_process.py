"""Ends a process with the one that started it, also where that one is killed outright."""

from __future__ import annotations

import ctypes
import os
import signal

LAUNCHER_VARIABLE = "HETERO_LAUNCHER_PID"
"""Set by `hetero.run` for the processes that it starts."""
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends. It outlasts an exec."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def end_with_launcher() -> None:
    """`end_with_parent` for a process that `hetero.run` itself has started; else a no-op."""
    if os.environ.get(LAUNCHER_VARIABLE) == str(os.getppid()):
        end_with_parent(signal.SIGTERM)
