"""Text that people read and write: counted nouns, lists of ranks, values of flags."""

from __future__ import annotations

import argparse
import contextlib
import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 rank`, `2 ranks`; `plural` where it is not the noun and an s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def size_text(count: float) -> str:
    """Bytes in the largest binary unit that leaves a number of at least one."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def seconds_text(seconds: float) -> str:
    """Seconds in milliseconds' digits, or in three digits where those would show too little."""
    return f"{seconds:.3f} s" if seconds >= 0.1 else f"{seconds:.3g} s"


def spans(numbers: Iterable[int], noun: str = "rank") -> str:
    """Numbers as ranges: 'rank 3', 'ranks 0-3, 8'."""
    ranges: list[list[int]] = []
    ordered = sorted(numbers)
    for number in ordered:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
    return f"{noun} {text}" if len(ordered) == 1 else f"{noun}s {text}"


def ranks_on_hosts(ranks: Iterable[int], hosts: Mapping[int, str]) -> str:
    """Ranks with those of their hosts that are known, of many the first three.

    'rank 3 on b', 'ranks 8-15 on b, c'.
    """
    ordered = sorted(ranks)
    names = list(dict.fromkeys(hosts[rank] for rank in ordered if rank in hosts))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    where = f" on {', '.join(names[:3])}{more}" if names else ""
    return spans(ordered) + where


def name_ranks(
    ranks: Iterable[int], world_size: int, environ: Mapping[str, str] = os.environ
) -> str:
    """Ranks with their nodes, if the launcher tells them: 'ranks 8-15 (node 1 of 2)'."""
    ranks = sorted(ranks)
    local, nodes = (environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"))
    known = local.isdecimal() and nodes.isdecimal() and int(nodes) > 1
    # If nodes have different numbers of processes, it is not known which rank is on which.
    if not known or int(local) * int(nodes) != world_size:
        return spans(ranks)
    return f"{spans(ranks)} ({spans({rank // int(local) for rank in ranks}, 'node')} of {nodes})"


class HelpFormatter(argparse.HelpFormatter):
    """Adds `(default: 64)` to the help of a flag that has such a value.

    Nothing is added for a switch, or a default of None or an empty list. If leaving out such a flag
    means something, its own help says so.
    """

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if not action.help or action.required or default in (None, argparse.SUPPRESS, "", []):
            return action.help
        if isinstance(default, bool) or not action.option_strings:
            return action.help
        shown = " ".join(map(str, default)) if isinstance(default, list | tuple) else str(default)
        return f"{action.help} (default: {shown.replace('%', '%%')})"


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
