"""No process of a job outlives a launcher that was killed outright."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def end_with_launcher() -> None:
    """Have the kernel send this process SIGTERM once the launcher that started it is gone.

    A launcher that is killed by SIGKILL ends nobody, and its ranks would train on. It is SIGTERM
    so that a run with --exit-signal-handler saves first. A process that torchelastic did not start
    is left alone: a shell's background job outlives its shell.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
