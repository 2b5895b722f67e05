"""The limit of open files and connections of a process."""

from __future__ import annotations

import contextlib
import resource


def allow_open_files() -> None:
    """Raise the soft limit to the hard one, for this process and its children.

    The host of the rendezvous store has two or three connections to every rank, and the soft limit
    of many systems is 1,024.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a container may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
