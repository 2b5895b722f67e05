"""argparse's converters of a word to a value.

They check ranges of single flags, so that an error names the flag and the word as typed.
"""

import argparse
import contextlib
import math
import operator
from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)

_BOUNDS = {
    "minimum": ("of at least", operator.ge),
    "above": ("above", operator.gt),
    "below": ("below", operator.lt),
    "maximum": ("at most", operator.le),
}


def integer(minimum: int | None = None, *, maximum: int | None = None) -> Callable[[str], int]:
    """Make a converter for whole numbers of at least `minimum` and at most `maximum`."""
    return _within("a whole number", int, minimum=minimum, maximum=maximum)


def interval(text: str) -> int | None:
    """Convert the steps between two events; 0 means never, as in Megatron."""
    return integer(0)(text) or None


def number(
    *,
    minimum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    maximum: float | None = None,
) -> Callable[[str], float]:
    """Make a converter for finite numbers within bounds, of which `minimum` and `maximum` belong.

    NaN and infinity would fail only in the middle of a run.
    """

    def finite(text: str) -> float:
        if not math.isfinite(value := float(text)):
            raise ValueError(text)
        return value

    bounds = {"minimum": minimum, "above": above, "below": below, "maximum": maximum}
    return _within("a finite number", finite, **bounds)


def seconds(text: str) -> float:
    """Convert the seconds of a wait. Above 31 years the system's clocks and locks count no more."""
    return number(above=0, maximum=1e9)(text)


def _within(
    kind: str, parse: Callable[[str], Number], **bounds: float | None
) -> Callable[[str], Number]:
    """Make a converter for what `parse` reads, or refuses with a ValueError, within `bounds`."""
    given = [(_BOUNDS[name], bound) for name, bound in bounds.items() if bound is not None]
    within = " and ".join(f"{words} {bound:.15g}" for (words, _), bound in given)

    def convert(text: str) -> Number:
        with contextlib.suppress(ValueError):
            value = parse(text)
            if all(holds(value, bound) for (_, holds), bound in given):
                return value
        raise argparse.ArgumentTypeError(f"must be {f'{kind} {within}'.rstrip()}, not {text!r}")

    return convert


def text(value: str) -> str:
    """Convert a name or path. An empty word, of an unset shell variable, is an error."""
    if not value.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return value
