"""argparse's converters of a word to a value.

They check ranges of single flags, so that an error names the flag and the word as typed.
"""

import argparse
import math
from collections.abc import Callable


def integer(minimum: int | None = None, *, maximum: int | None = None) -> Callable[[str], int]:
    """Make a converter for whole numbers of at least `minimum` and at most `maximum`."""
    bounds = [
        f"{words} {bound}"
        for words, bound in (("of at least", minimum), ("at most", maximum))
        if bound is not None
    ]
    expected = " ".join(["a whole number", *[" and ".join(bounds)] * bool(bounds)])

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {expected}, not {text!r}") from None
        is_low = minimum is not None and value < minimum
        if is_low or (maximum is not None and value > maximum):
            raise argparse.ArgumentTypeError(f"must be {expected}, not {text!r}")
        return value

    return convert


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
    bounds = [
        f"{words} {bound:g}"
        for words, bound in (
            ("of at least", minimum),
            ("above", above),
            ("below", below),
            ("at most", maximum),
        )
        if bound is not None
    ]
    expected = " ".join(["a finite number", *[" and ".join(bounds)] * bool(bounds)])

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        is_in_range = (
            math.isfinite(value)
            and (minimum is None or value >= minimum)
            and (above is None or value > above)
            and (below is None or value < below)
            and (maximum is None or value <= maximum)
        )
        if not is_in_range:
            raise argparse.ArgumentTypeError(f"must be {expected}, not {text!r}")
        return value

    return convert


def text(value: str) -> str:
    """Convert a name or path. An empty word, of an unset shell variable, is an error."""
    if not value.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return value
