"""What is called in forked children, and for how long."""

from __future__ import annotations

import gc
import os
import weakref

from hetero import forked_children
from hetero.forked_children import call_in_children


class Inherited:
    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def note(self) -> None:
        os.write(self._pipe, b"called")


def test_a_child_calls_what_lives_and_nothing_is_kept_of_what_does_not() -> None:
    """A process may open and close any number of links."""
    reading, writing = os.pipe()
    inherited = [Inherited(writing) for _ in range(3)]
    for one in inherited:
        call_in_children(one, Inherited.note)
    gone = weakref.ref(inherited.pop())
    del one
    gc.collect()
    assert gone() is None
    assert sum(isinstance(one, Inherited) for one in forked_children._functions()) == 2
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading, "rb") as said:
        assert said.read() == 2 * b"called"
