"""Turning one word of the command line into a value, or saying why it cannot be one.

Ranges that concern a single flag are checked here, so that the error names the flag and the word
that was typed; what concerns several flags together is in `checks`.
"""

import argparse
import math
from collections.abc import Callable


def integer(minimum: int | None = None) -> Callable[[str], int]:
    """A converter for whole numbers of at least `minimum`."""

    def convert(text: str) -> int:
        wanted = "a whole number" if minimum is None else f"a whole number of at least {minimum}"
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {wanted}, not {text!r}") from None
        if minimum is not None and value < minimum:
            raise argparse.ArgumentTypeError(f"must be {wanted}, not {text!r}")
        return value

    return convert


def interval(text: str) -> int | None:
    """A converter for steps between two events, where 0 stands for never, as in Megatron."""
    return integer(0)(text) or None


def number(
    *,
    minimum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    maximum: float | None = None,
) -> Callable[[str], float]:
    """A converter for finite numbers; NaN and infinity would only surface later as a broken run."""
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
    wanted = " ".join(["a finite number", *[" and ".join(bounds)] * bool(bounds)])

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        inside = (
            math.isfinite(value)
            and (minimum is None or value >= minimum)
            and (above is None or value > above)
            and (below is None or value < below)
            and (maximum is None or value <= maximum)
        )
        if not inside:
            raise argparse.ArgumentTypeError(f"must be {wanted}, not {text!r}")
        return value

    return convert


def text(value: str) -> str:
    """A converter for names and paths, where an empty word is an unset shell variable."""
    if not value.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return value
