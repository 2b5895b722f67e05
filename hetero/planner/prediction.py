"""Predictions of a training step from its costs: duration, throughput, utilization, memory.

The step is simulated (`simulate`), estimated in closed form (`estimate_seconds`) or bounded from
below (`lower_bound_seconds`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetero.planner.cluster_shape import Cluster
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
    return _critical_path(pipeline, lambda in_flight: (pipeline.micro_batches - 1) / in_flight)


def pipeline_lower_bound(pipeline: PipelineTimes) -> float:
    """A lower bound of one pipeline's simulated seconds."""
    if pipeline.chunks > 1 or pipeline.is_blocking:
        return max(
            pipeline.micro_batches * (sum(forward) + sum(backward))
            for forward, backward in zip(pipeline.forward, pipeline.backward, strict=True)
        )
    return _critical_path(pipeline, lambda in_flight: (pipeline.micro_batches - 1) // in_flight)


def _critical_path(
    pipeline: PipelineTimes, round_trips_after_first: Callable[[int], float]
) -> float:
    """The critical path: fill, a stage's own work or its round trips, drain; the longest stage's.

    A round trip takes a micro-batch from a stage to the last one and back.
    `round_trips_after_first` gives how many follow the first, for the most micro-batches in flight.
    """
    passes = [
        (forward, backward)
        for (forward,), (backward,) in zip(pipeline.forward, pipeline.backward, strict=True)
    ]
    hops = [edge.occupancy + edge.latency for edge in pipeline.edges]
    longest = upstream = 0.0
    downstream = sum(forward + backward for forward, backward in passes) + 2 * sum(hops)
    for stage, (forward, backward) in enumerate(passes):
        round_trip = downstream
        downstream -= forward + backward
        max_in_flight = pipeline.stages - stage
        computing = pipeline.micro_batches * (forward + backward)
        bubble = _bubble(pipeline, max_in_flight - 1, forward, backward, downstream)
        round_trips = 1.0
        if pipeline.micro_batches > max_in_flight:
            round_trips += round_trips_after_first(max_in_flight)
        longest = max(longest, upstream + computing + bubble, upstream + round_trips * round_trip)
        if stage < len(hops):
            upstream += forward + backward + 2 * hops[stage]
            downstream -= 2 * hops[stage]
    return max([longest, *(pipeline.micro_batches * edge.occupancy for edge in pipeline.edges)])


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
    period = max(*passes, pipeline.chunks * max(edge.occupancy for edge in pipeline.edges))
    hops = sum(edge.occupancy + edge.latency for edge in pipeline.edges[:-1])
    fill = (sum(passes) - max(passes)) / pipeline.chunks + 2 * hops
    return fill + pipeline.micro_batches * period
