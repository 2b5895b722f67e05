"""What is said while somebody is waited for, and how those who are missing are named."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Intervals:
    """Seconds until a wait is first spoken of, and between the later times."""

    first: float = 10.0
    again: float = 30.0


class Waiting:
    """One wait. `tell` says what is waited for whenever that is due."""

    def __init__(
        self,
        intervals: Intervals | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._intervals = intervals or Intervals()
        self._clock = clock
        self._say = say or _print
        self._began = clock()
        self._due = self._intervals.first

    def tell(self, whom: str | Callable[[], str | None]) -> None:
        """Say that `whom` is waited for, if it is time; None keeps silent until the next."""
        waited = self._clock() - self._began
        if waited < self._due:
            return
        again = self._intervals.again
        self._due = again * (waited // again + 1)
        if text := whom if isinstance(whom, str) else whom():
            self._say(f"waiting for {text}, {waited:.0f} s so far")


def _print(line: str) -> None:
    """On stderr and in one write, for the reason that hetero.errors.print_error gives."""
    print(f"{line}\n", end="", file=sys.stderr, flush=True)


def spans(numbers: Iterable[int], noun: str = "rank") -> str:
    """Numbers as people write them: 'rank 3', 'ranks 0-3, 8'."""
    pairs: list[list[int]] = []
    ordered = sorted(numbers)
    for number in ordered:
        if pairs and number == pairs[-1][1] + 1:
            pairs[-1][1] = number
        else:
            pairs.append([number, number])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)
    return f"{noun} {text}" if len(ordered) == 1 else f"{noun}s {text}"


def name_ranks(
    ranks: Iterable[int], world_size: int, environ: Mapping[str, str] = os.environ
) -> str:
    """Ranks with their nodes, where the launcher tells: 'ranks 8-15 (node 1 of 2)'."""
    ranks = sorted(ranks)
    local, nodes = (environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"))
    known = local.isdecimal() and nodes.isdecimal() and int(nodes) > 1
    # Where nodes have different numbers of processes, which rank is on which is not known here.
    if not known or int(local) * int(nodes) != world_size:
        return spans(ranks)
    return f"{spans(ranks)} ({spans({rank // int(local) for rank in ranks}, 'node')} of {nodes})"
