"""Tells which rails of a link are much slower than the fastest one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_SLOW = 0.25
"""A rail with less than this part of the fastest one's bandwidth is slow."""
_FAST_AGAIN = 0.5
"""A slow one with more than this part is slow no longer."""
_SECONDS = 5.0
"""For which measurements have to say so."""
_BYTES = 256 << 10
"""That the rail has to send in the meantime: an idle rail's bandwidth is an assumption."""


@dataclass(frozen=True, kw_only=True)
class RailSpeed:
    """What has been measured of a rail."""

    bytes_per_second: float
    """0 while unknown."""
    bytes_sent: int
    """Since the link was opened."""


@dataclass
class _Verdict:
    is_slow: bool = False
    since: float | None = None
    """Since when measurements contradict `is_slow`."""
    bytes_sent: int = 0
    """At that time."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A rail that has become slow, or fast again."""

    name: str
    is_slow: bool
    bytes_per_second: float
    fastest: float
    """The bandwidth of the fastest rail, in bytes a second."""

    def __str__(self) -> str:
        carried, most = self.bytes_per_second / 1e6, self.fastest / 1e6
        figures = f"{carried:,.1f} MB/s, and the fastest rail {most:,.1f}"
        if self.is_slow:
            return f"rail {self.name} is slow: it carries {figures}; the others carry more instead"
        return f"rail {self.name} is fast again: it carries {figures}"


class SlowRails:
    """Judges by measurements that last. Call it every second or so, from one thread at a time."""

    def __init__(self) -> None:
        self._verdicts: dict[str, _Verdict] = {}

    def is_slow(self, name: str) -> bool:
        return name in self._verdicts and self._verdicts[name].is_slow

    def update(self, speeds: Mapping[str, RailSpeed], now: float) -> list[Change]:
        """Take the measurements of all live rails at a time; returns what has changed."""
        fastest = max((speed.bytes_per_second for speed in speeds.values()), default=0.0)
        changes = []
        for name, speed in speeds.items():
            verdict = self._verdicts.setdefault(name, _Verdict())
            limit = fastest * (_FAST_AGAIN if verdict.is_slow else _SLOW)
            looks_slow = 0.0 < speed.bytes_per_second < limit
            if looks_slow == verdict.is_slow:
                verdict.since = None
            elif verdict.since is None:
                verdict.since, verdict.bytes_sent = now, speed.bytes_sent
            elif (
                now - verdict.since >= _SECONDS and speed.bytes_sent - verdict.bytes_sent >= _BYTES
            ):
                verdict.is_slow, verdict.since = looks_slow, None
                changes.append(
                    Change(
                        name=name,
                        is_slow=looks_slow,
                        bytes_per_second=speed.bytes_per_second,
                        fastest=fastest,
                    )
                )
        return changes
