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
_AT_LEAST = 1e9
"""Bytes a second of a rail that has sent, and whose bandwidth is still unknown: the CPUs were what
took time, so no sample of it was possible."""


@dataclass(frozen=True, kw_only=True)
class RailSpeed:
    """What has been measured of a rail."""

    bytes_per_second: float
    """0 while unknown: of a connection, as long as the CPUs limit it."""
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
    fastest_is_unknown: bool
    """It is more, and how much has not been measured."""

    def __str__(self) -> str:
        carried, most = self.bytes_per_second / 1e6, self.fastest / 1e6
        least = "at least " if self.fastest_is_unknown else ""
        figures = f"{carried:,.1f} MB/s, and the fastest rail {least}{most:,.1f}"
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
        fastest = max(map(_bandwidth, speeds.values()), default=0.0)
        is_unknown = fastest > max((s.bytes_per_second for s in speeds.values()), default=0.0)
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
                        fastest_is_unknown=is_unknown,
                    )
                )
        return changes


def _bandwidth(speed: RailSpeed) -> float:
    is_unknown = speed.bytes_per_second == 0
    return _AT_LEAST if is_unknown and speed.bytes_sent >= _BYTES else speed.bytes_per_second
