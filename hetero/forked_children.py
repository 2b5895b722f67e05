"""What becomes of this process's connections and links in the children that it forks."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from hetero.weak_method import weak_method


def call_in_children(method: Callable[[], object]) -> None:
    """Call an object's method in every child that is forked from now on, while the object lives."""
    # Python keeps these handlers for ever, so hold no object in one.
    os.register_at_fork(after_in_child=weak_method(method))


def close_in_children(connection: socket.socket) -> socket.socket:
    """Close it in forked children: it would be open for as long as one of them runs."""
    call_in_children(connection.close)
    return connection
