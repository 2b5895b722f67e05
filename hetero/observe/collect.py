"""Rank 0's collection of all ranks' records and incidents."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hetero.observe.record import Recorder, Snapshot

_NO_INCIDENTS = b'"incidents":[]'
_MOST_INCIDENTS = 1000

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seen:
    """The last snapshot of a rank."""

    snapshot: Snapshot
    age: float
    """Seconds since it arrived. Add it to the ages that the snapshot holds."""


class Collector:
    """The last record of each rank. Any thread may call any method.

    A record is parsed only when somebody looks, except one that carries incidents.
    """

    def __init__(self, recorder: Recorder) -> None:
        """`recorder`: rank 0's own."""
        self.recorder = recorder
        self._lines: dict[int, tuple[bytes, float]] = {}
        self._incidents: OrderedDict[tuple[int, int], Mapping[str, Any]] = OrderedDict()
        """By rank and number, in the order of their arrival."""
        self._listeners: list[Callable[[Mapping[str, Any]], None]] = []
        self._lock = threading.Lock()

    def on_incident(self, listener: Callable[[Mapping[str, Any]], None]) -> None:
        """Call `listener`, from any thread, with each incident of any rank."""
        self._listeners.append(listener)

    def add(self, rank: int, line: bytes) -> None:
        """Keep a record that has arrived, as `Snapshot.to_json` makes it."""
        self._lines[rank] = (line, time.monotonic())
        if _NO_INCIDENTS not in line:
            self.add_incidents(_parsed(line).incidents)

    def add_incidents(self, incidents: Iterable[Mapping[str, Any]]) -> None:
        """Keep those that are not known yet. The listeners hear of them."""
        for incident in incidents:
            name = incident["rank"], incident["number"]
            with self._lock:
                is_new = name not in self._incidents
                if is_new:
                    self._incidents[name] = incident
                    while len(self._incidents) > _MOST_INCIDENTS:
                        self._incidents.popitem(last=False)
            if is_new:
                for listener in self._listeners:
                    try:
                        listener(incident)
                    except Exception as error:  # what only shows things never ends a run
                        _log.warning("an incident was not told: %r", error)

    def incidents(self) -> list[Mapping[str, Any]]:
        """Those of all ranks so far, the last thousand, in the order of their arrival."""
        self.add_incidents(self.recorder.incidents())
        with self._lock:
            return list(self._incidents.values())

    def seen(self) -> dict[int, Seen]:
        """The last snapshot of each rank that has sent one, by rank; rank 0's is of now."""
        now = time.monotonic()
        found = {0: Seen(self._own(), 0.0)}
        for rank, (line, arrived) in sorted(self._lines.copy().items()):
            found[rank] = Seen(_parsed(line), now - arrived)
        return found

    def _own(self) -> Snapshot:
        own = self.recorder.snapshot()
        self.add_incidents(own.incidents)
        return own


def _parsed(line: bytes) -> Snapshot:
    """Raises ValueError for a record of a rank that runs other sources."""
    try:
        return Snapshot.from_json(line)
    except (KeyError, TypeError) as error:
        raise ValueError(f"a record that this version does not know: {error}") from error
