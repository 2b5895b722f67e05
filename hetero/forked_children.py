"""What becomes of this process's connections and links in the children that it forks."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

_Inherited = TypeVar("_Inherited")

_called: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()
"""Functions by the objects that a child calls them with."""


def _call_all() -> None:
    for inherited, function in list(_called.items()):
        function(inherited)


os.register_at_fork(after_in_child=_call_all)  # once: Python keeps what is registered for ever


def call_in_children(inherited: _Inherited, function: Callable[[_Inherited], object]) -> None:
    """Call a function with an object, while that lives, in every child forked from now on."""
    _called[inherited] = function


def close_in_children(connection: socket.socket) -> socket.socket:
    """Close it in forked children: it would be open for as long as one of them runs."""
    call_in_children(connection, socket.socket.close)
    return connection
