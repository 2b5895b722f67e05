"""Discrete-event simulation of one pipeline: when each stage computes, transfers and waits."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, replace

from hetero.planner.pipeline_schedule import (
    BACKWARD,
    FORWARD,
    Compute,
    Transfer,
    stage_schedule,
)

_MAX_SIMULATED_PASSES = 10_000
"""Forward passes up to which a whole step is simulated (at least two pipeline fills)."""


@dataclass(frozen=True)
class PipelineTimes:
    """The durations of one pipeline's passes and transfers, in seconds."""

    forward: tuple[tuple[float, ...], ...]
    """`forward[stage][chunk]`, per micro-batch."""
    backward: tuple[tuple[float, ...], ...]
    edges: tuple[EdgeTimes, ...]
    """From each stage to the next; with several chunks also from the last stage to the first."""
    micro_batches: int
    is_blocking: bool = False
    """Whether stages stop computing during transfers, as in DeepSpeed's pipeline engine."""

    @property
    def stages(self) -> int:
        return len(self.forward)

    @property
    def chunks(self) -> int:
        return len(self.forward[0])


@dataclass(frozen=True)
class EdgeTimes:
    """A transfer between two stages, in seconds."""

    occupancy: float
    """How long it occupies the link."""
    latency: float
    """How much later it arrives."""
    sender_rails: int = -1
    """Identifies the NICs of the edge's first stage: transfers that leave (or arrive) by the same
    ones are serialized. -1: not limited."""
    receiver_rails: int = -1
    """The same for the edge's second stage. Gradients flow from here to the first stage."""
    is_buffered: bool = False
    """Whether a blocking sender continues at once, the message being buffered."""


@dataclass(frozen=True, slots=True)
class Span:
    """The time of a pass on a stage, or of a transfer over an edge."""

    resource: int
    """The stage or the edge."""
    direction: str
    micro_batch: int
    chunk: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The simulated step of one pipeline."""

    passes: tuple[Span, ...]
    transfers: tuple[Span, ...]
    finish_times: tuple[float, ...]
    """When each stage has finished its last pass and transfer."""
    repetitions: float = 1.0
    """Micro-batches of the step divided by those in `passes` and `transfers`."""

    @property
    def seconds(self) -> float:
        return max(self.finish_times)

    def busy_seconds(self, stage: int) -> float:
        spans = (span.end - span.start for span in self.passes if span.resource == stage)
        return self.repetitions * sum(spans)


_TransferKey = tuple[int, str, int, int]


class _Simulation:
    """One run of the simulator.

    `ready` orders stages by time; a stage that waits for a transfer is in `blocked` instead.
    """

    def __init__(self, pipeline: PipelineTimes, start_times: tuple[float, ...]) -> None:
        self.pipeline = pipeline
        self.schedules = [
            deque(
                stage_schedule(
                    stage,
                    stages=pipeline.stages,
                    micro_batches=pipeline.micro_batches,
                    chunks=pipeline.chunks,
                    is_blocking=pipeline.is_blocking,
                )
            )
            for stage in range(pipeline.stages)
        ]
        self.ready = [(start, stage) for stage, start in enumerate(start_times)]
        heapq.heapify(self.ready)
        self.finish_times = list(start_times)
        self.passes: list[Span] = []
        self.transfers: list[Span] = []
        self.arrivals: dict[_TransferKey, float] = {}
        self.blocked: dict[_TransferKey, tuple[float, int]] = {}
        self.rail_free_at: dict[tuple[int, bool], float] = {}

    def run(self) -> Timeline:
        while self.ready:
            now, stage = heapq.heappop(self.ready)
            self.finish_times[stage] = now
            if self.schedules[stage]:
                instruction = self.schedules[stage].popleft()
                if isinstance(instruction, Compute):
                    self._compute(instruction, stage, now)
                elif (
                    self.pipeline.is_blocking
                    and not self.pipeline.edges[instruction.edge].is_buffered
                ):
                    self._transfer_blocking(instruction, stage, now)
                else:
                    self._transfer_async(instruction, stage, now)
        if any(self.schedules):
            raise AssertionError("the schedule deadlocks: stages wait for each other")
        return Timeline(tuple(self.passes), tuple(self.transfers), tuple(self.finish_times))

    def _compute(self, compute: Compute, stage: int, now: float) -> None:
        seconds = self.pipeline.forward if compute.direction == FORWARD else self.pipeline.backward
        end = now + seconds[stage][compute.chunk]
        self.passes.append(
            Span(stage, compute.direction, compute.micro_batch, compute.chunk, now, end)
        )
        heapq.heappush(self.ready, (end, stage))

    def _transfer_async(self, transfer: Transfer, stage: int, now: float) -> None:
        """A send returns at once; a receive waits for the arrival."""
        key = (transfer.edge, transfer.direction, transfer.micro_batch, transfer.chunk)
        if transfer.is_send:
            arrival = self._start_transfer(transfer, now)
            heapq.heappush(self.ready, (now, stage))
            receiver = self.blocked.pop(key, None)
            if receiver is None:
                self.arrivals[key] = arrival
            else:
                heapq.heappush(self.ready, (max(arrival, receiver[0]), receiver[1]))
        elif key in self.arrivals:
            heapq.heappush(self.ready, (max(now, self.arrivals.pop(key)), stage))
        else:
            self.blocked[key] = (now, stage)

    def _transfer_blocking(self, transfer: Transfer, stage: int, now: float) -> None:
        """Sender and receiver wait for each other, then for the end of the transfer."""
        key = (transfer.edge, transfer.direction, transfer.micro_batch, transfer.chunk)
        if key not in self.blocked:
            self.blocked[key] = (now, stage)
            return
        _, peer = self.blocked.pop(key)
        end = self._start_transfer(transfer, now)
        heapq.heappush(self.ready, (end, stage))
        heapq.heappush(self.ready, (end, peer))

    def _start_transfer(self, transfer: Transfer, now: float) -> float:
        """Start a transfer as soon as its rails are free; returns when it arrives."""
        edge = self.pipeline.edges[transfer.edge]
        leaving, arriving = edge.sender_rails, edge.receiver_rails
        if transfer.direction == BACKWARD:
            leaving, arriving = arriving, leaving
        rails = [rail for rail in ((leaving, True), (arriving, False)) if rail[0] >= 0]
        start = now
        for rail in rails:
            start = max(start, self.rail_free_at.get(rail, 0.0))
        for rail in rails:
            self.rail_free_at[rail] = start + edge.occupancy
        end = start + edge.occupancy + edge.latency
        self.transfers.append(
            Span(
                transfer.edge, transfer.direction, transfer.micro_batch, transfer.chunk, start, end
            )
        )
        return end


def simulate_pipeline(pipeline: PipelineTimes, *, start_times: tuple[float, ...] = ()) -> Timeline:
    """Simulate one step. Stages are free at `start_times`, 0 where left out.

    With very many micro-batches only the first are simulated; the steady state is extrapolated.
    """
    start_times = start_times or (0.0,) * pipeline.stages
    # A multiple of the stages: interleaved schedules need whole groups of micro-batches.
    half = (
        max(2, _MAX_SIMULATED_PASSES // (2 * pipeline.stages**2 * pipeline.chunks))
        * pipeline.stages
    )
    simulated = 2 * half
    if pipeline.micro_batches <= simulated:
        return _Simulation(pipeline, start_times).run()
    first_half = _Simulation(replace(pipeline, micro_batches=half), start_times).run()
    whole = _Simulation(replace(pipeline, micro_batches=simulated), start_times).run()
    remaining = pipeline.micro_batches - simulated
    finish_times = tuple(
        second + (second - first) / (simulated - half) * remaining
        for first, second in zip(first_half.finish_times, whole.finish_times, strict=True)
    )
    return replace(whole, finish_times=finish_times, repetitions=pipeline.micro_batches / simulated)
