"""What becomes of this process's connections and links in the children that it forks."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

_Inherited = TypeVar("_Inherited")


@cache
def _functions() -> weakref.WeakKeyDictionary[Any, Callable[[Any], object]]:
    """Functions by the objects that every child calls them with.

    One handler serves all objects, because Python keeps what is registered for ever.
    """
    functions: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()

    def call_all() -> None:
        for inherited, function in list(functions.items()):
            function(inherited)

    os.register_at_fork(after_in_child=call_all)
    return functions


def call_in_children(inherited: _Inherited, function: Callable[[_Inherited], object]) -> None:
    """Call a function with an object, while that lives, in every child forked from now on."""
    _functions()[inherited] = function


def close_in_children(connection: socket.socket) -> socket.socket:
    """Close it in forked children: it would be open for as long as one of them runs."""
    call_in_children(connection, socket.socket.close)
    return connection
