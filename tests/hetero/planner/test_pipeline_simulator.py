"""The simulation of a pipeline, against closed forms and what must hold of any schedule."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.planner import pipeline_simulator
from hetero.planner.peak_memory import in_flight
from hetero.planner.pipeline_schedule import BACKWARD, FORWARD, compute_order
from hetero.planner.pipeline_simulator import EdgeTimes, PipelineTimes, Timeline, simulate_pipeline
from hetero.planner.prediction import estimate_pipeline, pipeline_lower_bound

SECONDS = st.floats(0.1, 2.0)


@st.composite
def pipelines(
    draw: st.DrawFn, *, largest_edge: float = 0.5, chunks: int = 1, rails: int = 0
) -> PipelineTimes:
    """With `rails`, stages share so many NICs, and each edge uses some or none."""
    stages = draw(st.integers(2 if chunks > 1 else 1, 6))
    edges = stages if chunks > 1 else stages - 1
    rounds = draw(st.integers(1, 6))
    ends = st.integers(-1, rails - 1)
    wires = st.builds(EdgeTimes, st.floats(0, largest_edge), st.floats(0, 0.05), ends, ends)

    def passes() -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(draw(SECONDS) for _ in range(chunks)) for _ in range(stages))

    return PipelineTimes(
        passes(),
        passes(),
        tuple(draw(wires) for _ in range(edges)),
        rounds * stages if chunks > 1 else draw(st.integers(1, 20)),
        is_blocking=chunks == 1 and draw(st.booleans()),
    )


def even_pipeline(stages: int, micro_batches: int, *, is_blocking: bool = False) -> PipelineTimes:
    return PipelineTimes(
        ((1.0,),) * stages,
        ((2.0,),) * stages,
        (EdgeTimes(0.0, 0.0),) * (stages - 1),
        micro_batches,
        is_blocking,
    )


@pytest.mark.parametrize("is_blocking", [False, True])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (1, 7), (2, 3), (4, 8), (6, 2)])
def test_equal_stages_take_the_time_of_the_closed_form(
    stages: int, micro_batches: int, is_blocking: bool
) -> None:
    pipeline = even_pipeline(stages, micro_batches, is_blocking=is_blocking)
    assert simulate_pipeline(pipeline).seconds == pytest.approx((micro_batches + stages - 1) * 3.0)


@pytest.mark.parametrize(
    ("stages", "chunks", "rounds"), [(2, 2, 2), (4, 2, 2), (4, 3, 4), (3, 4, 1)]
)
def test_interleaving_divides_the_bubble_by_the_chunks(
    stages: int, chunks: int, rounds: int
) -> None:
    pipeline = PipelineTimes(
        ((1.0 / chunks,) * chunks,) * stages,
        ((2.0 / chunks,) * chunks,) * stages,
        (EdgeTimes(0.0, 0.0),) * stages,
        rounds * stages,
    )
    expected = (rounds * stages + (stages - 1) / chunks) * 3.0
    assert simulate_pipeline(pipeline).seconds == pytest.approx(expected)


@given(st.one_of(pipelines(), pipelines(chunks=2), pipelines(chunks=3)))
def test_every_pass_happens_once_and_after_what_it_needs(pipeline: PipelineTimes) -> None:
    timeline = simulate_pipeline(pipeline)
    expected = {
        (stage, direction, micro_batch, chunk)
        for stage in range(pipeline.stages)
        for direction in (FORWARD, BACKWARD)
        for micro_batch in range(pipeline.micro_batches)
        for chunk in range(pipeline.chunks)
    }
    spans = {
        (span.resource, span.direction, span.micro_batch, span.chunk): span
        for span in timeline.passes
    }
    assert len(timeline.passes) == len(expected)
    assert spans.keys() == expected
    for (stage, direction, micro_batch, chunk), span in spans.items():
        if direction == BACKWARD:
            assert span.start >= spans[stage, FORWARD, micro_batch, chunk].end
        elif stage > 0:
            assert span.start >= spans[stage - 1, FORWARD, micro_batch, chunk].end
        elif chunk > 0:
            assert span.start >= spans[pipeline.stages - 1, FORWARD, micro_batch, chunk - 1].end
    no_stage_does_two_things_at_once(timeline, pipeline.stages)


def no_stage_does_two_things_at_once(timeline: Timeline, stages: int) -> None:
    for stage in range(stages):
        spans = sorted((span.start, span.end) for span in timeline.passes if span.resource == stage)
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert start >= end - 1e-9


@given(st.one_of(pipelines(), pipelines(chunks=2)))
def test_a_stage_computes_as_long_as_its_passes_take(pipeline: PipelineTimes) -> None:
    timeline = simulate_pipeline(pipeline)
    for stage in range(pipeline.stages):
        work = sum(pipeline.forward[stage]) + sum(pipeline.backward[stage])
        assert timeline.busy_seconds(stage) == pytest.approx(work * pipeline.micro_batches)


@pytest.mark.parametrize(
    "pipeline", [even_pipeline(3, 602), even_pipeline(3, 602, is_blocking=True)]
)
def test_many_micro_batches_are_extrapolated_from_the_first(
    pipeline: PipelineTimes, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = replace(pipeline, backward=((2.0,), (3.5,), (1.0,)))
    whole = simulate_pipeline(slow)
    monkeypatch.setattr(pipeline_simulator, "_MAX_SIMULATED_PASSES", 300)
    some = simulate_pipeline(slow)
    assert len(some.passes) <= 2 * 300
    assert some.seconds == pytest.approx(whole.seconds)
    assert [some.busy_seconds(n) for n in range(3)] == pytest.approx(
        [whole.busy_seconds(n) for n in range(3)]
    )
    vast = simulate_pipeline(replace(slow, micro_batches=10**9))
    assert vast.seconds == pytest.approx(4.5e9, rel=1e-6)


@given(st.one_of(pipelines(), pipelines(chunks=2)), st.data())
def test_a_slower_wire_never_makes_a_step_faster(
    pipeline: PipelineTimes, data: st.DataObject
) -> None:
    if not pipeline.edges:
        return
    index = data.draw(st.integers(0, len(pipeline.edges) - 1))
    edges = list(pipeline.edges)
    edges[index] = replace(edges[index], occupancy=edges[index].occupancy + 0.3)
    slower = replace(pipeline, edges=tuple(edges))
    assert simulate_pipeline(slower).seconds >= simulate_pipeline(pipeline).seconds - 1e-9


@given(pipelines())
def test_overlapping_transfers_are_never_slower_than_blocking_ones(pipeline: PipelineTimes) -> None:
    overlapped = simulate_pipeline(replace(pipeline, is_blocking=False)).seconds
    assert overlapped <= simulate_pipeline(replace(pipeline, is_blocking=True)).seconds + 1e-9


def test_edges_that_leave_by_the_same_rails_go_one_after_the_other() -> None:
    # Stage 1 is sent to while it sends on; with rails of its own nothing waits.
    alone = even_pipeline(3, 6)
    edges = (EdgeTimes(4.0, 0.0, 0, 1), EdgeTimes(4.0, 0.0, 2, 3))
    shared = (EdgeTimes(4.0, 0.0, 0, 1), EdgeTimes(4.0, 0.0, 0, 3))
    apart = simulate_pipeline(replace(alone, edges=edges)).seconds
    assert simulate_pipeline(replace(alone, edges=shared)).seconds > apart + 1.0


@settings(max_examples=300)
@given(pipelines())
def test_the_estimate_is_near_the_simulation(pipeline: PipelineTimes) -> None:
    """1F1B over stages up to 20 times apart, wires up to five times the shortest pass: 25 %."""
    pipeline = replace(pipeline, is_blocking=False)
    assert estimate_pipeline(pipeline) == pytest.approx(
        simulate_pipeline(pipeline).seconds, rel=0.25
    )


@settings(max_examples=300)
@given(
    st.lists(st.floats(0.85, 1.15), min_size=2, max_size=8), st.integers(1, 8), st.floats(0, 0.05)
)
def test_the_estimate_is_nearer_for_stages_that_are_nearly_balanced(
    speeds: list[float], rounds: int, occupancy: float
) -> None:
    pipeline = PipelineTimes(
        tuple((speed,) for speed in speeds),
        tuple((2 * speed,) for speed in speeds),
        (EdgeTimes(occupancy, 0.0),) * (len(speeds) - 1),
        rounds * len(speeds),
    )
    assert estimate_pipeline(pipeline) == pytest.approx(
        simulate_pipeline(pipeline).seconds, rel=0.03
    )


@pytest.mark.parametrize("place", range(7))
def test_the_estimate_knows_what_one_slow_link_costs_a_deep_pipeline(place: int) -> None:
    """Its neighbours wait for each other, wherever it is: it takes as long as one pass of both."""
    edges = [EdgeTimes(0.0, 0.0)] * 7
    edges[place] = EdgeTimes(3.0, 0.0)
    pipeline = replace(even_pipeline(8, 64), edges=tuple(edges))
    simulated = simulate_pipeline(pipeline).seconds
    assert simulated > 1.6 * simulate_pipeline(even_pipeline(8, 64)).seconds
    assert estimate_pipeline(pipeline) == pytest.approx(simulated, rel=0.03)
    assert 0.95 * simulated < pipeline_lower_bound(pipeline) <= simulated * (1 + 1e-9)


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_estimate_knows_that_a_stage_sends_both_ways_over_its_nic(chunks: int) -> None:
    """An activation to the next stage, and a gradient to the one before."""
    edges = tuple(EdgeTimes(4.0 / chunks, 0.0, stage, (stage + 1) % 4) for stage in range(4))
    passes = ((1.0 / chunks,) * chunks,) * 4
    pipeline = PipelineTimes(passes, passes, edges if chunks > 1 else edges[:3], 64)
    simulated = simulate_pipeline(pipeline).seconds
    assert simulated >= 64 * 8.0
    assert estimate_pipeline(pipeline) == pytest.approx(simulated, rel=0.15)


@given(st.integers(1, 6), st.integers(1, 20), st.integers(1, 4))
def test_a_stage_holds_what_its_place_in_the_pipeline_says(
    stages: int, rounds: int, chunks: int
) -> None:
    if stages == 1:
        chunks = 1
    count = rounds * stages if chunks > 1 else rounds
    held = []
    for stage in range(stages):
        order = compute_order(stage, stages=stages, micro_batches=count, chunks=chunks)
        now = most = 0
        for step in order:
            now += 1 if step.direction == FORWARD else -1
            most = max(most, now)
        assert most == in_flight(stage, stages=stages, micro_batches=count, chunks=chunks)
        held.append(most)
    assert held == sorted(held, reverse=True)


@given(
    st.lists(st.floats(0.5, 1.5), min_size=2, max_size=8),
    st.integers(4, 8),
    st.integers(2, 4),
    st.floats(0, 0.05),
)
def test_the_estimate_of_interleaved_stages_with_equal_chunks_is_near_too(
    speeds: list[float], rounds: int, chunks: int, occupancy: float
) -> None:
    pipeline = PipelineTimes(
        tuple((speed / chunks,) * chunks for speed in speeds),
        tuple((2 * speed / chunks,) * chunks for speed in speeds),
        (EdgeTimes(occupancy / chunks, 0.0),) * len(speeds),
        rounds * len(speeds),
    )
    assert estimate_pipeline(pipeline) == pytest.approx(
        simulate_pipeline(pipeline).seconds, rel=0.12
    )


@given(
    st.one_of(
        pipelines(),
        pipelines(largest_edge=5.0),
        pipelines(largest_edge=5.0, rails=2),
        pipelines(chunks=2),
    )
)
def test_no_schedule_is_shorter_than_the_bound_by_which_plans_are_left_out(
    pipeline: PipelineTimes,
) -> None:
    assert pipeline_lower_bound(pipeline) <= simulate_pipeline(pipeline).seconds * (1 + 1e-9)


def test_the_bound_by_which_plans_are_left_out_is_nearly_reached() -> None:
    pipeline = even_pipeline(4, 64)
    assert pipeline_lower_bound(pipeline) > 0.99 * simulate_pipeline(pipeline).seconds
