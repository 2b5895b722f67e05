"""Methods that are called while their object lives."""

from __future__ import annotations

import gc

from hetero.weak_method import weak_method


class Counter:
    def __init__(self) -> None:
        self.count = 0
        self.add_weakly = weak_method(self.add)

    def add(self, number: int, *, twice: bool = False) -> int:
        self.count += 2 * number if twice else number
        return self.count


def test_it_is_the_method_while_the_object_lives() -> None:
    counter = Counter()
    assert counter.add_weakly(2) == 2
    assert counter.add_weakly(3, twice=True) == 8


def test_an_object_that_has_it_ends_with_its_last_user_and_the_call_does_nothing_then() -> None:
    gc.disable()
    try:
        counter = Counter()
        call = counter.add_weakly
        del counter
        assert call(1) is None
    finally:
        gc.enable()
