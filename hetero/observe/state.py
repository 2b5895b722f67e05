"""The state of a run at one time, from all ranks' records: what page, `top` and Prometheus show.

Nothing here waits or asks: `build_state` is a function of what rank 0 has been sent. Rates are
differences between two records of a rank; `Rates` keeps the earlier ones. Phases are of a rank's
main thread: on a GPU, of the host that enqueues.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from hetero.observe.collect import Seen
from hetero.observe.record import WAITING, LinkState, Phase, Recorder, Snapshot
from hetero.startup import liveness

PASSES = (Phase.FORWARD, Phase.BACKWARD, Phase.FORWARD_BACKWARD)
"""The phases whose time depends on the speed of the device, and not on other ranks."""
KINDS = ("busy", "waiting", "data", "rest")
"""What the time of a rank is divided into: computing, waiting for others, waiting for the data
loader, and the rest (start, evaluation, checkpoints)."""
_BUSY = frozenset({*PASSES, Phase.OPTIMIZER, Phase.OTHER})
_WINDOW_SECONDS = 5.0
_SHORTEST_SECONDS = 0.5
SLOW_RATIO = 1.2
"""Of a rank's time for its passes to the median of its peers: from here on it is a straggler."""
_LEAST_WATCHED_SECONDS = 3.0
"""Before it, a rank is not compared: the two ends of the time are in different passes."""
_LEAST_PASSES = 0.02
"""Of the time: below it, passes are too short for a comparison of ranks."""
_SHOWN_INCIDENTS = 200
_MOST_POINTS = 512
MOST_DETAILED = 1024
"""Ranks up to which the state has the links and calls of each; those of 16,384 would be 40 MB."""


@dataclass(frozen=True, kw_only=True)
class RankDescription:
    """What is known of a rank beside its record. Coordinates are None without a plan."""

    rank: int
    host: str = ""
    vendor: str = ""
    device: str = ""
    is_simulated: bool = False
    """Whether it plays another vendor than its own."""
    mesh: int | None = None
    stage: int | None = None
    data: int | None = None
    context: int | None = None
    tensor: int | None = None


@dataclass(frozen=True, kw_only=True)
class MeshDescription:
    """Ranks of one vendor with equal parallel sizes."""

    mesh: int
    vendor: str
    tensor: int
    context: int
    data: int
    stages: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StageDescription:
    """The ranks of one mesh that hold one pipeline stage."""

    stage: int
    mesh: int
    layers: int
    ranks: tuple[int, int]
    """The first and the last; they are consecutive."""


@dataclass(frozen=True, kw_only=True)
class EdgeDescription:
    """Two stages that exchange activations and gradients."""

    source: int
    target: int
    is_boundary: bool
    """Whether it joins two meshes."""


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """What does not change during a run. Without a plan only the ranks, or their number."""

    world_size: int
    name: str = ""
    ranks: tuple[RankDescription, ...] = ()
    meshes: tuple[MeshDescription, ...] = ()
    stages: tuple[StageDescription, ...] = ()
    """In the order of their ranks."""
    edges: tuple[EdgeDescription, ...] = ()
    total_iterations: int | None = None
    predicted_tokens_per_second: float | None = None
    """By the planner, for the plan of this run."""
    is_emulated: bool = False
    """Whether one host plays several."""


@dataclass(frozen=True)
class Point:
    """One iteration in the curves."""

    iteration: int
    loss: float | None
    seconds: float
    tokens_per_second: float | None


class History:
    """Loss, time and throughput of past iterations: at most 512 points, whatever the run's length.

    Once full, every second point is left out, and from then on fewer iterations are kept.
    """

    def __init__(self, most: int = _MOST_POINTS) -> None:
        self._most = most
        self._points: list[Point] = []
        self._stride = 1
        self._last: Mapping[str, float] | None = None

    def look(self, recorder: Recorder) -> None:
        """Add the last complete iteration, unless that was looked at already."""
        values = recorder.values
        if values is self._last or "iteration" not in values:
            return
        self._last = values
        self.add(
            Point(
                int(values["iteration"]),
                values.get("loss"),
                recorder.iteration_seconds,
                values.get("tokens_per_s"),
            )
        )

    def add(self, point: Point) -> None:
        points = self._points
        if points and point.iteration < points[-1].iteration + self._stride:
            return
        points.append(point)
        if len(points) >= self._most:
            self._points = points[::2]
            span = points[-1].iteration - points[0].iteration
            self._stride = max(self._stride, 2 * span // self._most)

    def as_json(self) -> dict[str, list[Any]]:
        points = self._points
        return {
            "iteration": [point.iteration for point in points],
            "loss": [point.loss for point in points],
            "iteration_seconds": [round(point.seconds, 6) for point in points],
            "tokens_per_second": [point.tokens_per_second for point in points],
        }


LinkKey = tuple[int, str, bool]
"""The peer, the transport, and whether it crosses a boundary."""


@dataclass(frozen=True)
class _Counters:
    """What is counted of a rank, at the time its record was taken."""

    at: float
    spent: Mapping[str, float]
    """Seconds by kind."""
    passes: float
    """Seconds in forward and backward passes."""
    sent: Mapping[LinkKey, int] = field(default_factory=dict)
    received: Mapping[LinkKey, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RankRates:
    """Of a rank, over the last seconds: shares of its time, and bytes a second of its links."""

    seconds: float
    """How long it was watched."""
    shares: Mapping[str, float]
    passes: float
    """The share of forward and backward passes."""
    sent: Mapping[LinkKey, float]
    received: Mapping[LinkKey, float]


class Rates:
    """Keeps earlier records of each rank, and divides differences by the time between them."""

    def __init__(self, *, window: float = _WINDOW_SECONDS) -> None:
        """`window`: the time that a rate covers, in seconds; less of it at the start of a run."""
        self._window = window
        self._kept: dict[int, list[_Counters]] = {}
        self._rates: dict[int, RankRates] = {}

    def look(self, seen: Mapping[int, Seen], now: float) -> None:
        """Take in what is seen at `now`, in seconds by any clock that does not jump."""
        for rank, one in seen.items():
            self._add(rank, _counters(one.snapshot, now - one.age))

    def of(self, rank: int) -> RankRates | None:
        """None until there are two records."""
        return self._rates.get(rank)

    def _add(self, rank: int, counters: _Counters) -> None:
        kept = self._kept.setdefault(rank, [])
        if kept and counters.at - kept[-1].at < _SHORTEST_SECONDS:
            return  # the same record, or one too near
        kept.append(counters)
        while len(kept) > 2 and counters.at - kept[1].at >= self._window:
            del kept[0]
        if len(kept) > 1:
            self._rates[rank] = _between(kept[0], counters)


def kind_of(phase: str) -> str:
    """Under which of KINDS the time of a phase counts."""
    if phase in WAITING:
        return "waiting"
    if phase == Phase.DATA:
        return "data"
    return "busy" if phase in _BUSY else "rest"


def seconds_by_kind(snapshot: Snapshot) -> dict[str, float]:
    """A rank's time since the run began, by KINDS."""
    seconds = dict.fromkeys(KINDS, 0.0)
    for phase, value in snapshot.phase_seconds.items():
        seconds[kind_of(phase)] += value
    return seconds


def _counters(snapshot: Snapshot, at: float) -> _Counters:
    sent: Counter[LinkKey] = Counter()
    received: Counter[LinkKey] = Counter()
    for link in snapshot.links:
        sent[_key_of(link)] += link.bytes_sent
        received[_key_of(link)] += link.bytes_received
    passes = sum(snapshot.phase_seconds.get(phase, 0.0) for phase in PASSES)
    return _Counters(at, seconds_by_kind(snapshot), passes, sent, received)


def _key_of(link: LinkState) -> LinkKey:
    return link.peer, link.transport, link.is_boundary


def _between(before: _Counters, after: _Counters) -> RankRates:
    seconds = after.at - before.at

    def rates(old: Mapping[LinkKey, int], new: Mapping[LinkKey, int]) -> dict[LinkKey, float]:
        return {key: max(0, value - old.get(key, 0)) / seconds for key, value in new.items()}

    spent = {kind: after.spent[kind] - before.spent[kind] for kind in KINDS}
    # By the rank's own clock: one record may have been on its way for longer than the other.
    whole = sum(spent.values()) or seconds
    return RankRates(
        seconds,
        {kind: value / whole for kind, value in spent.items()},
        (after.passes - before.passes) / whole,
        rates(before.sent, after.sent),
        rates(before.received, after.received),
    )


def build_state(
    description: RunDescription,
    seen: Mapping[int, Seen],
    *,
    rates: Rates,
    incidents: Sequence[Mapping[str, Any]] = (),
    history: History | None = None,
    wall_time: float | None = None,
    silent_after: float = liveness.silent_after(1),
) -> dict[str, Any]:
    """One JSON mapping with all that is shown. Times are seconds, sizes bytes.

    Args:
        description: what does not change.
        seen: the last record of each rank.
        rates: which has looked at them.
        incidents: of all ranks, in the order of their arrival.
        history: past iterations.
        wall_time: now, in seconds since the epoch.
        silent_after: the age at which the last record of a rank says that it hangs; see
            `hetero.startup.liveness.silent_after`.
    """
    known = {rank.rank: rank for rank in description.ranks}
    ranks = [
        _rank(
            known.get(rank) or RankDescription(rank=rank),
            seen.get(rank),
            rates.of(rank),
            silent_after=silent_after,
        )
        for rank in sorted(known.keys() | seen.keys() | set(range(description.world_size)))
    ]
    by_rank = {rank["rank"]: rank for rank in ranks}
    stages = [_stage(stage, by_rank) for stage in description.stages]
    edges = _edges(description, by_rank)
    if len(ranks) > MOST_DETAILED:
        for rank in ranks:
            rank["links"] = rank["calls"] = ()
    progress = _progress(description, seen)
    return {
        "time": time.time() if wall_time is None else wall_time,
        "name": description.name,
        "is_simulated": any(rank.is_simulated for rank in description.ranks),
        "is_emulated": description.is_emulated,
        "world_size": description.world_size,
        "ranks_seen": len(seen),
        "has_rates": any(rank["shares"] is not None for rank in ranks),
        "progress": progress,
        "prediction": _prediction(description, progress),
        "meshes": [
            _plain(mesh) | {"is_simulated": _is_simulated(mesh, known.values())}
            for mesh in description.meshes
        ],
        "stages": stages,
        "edges": edges,
        "ranks": ranks,
        "waiting_for": _waiting_for(ranks),
        "stragglers": _stragglers(ranks),
        "silent": [rank["rank"] for rank in ranks if rank["is_silent"]],
        "bottleneck": _bottleneck(stages),
        "history": (history or History()).as_json(),
        "incidents": list(incidents[-_SHOWN_INCIDENTS:]),
    }


def _is_simulated(mesh: MeshDescription, ranks: Iterable[RankDescription]) -> bool:
    return any(rank.is_simulated for rank in ranks if rank.mesh == mesh.mesh)


def _progress(description: RunDescription, seen: Mapping[int, Seen]) -> dict[str, Any]:
    own = seen[0].snapshot if 0 in seen else None
    values = {} if own is None else dict(own.values)
    return {
        "iteration": 0 if own is None else own.iteration,
        "completed_iterations": int(values.pop("iteration", 0)),
        "total_iterations": description.total_iterations,
        "iteration_seconds": 0.0 if own is None else own.iteration_seconds,
        "is_evaluating": own is not None and own.is_evaluating,
        "tokens": 0 if own is None else own.tokens,
        "tokens_per_second": values.pop("tokens_per_s", None),
        "values": values,
    }


def _prediction(
    description: RunDescription, progress: Mapping[str, Any]
) -> dict[str, float | None] | None:
    predicted = description.predicted_tokens_per_second
    if not predicted:
        return None
    measured = progress["tokens_per_second"]
    return {
        "tokens_per_second": predicted,
        "reached": None if measured is None else measured / predicted,
    }


def _rank(
    known: RankDescription, seen: Seen | None, rates: RankRates | None, *, silent_after: float
) -> dict[str, Any]:
    common = _plain(known) | {
        "shares": None if rates is None else _rounded(rates.shares),
        "passes": None
        if rates is None or rates.seconds < _LEAST_WATCHED_SECONDS
        else round(rates.passes, 4),
    }
    if seen is None:
        return (
            common
            | {"phase": None, "age": None, "is_silent": False, "links": [], "calls": []}
            | {"waits": []}
        )
    own, age = seen.snapshot, seen.age
    return common | {
        "host": known.host or own.host,
        "pid": own.pid,
        "phase": str(own.phase),
        "phase_seconds": round(own.seconds + age, 3),
        "age": round(age, 3),
        "is_silent": age >= silent_after,
        "is_waiting": own.is_waiting,
        "is_evaluating": own.is_evaluating,
        "iteration": own.iteration,
        "micro_batch": own.micro_batch,
        "gradients": own.gradients,
        "data_wait_seconds": round(own.data_wait_seconds, 3),
        "memory_bytes": own.memory_bytes,
        "process": _plain(own.process),
        "waits": [_plain(wait) | {"seconds": round(wait.seconds + age, 3)} for wait in own.waits],
        "calls": [
            {
                "group": call.group,
                "sequence": call.sequence,
                "operation": call.operation,
                "peer": call.peer,
                "state": call.state,
                "seconds": round(call.seconds + age, 3),
            }
            for call in own.calls
        ],
        "links": [_link(link, rates) for link in own.links],
    }


def _link(link: LinkState, rates: RankRates | None) -> dict[str, Any]:
    key = _key_of(link)
    return {
        "peer": link.peer,
        "transport": link.transport,
        "is_boundary": link.is_boundary,
        "sent_per_second": None if rates is None else round(rates.sent.get(key, 0.0), 1),
        "received_per_second": None if rates is None else round(rates.received.get(key, 0.0), 1),
        "bytes_sent": link.bytes_sent,
        "bytes_received": link.bytes_received,
        "wait_seconds": link.wait_seconds,
        "queued": link.queued,
        "oldest": link.oldest,
        "oldest_seconds": link.oldest_seconds,
        "retransmitted": link.retransmitted,
        "rails": [_plain(rail) for rail in link.rails],
    }


def _plain(value: object) -> dict[str, Any]:
    """A dataclass's fields. `asdict` copies them deeply, which takes ten times as long."""
    return dict(vars(value))


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values.items()}


def _stage(stage: StageDescription, by_rank: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    first, last = stage.ranks
    ranks = [by_rank[rank] for rank in range(first, last + 1)]
    watched = [rank for rank in ranks if rank["shares"] is not None]
    phases = Counter(rank["phase"] for rank in ranks if rank["phase"] is not None)
    return _plain(stage) | {
        "hosts": list(dict.fromkeys(rank["host"] for rank in ranks if rank["host"])),
        "shares": {kind: fmean(rank["shares"][kind] for rank in watched) for kind in KINDS}
        if watched
        else None,
        "phases": dict(phases.most_common()),
    }


def _edges(
    description: RunDescription, by_rank: Mapping[int, dict[str, Any]]
) -> list[dict[str, Any]]:
    """The links between two stages together: what both sides have sent to each other."""
    links: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for rank in by_rank.values():
        for link in rank["links"]:
            peer = by_rank.get(link["peer"])
            if peer is not None and rank["stage"] is not None and peer["stage"] is not None:
                links[rank["stage"], peer["stage"]].append(link)
    # Links inside a stage are those of groups that cross vendors somewhere.
    inside = [
        EdgeDescription(
            source=source,
            target=target,
            is_boundary=any(link["is_boundary"] for link in links[source, target]),
        )
        for source, target in sorted(links)
        if source == target and any(link["bytes_sent"] for link in links[source, target])
    ]
    return [_plain(edge) | _sum(edge, links) for edge in (*description.edges, *inside)]


def _sum(
    edge: EdgeDescription, links: Mapping[tuple[int, int], Sequence[Mapping[str, Any]]]
) -> dict[str, Any]:
    there = links.get((edge.source, edge.target), ())
    back = links.get((edge.target, edge.source), ()) if edge.source != edge.target else ()
    both = [*there, *back]

    def bandwidth(some: Sequence[Mapping[str, Any]]) -> float | None:
        known = [link["sent_per_second"] for link in some if link["sent_per_second"] is not None]
        return round(sum(known), 1) if known else None

    return {
        "transports": sorted({link["transport"] for link in both if link["transport"]}),
        "links": len(both),
        "forward_per_second": bandwidth(there),
        "backward_per_second": bandwidth(back),
        "queued": sum(link["queued"] for link in both),
        "oldest_seconds": max((link["oldest_seconds"] for link in both), default=0.0),
        "retransmitted": sum(link["retransmitted"] for link in both),
        "rails": dict(Counter(rail["state"] for link in both for rail in link["rails"])),
    }


def _stragglers(ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Ranks whose passes take longer than those of their peers: same stage, mesh and vendor.

    Peers of a synchronous run have the same wall time, so that shares compare as times do.
    """
    peers: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for rank in ranks:
        if rank["stage"] is not None and rank["passes"] is not None:
            peers[rank["mesh"], rank["stage"], rank["vendor"]].append(rank)
    found = []
    for group in peers.values():
        if len(group) < 2:
            continue
        usual = median(rank["passes"] for rank in group)
        for rank in group:
            # Of two ranks the median is their mean, which the slow one is part of.
            if len(group) == 2:
                usual = next(other["passes"] for other in group if other is not rank)
            if usual >= _LEAST_PASSES and rank["passes"] >= SLOW_RATIO * usual:
                found.append(
                    {
                        "rank": rank["rank"],
                        "host": rank["host"],
                        "stage": rank["stage"],
                        "vendor": rank["vendor"],
                        "factor": round(rank["passes"] / usual, 2),
                    }
                )
    return sorted(found, key=lambda each: -each["factor"])


def _waiting_for(ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Which ranks are waited for, by how many, and for how long at most."""
    waiting: dict[int, list[float]] = defaultdict(list)
    for rank in ranks:
        for wait in rank["waits"]:
            for peer in wait["peers"]:
                waiting[peer].append(wait["seconds"])
    found = [
        {"rank": rank, "ranks_waiting": len(seconds), "seconds": max(seconds)}
        for rank, seconds in waiting.items()
    ]
    return sorted(found, key=lambda each: -each["seconds"])


def _bottleneck(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The stage that waits least: the others wait for it."""
    watched = [stage for stage in stages if stage["shares"] is not None]
    if len(watched) < 2:
        return None
    slowest = min(watched, key=lambda stage: stage["shares"]["waiting"])
    return {
        "stage": slowest["stage"],
        "mesh": slowest["mesh"],
        "busy": slowest["shares"]["busy"],
        "waiting": slowest["shares"]["waiting"],
    }
