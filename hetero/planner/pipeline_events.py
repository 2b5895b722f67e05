"""The discrete events of one replica's pipeline: when each stage computes, sends and waits."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, replace

from hetero.planner.pipeline_program import (
    BACKWARD,
    FORWARD,
    Compute,
    Transfer,
    program,
)

_PLAYED = 50_000
"""Forward passes of a pipeline that are simulated, or of so many micro-batches as fill it twice."""


@dataclass(frozen=True)
class Chain:
    """One replica's pipeline, with what each pass and each transfer takes in seconds."""

    forward: tuple[tuple[float, ...], ...]
    """Of each stage, each of its chunks."""
    backward: tuple[tuple[float, ...], ...]
    edges: tuple[EdgeSeconds, ...]
    """From each stage to the next; with several chunks also from the last to the first."""
    micro_batches: int
    is_blocking: bool = False
    """Whether neighbours stop computing while they exchange, in the order of DeepSpeed's engine."""

    @property
    def stages(self) -> int:
        return len(self.forward)

    @property
    def chunks(self) -> int:
        return len(self.forward[0])


@dataclass(frozen=True)
class EdgeSeconds:
    """A transfer between two stages: how long it keeps the wire, and how much later it arrives."""

    wire: float
    latency: float
    sender_rails: int = -1
    """Edges with the same number here leave by the same NICs, one after the other; -1 for none."""
    receiver_rails: int = -1
    """The same for where they arrive. Gradients go the other way, from here to the sender's."""
    is_buffered: bool = False
    """Whether a message fits what the sender's library buffers: a blocking sender goes on then."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time: a pass of a stage, or a transfer over an edge."""

    place: int
    """The stage, or the edge."""
    direction: str
    micro_batch: int
    chunk: int
    start: float
    end: float


@dataclass(frozen=True)
class Events:
    """What happened in one step of one replica."""

    passes: tuple[Span, ...]
    transfers: tuple[Span, ...]
    ends: tuple[float, ...]
    """When each stage was through with its last pass and transfer."""
    repeats: float = 1.0
    """Micro-batches of the step over those whose passes and transfers are here."""

    @property
    def seconds(self) -> float:
        return max(self.ends)

    def busy(self, stage: int) -> float:
        spans = (span.end - span.start for span in self.passes if span.place == stage)
        return self.repeats * sum(spans)


_Key = tuple[int, str, int, int]


class _Run:
    """One simulation. Stages advance in the order of time; a parked one waits for a transfer."""

    def __init__(self, chain: Chain, starts: tuple[float, ...]) -> None:
        self.chain = chain
        self.programs = [
            deque(
                program(
                    stage,
                    stages=chain.stages,
                    micro_batches=chain.micro_batches,
                    chunks=chain.chunks,
                    is_blocking=chain.is_blocking,
                )
            )
            for stage in range(chain.stages)
        ]
        self.ready = [(start, stage) for stage, start in enumerate(starts)]
        heapq.heapify(self.ready)
        self.ends = list(starts)
        self.passes: list[Span] = []
        self.transfers: list[Span] = []
        self.arrivals: dict[_Key, float] = {}
        self.parked: dict[_Key, tuple[float, int]] = {}
        self.rail_free: dict[tuple[int, bool], float] = {}

    def events(self) -> Events:
        while self.ready:
            now, stage = heapq.heappop(self.ready)
            self.ends[stage] = now
            if self.programs[stage]:
                step = self.programs[stage].popleft()
                if isinstance(step, Compute):
                    self._compute(step, stage, now)
                elif self.chain.is_blocking and not self.chain.edges[step.edge].is_buffered:
                    self._meet(step, stage, now)
                else:
                    self._hand_over(step, stage, now)
        if any(self.programs):
            raise AssertionError("stages wait for each other in a circle")
        return Events(tuple(self.passes), tuple(self.transfers), tuple(self.ends))

    def _compute(self, step: Compute, stage: int, now: float) -> None:
        seconds = self.chain.forward if step.direction == FORWARD else self.chain.backward
        end = now + seconds[stage][step.chunk]
        self.passes.append(Span(stage, step.direction, step.micro_batch, step.chunk, now, end))
        heapq.heappush(self.ready, (end, stage))

    def _hand_over(self, step: Transfer, stage: int, now: float) -> None:
        """A send takes none of the stage's time; a receive waits until its transfer is there."""
        key = (step.edge, step.direction, step.micro_batch, step.chunk)
        if step.is_send:
            arrival = self._carry(step, now)
            heapq.heappush(self.ready, (now, stage))
            waiting = self.parked.pop(key, None)
            if waiting is None:
                self.arrivals[key] = arrival
            else:
                heapq.heappush(self.ready, (max(arrival, waiting[0]), waiting[1]))
        elif key in self.arrivals:
            heapq.heappush(self.ready, (max(now, self.arrivals.pop(key)), stage))
        else:
            self.parked[key] = (now, stage)

    def _meet(self, step: Transfer, stage: int, now: float) -> None:
        """Both ends stay until the transfer is through."""
        key = (step.edge, step.direction, step.micro_batch, step.chunk)
        if key not in self.parked:
            self.parked[key] = (now, stage)
            return
        _, peer = self.parked.pop(key)
        end = self._carry(step, now)
        heapq.heappush(self.ready, (end, stage))
        heapq.heappush(self.ready, (end, peer))

    def _carry(self, step: Transfer, now: float) -> float:
        """When a transfer that is asked for now has arrived; rails take one after the other."""
        edge = self.chain.edges[step.edge]
        rails = [(edge.sender_rails, True), (edge.receiver_rails, False)]
        if step.direction == BACKWARD:
            rails = [(edge.receiver_rails, True), (edge.sender_rails, False)]
        shared = [rail for rail in rails if rail[0] >= 0]
        start = max([now, *(self.rail_free.get(rail, 0.0) for rail in shared)])
        for rail in shared:
            self.rail_free[rail] = start + edge.wire
        end = start + edge.wire + edge.latency
        self.transfers.append(
            Span(step.edge, step.direction, step.micro_batch, step.chunk, start, end)
        )
        return end


def run_chain(chain: Chain, *, starts: tuple[float, ...] = ()) -> Events:
    """Simulate one step. `starts` says when each stage is free, all at 0 where it is left out.

    Of very many micro-batches only the first are simulated: the others repeat what these do.
    """
    starts = starts or (0.0,) * chain.stages
    # Interleaved, micro-batches take turns in groups of as many as there are stages.
    half = max(2, _PLAYED // (2 * chain.stages**2 * chain.chunks)) * chain.stages
    played = 2 * half
    if chain.micro_batches <= played:
        return _Run(chain, starts).events()
    some = _Run(replace(chain, micro_batches=half), starts).events()
    more = _Run(replace(chain, micro_batches=played), starts).events()
    left_out = chain.micro_batches - played
    ends = tuple(
        late + (late - early) / (played - half) * left_out
        for early, late in zip(some.ends, more.ends, strict=True)
    )
    return replace(more, ends=ends, repeats=chain.micro_batches / played)
