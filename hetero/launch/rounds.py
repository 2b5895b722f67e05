"""A round of a job's launchers: who joins it, and what all are told when it is formed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hetero.startup.store import BoundedStore

REFUSED, CURRENT, OVER = "refused", "current", "over"
"""Keys of the launchers' store: why the job is refused, the round formed last, how it ended."""
BEFORE = "before"
"""The rounds that launchers know of which have lost an earlier store."""
BACK = "lost nodes are back"
"""Why a round ends in which nothing has failed."""
DEAD_SECONDS = 4.0
"""Without a sign of life, after which a launcher counts as dead."""
LOOK_SECONDS = 0.1
"""Between two looks at the store."""
CLOSE_SECONDS = 2.0
"""For a thread to end."""
MOST_TEXT = 300
"""Characters of a reason."""


@dataclass(frozen=True, kw_only=True)
class NodeEntry:
    """A launcher that joins a round."""

    token: str
    """Of the launcher's process; a launcher that is started again has another."""
    host: str
    number: int
    """--node-rank; -1 where nodes have none."""
    processes: int
    vendor: str = ""
    """Of its GPUs, "cpu", or what HETERO_VENDOR says."""
    accelerator: str = ""
    memory: int = 0
    """As of `NodeMemory`, where plans are chosen."""
    address: str = ""
    rounds: int = 0
    """The number of rounds in which it took part."""
    place: int = -1
    """Of this node in the last of them."""
    failures: int = 0
    """Of the job, as far as it knows."""
    job: str = ""
    exit: Mapping[str, Any] | None = None
    """How its processes failed, as a `ProcessExit`; None if they did not."""
    lost_store: str = ""
    """What this launcher says of the store that it has lost; else empty."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """What it holds in memory of the training's state, and how far its ranks have come."""
    history: Mapping[str, Any] = field(default_factory=dict)
    """A `JobHistory` of now, as far as it knows; empty before its first round."""
    noticed: float | None = None
    """Seconds since it noticed a loss by itself; None if it was only asked to leave."""
    detection: float = 0.0
    """Seconds from that loss until it noticed, at most."""
    waited: float = 0.0
    """Seconds since it began to join, also while the store was lost."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """The nodes that start their processes together."""

    number: int
    """Of the rounds at one store, from 1."""
    nodes: tuple[NodeEntry, ...]
    """In the order of their ranks."""
    job: str
    """Names the job in all of its rounds."""
    failures: int
    """After which a round began."""
    starts: int = 0
    """How often the processes have started before."""
    plan: str = ""
    """Names the fallback plan that it runs; empty: the job's own."""
    plan_text: str = ""
    """Of that plan's file."""
    reason: str = ""
    """Why this round began; empty of the first one."""
    history: Mapping[str, Any] = field(default_factory=dict)
    """The job's `JobHistory`, in which this round is the last incident; in place of its nodes'."""

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Round:
        """From `asdict`, through JSON."""
        nodes = tuple(NodeEntry(**entry) for entry in record["nodes"])
        return cls(**{**record, "nodes": nodes})


def current_round(store: BoundedStore) -> Round | None:
    """The round that was formed last."""
    if not store.check([CURRENT]):
        return None
    return Round.from_record(json.loads(store.get(f"formed/{store.get(CURRENT).decode()}")))


def dead_among(store: BoundedStore, tokens: Iterable[str]) -> set[str]:
    """The launchers without a sign of life within the time after which one counts as dead."""

    def sign(token: str) -> bytes | None:
        key = f"alive/{token}"
        return store.get(key) if store.check([key]) else None

    first, deadline = {token: sign(token) for token in tokens}, time.monotonic() + DEAD_SECONDS
    silent = set(first)
    while silent and time.monotonic() < deadline:
        silent = {token for token in silent if sign(token) in (None, first[token])}
        if silent:
            time.sleep(LOOK_SECONDS)
    return silent
