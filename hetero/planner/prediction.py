"""Predictions of a training step from its costs: duration, throughput, utilization, memory.

The step is simulated (`simulate`), estimated in closed form (`estimate_seconds`) or bounded from
below (`lower_bound_seconds`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetero.planner.cluster_shape import Cluster
from hetero.planner.layer_split import FloatArray
from hetero.planner.model_shape import ModelShape
from hetero.planner.pipeline_simulator import PipelineTimes, Timeline, simulate_pipeline
from hetero.planner.placement import Placement
from hetero.planner.step_costs import StepCosts


@dataclass(frozen=True)
class StageUtilization:
    """Compute utilization and peak memory of one stage of one pipeline."""

    pipeline: int
    stage: int
    kind: str
    ranks: int
    compute_fraction: float
    """Fraction of the step spent computing; the rest is bubble, communication and update."""
    peak_bytes: float
    limit_bytes: float

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes


@dataclass(frozen=True)
class Prediction:
    """The simulated training step of a placement."""

    seconds: float
    tokens_per_second: float
    timelines: tuple[Timeline, ...]
    """For each distinct pipeline; time 0 is the end of the previous step."""
    stages: tuple[StageUtilization, ...]

    @property
    def fits(self) -> bool:
        return all(use.fits for use in self.stages)

    def utilization(self, kinds: Sequence[str]) -> float:
        """Fraction of the step in which the GPUs of these kinds compute, on average."""
        stages = [use for use in self.stages if use.kind in kinds]
        return sum(use.compute_fraction * use.ranks for use in stages) / sum(
            use.ranks for use in stages
        )


def simulate_pipelines(costs: StepCosts) -> tuple[tuple[Timeline, ...], float]:
    """The timeline of each distinct pipeline, and the duration of the step in seconds."""
    timelines = tuple(
        simulate_pipeline(pipeline, start_times=update)
        for pipeline, update in zip(costs.pipelines, costs.update, strict=True)
    )
    return timelines, _step_seconds([timeline.finish_times for timeline in timelines], costs.reduce)


def simulate(
    costs: StepCosts, placement: Placement, *, model: ModelShape, cluster: Cluster
) -> Prediction:
    """Simulate one of many equal steps.

    A step lasts from one gradient norm, which synchronizes all ranks, to the next: optimizer
    update, passes, and the gradient reduction of each stage after its last replica has finished.
    """
    timelines, seconds = simulate_pipelines(costs)
    utilizations = [
        StageUtilization(
            pipeline=index,
            stage=number,
            kind=stage.kind,
            ranks=stage.ranks,
            compute_fraction=timeline.busy_seconds(number) / seconds,
            peak_bytes=memory.peak,
            limit_bytes=cluster.kind(stage.kind).accelerator.memory_gib * 2**30,
        )
        for index, (stages, timeline, memories) in enumerate(
            zip(costs.stages, timelines, costs.memory, strict=True)
        )
        for number, (stage, memory) in enumerate(zip(stages, memories, strict=True))
    ]
    tokens = placement.global_batch * model.seq_length
    return Prediction(seconds, tokens / seconds, timelines, tuple(utilizations))


def estimate_seconds(costs: StepCosts) -> float:
    """The duration of the step in closed form: fast enough for a search, within a few per cent."""
    finish_times = []
    for pipeline, update in zip(costs.pipelines, costs.update, strict=True):
        seconds = estimate_pipeline(pipeline) + max(update)
        finish_times.append([seconds] * pipeline.stages)
    return _step_seconds(finish_times, costs.reduce)


def lower_bound_seconds(costs: StepCosts) -> float:
    """A tight lower bound of the simulated step, cheaper than simulating."""
    return max(
        pipeline_lower_bound(pipeline) + min(update) + costs.reduce[0]
        for pipeline, update in zip(costs.pipelines, costs.update, strict=True)
    )


def _step_seconds(finish_times: Sequence[Sequence[float]], reduce: Sequence[float]) -> float:
    """When the last stage is reduced; a reduction starts when all pipelines finished the stage."""
    return max(
        max(stage_ends) + seconds
        for stage_ends, seconds in zip(zip(*finish_times, strict=True), reduce, strict=True)
    )


def estimate_pipeline(pipeline: PipelineTimes) -> float:
    """Seconds of one pipeline's passes and transfers, as the longest chain of dependencies."""
    if pipeline.chunks > 1:
        return _estimate_interleaved(pipeline)
    return _critical_path(pipeline, whole_rounds=False)


def pipeline_lower_bound(pipeline: PipelineTimes) -> float:
    """A lower bound of one pipeline's simulated seconds."""
    if pipeline.chunks > 1 or pipeline.is_blocking:
        return max(
            pipeline.micro_batches * (sum(forward) + sum(backward))
            for forward, backward in zip(pipeline.forward, pipeline.backward, strict=True)
        )
    return _critical_path(pipeline, whole_rounds=True)


def _critical_path(pipeline: PipelineTimes, *, whole_rounds: bool) -> float:
    """The critical path: fill, a stage's own work or its round trips, drain; the longest stage's.

    Only a path of whole rounds is a lower bound.
    """
    passes = [
        (forward, backward)
        for (forward,), (backward,) in zip(pipeline.forward, pipeline.backward, strict=True)
    ]
    hops = [edge.occupancy + edge.latency for edge in pipeline.edges]
    rounds = _longest_rounds(pipeline, whole=whole_rounds)
    longest = upstream = 0.0
    downstream = sum(forward + backward for forward, backward in passes) + 2 * sum(hops)
    for stage, (forward, backward) in enumerate(passes):
        round_trip = downstream
        downstream -= forward + backward
        computing = pipeline.micro_batches * (forward + backward)
        bubble = _bubble(pipeline, pipeline.stages - stage - 1, forward, backward, downstream)
        longest = max(longest, upstream + max(computing + bubble, rounds[stage] + round_trip))
        if stage < len(hops):
            upstream += forward + backward + 2 * hops[stage]
            downstream -= 2 * hops[stage]
    return max(float(longest), pipeline.micro_batches * _rail_seconds(pipeline))


def _longest_rounds(pipeline: PipelineTimes, *, whole: bool) -> FloatArray:
    """For each stage the rounds that its micro-batches make before the last one's round trip.

    Of 1F1B's passes in flight a later stage has one less for each stage between. So a micro-batch
    enters the earlier stage only after an earlier one has come back from the later stage, and a
    slow link between two neighbours holds up a pipeline of any depth.
    """
    stages = np.arange(pipeline.stages)
    forward = np.array([seconds for (seconds,) in pipeline.forward])
    backward = np.array([seconds for (seconds,) in pipeline.backward])
    hops = np.array([0.0, *(2 * (edge.occupancy + edge.latency) for edge in pipeline.edges)])
    ends = np.cumsum(forward + backward + hops)
    # One row for the stage where a round begins, one column for the stage where it turns.
    round_trips = ends - (ends - forward - backward)[:, None]
    in_flight = stages - stages[:, None] + 1
    warm_up = pipeline.stages - 1 - stages
    rounds = np.maximum(pipeline.micro_batches - 1 - warm_up, 0) / np.maximum(in_flight, 1)
    seconds = warm_up * forward[:, None] + (np.floor(rounds) if whole else rounds) * round_trips
    is_steady = (in_flight > 0) & (warm_up[:, None] + 1 < pipeline.micro_batches)
    longest: FloatArray = np.where(is_steady, seconds, 0.0).max(axis=1)
    return longest


def _rail_seconds(pipeline: PipelineTimes) -> float:
    """How long the busiest NIC sends, or the busiest link, for one micro-batch."""
    last = pipeline.stages - 1
    busy: dict[int, float] = {}
    longest = 0.0
    for index, edge in enumerate(pipeline.edges):
        seconds = edge.occupancy * (pipeline.chunks if index < last else pipeline.chunks - 1)
        longest = max(longest, seconds)
        # Activations leave by the rails of the first stage, and gradients by those of the second.
        for rail in (edge.sender_rails, edge.receiver_rails):
            if rail >= 0:
                busy[rail] = busy.get(rail, 0.0) + seconds
    return max([longest, *busy.values()])


def _bubble(
    pipeline: PipelineTimes, warm_up: int, forward: float, backward: float, downstream: float
) -> float:
    """Idle time of a stage while micro-batches pass through the `downstream` stages and back.

    Before its first backward pass only the warm-up's forward passes fill that time, after its last
    forward pass as many backward passes. Without a steady state in between there is one such gap.
    """
    passes = min(warm_up, pipeline.micro_batches - 1)
    first = max(0.0, downstream - passes * forward)
    last = max(0.0, downstream - passes * backward)
    return first + last if pipeline.micro_batches - 1 > warm_up else max(first, last)


def _estimate_interleaved(pipeline: PipelineTimes) -> float:
    """Fill and drain of one chunk, plus the work of the slowest stage or link."""
    passes = [
        sum(forward) + sum(backward)
        for forward, backward in zip(pipeline.forward, pipeline.backward, strict=True)
    ]
    period = max(*passes, _rail_seconds(pipeline))
    hops = sum(edge.occupancy + edge.latency for edge in pipeline.edges[:-1])
    fill = (sum(passes) - max(passes)) / pipeline.chunks + 2 * hops
    return fill + pipeline.micro_batches * period
