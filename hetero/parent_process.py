"""Ends a process with the one that started it, also where that one is killed outright."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends. It outlasts an exec."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
