"""What becomes of this process's connections and links in the children that it forks."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable


def call_in_children(method: Callable[[], object]) -> None:
    """Call an object's method in every child that is forked from now on, while the object lives."""
    # Python keeps these handlers for ever, so hold no object in one.
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (inherited := reference()) is not None:
            inherited()

    os.register_at_fork(after_in_child=call)


def close_in_children(connection: socket.socket) -> socket.socket:
    """Close it in forked children: it would be open for as long as one of them runs."""
    call_in_children(connection.close)
    return connection
