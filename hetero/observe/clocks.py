"""How far the monotonic clocks of two hosts are apart, and how exactly that is known.

CLOCK_MONOTONIC is one clock for all processes of a host, and of a time namespace. Between two of
them the offset is estimated from exchanges of messages, as by NTP: of several, the one that took
least time bounds it best.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PINGS = 20
"""Exchanges for one estimate."""


@dataclass(frozen=True)
class Ping:
    """One exchange: when it left and came back here, and what the other clock showed between."""

    left: float
    there: float
    back: float


@dataclass(frozen=True)
class Offset:
    """How far another clock is ahead of this one, at one time. All in seconds."""

    at: float
    """By the other clock."""
    seconds: float
    error: float
    """At most so far from the truth."""


def clock_identity() -> str:
    """Equal in two processes that read the same monotonic clock; else a text of its own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:  # no Linux, or no time namespaces: nothing is known to be shared
        return f"{os.uname().nodename} {os.getpid()}"


def offset_of(pings: Sequence[Ping]) -> Offset:
    """The estimate of the fastest exchange: the other clock was read within it.

    Half its duration is the error, however unequal its two ways are.
    """
    best = min(pings, key=lambda ping: ping.back - ping.left)
    middle = (best.left + best.back) / 2
    return Offset(best.there, best.there - middle, (best.back - best.left) / 2)


@dataclass(frozen=True)
class Alignment:
    """Turns times of one clock into another's, by the offsets before and after what is turned."""

    before: Offset
    after: Offset

    @property
    def error(self) -> float:
        return max(self.before.error, self.after.error)

    @property
    def drift(self) -> float:
        """Seconds a second that the clock gains."""
        elapsed = self.after.at - self.before.at
        return (self.after.seconds - self.before.seconds) / elapsed if elapsed > 0 else 0.0

    def turned(self, time: float) -> float:
        """The other clock's time, for a time of this one."""
        return time - self.before.seconds - self.drift * (time - self.before.at)


SHARED = Alignment(Offset(0.0, 0.0, 0.0), Offset(0.0, 0.0, 0.0))
"""Of a clock with itself."""
