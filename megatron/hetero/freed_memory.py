"""Memory of this process that the host could have back."""

from __future__ import annotations

import ctypes


def return_freed_memory() -> None:
    """Give back to the system what was freed and what glibc keeps for later allocations.

    A thread has a heap of its own there. The threads that draw the initial weights leave theirs
    behind, with tens of megabytes that nothing else uses. With another C library nothing is done.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
