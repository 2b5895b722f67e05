"""Methods as callbacks that do not keep their object alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def weak_method(method: Callable[P, T]) -> Callable[P, T | None]:
    """Calls a bound method while its object lives; a no-op, which returns None, afterwards.

    For what an object gives to its own parts. A cycle would keep the object, with its memory and
    files, until the garbage collector comes, and in a process forked meanwhile that frees a GPU's
    events, which aborts it.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> T | None:
        bound = reference()
        return None if bound is None else bound(*args, **kwargs)

    return call
