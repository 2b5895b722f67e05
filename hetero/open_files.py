"""How many files and connections this process may have open at once."""

from __future__ import annotations

import contextlib
import resource


def allow_open_files() -> None:
    """Raise the soft limit to the hard one, also for the processes that are started from here.

    Whoever hosts the rendezvous store holds two or three connections of every rank; the soft limit
    of many systems is 1,024.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a container may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
