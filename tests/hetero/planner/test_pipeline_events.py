"""The discrete events of a pipeline, against closed forms and what must hold of any schedule."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.planner import pipeline_events
from hetero.planner.peak_memory import in_flight
from hetero.planner.pipeline_events import Chain, EdgeSeconds, Events, run_chain
from hetero.planner.pipeline_program import BACKWARD, FORWARD, compute_order
from hetero.planner.prediction import estimate_chain, least_of_chain

SECONDS = st.floats(0.1, 2.0)


@st.composite
def chains(draw: st.DrawFn, *, largest_edge: float = 0.5, chunks: int = 1) -> Chain:
    stages = draw(st.integers(2 if chunks > 1 else 1, 6))
    edges = stages if chunks > 1 else stages - 1
    rounds = draw(st.integers(1, 6))
    wires = st.builds(EdgeSeconds, st.floats(0, largest_edge), st.floats(0, 0.05))

    def passes() -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(draw(SECONDS) for _ in range(chunks)) for _ in range(stages))

    return Chain(
        passes(),
        passes(),
        tuple(draw(wires) for _ in range(edges)),
        rounds * stages if chunks > 1 else draw(st.integers(1, 20)),
        is_blocking=chunks == 1 and draw(st.booleans()),
    )


def even_chain(stages: int, micro_batches: int, *, is_blocking: bool = False) -> Chain:
    return Chain(
        ((1.0,),) * stages,
        ((2.0,),) * stages,
        (EdgeSeconds(0.0, 0.0),) * (stages - 1),
        micro_batches,
        is_blocking,
    )


@pytest.mark.parametrize("is_blocking", [False, True])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (1, 7), (2, 3), (4, 8), (6, 2)])
def test_equal_stages_take_the_time_of_the_closed_form(
    stages: int, micro_batches: int, is_blocking: bool
) -> None:
    chain = even_chain(stages, micro_batches, is_blocking=is_blocking)
    assert run_chain(chain).seconds == pytest.approx((micro_batches + stages - 1) * 3.0)


@pytest.mark.parametrize(
    ("stages", "chunks", "rounds"), [(2, 2, 2), (4, 2, 2), (4, 3, 4), (3, 4, 1)]
)
def test_interleaving_divides_the_bubble_by_the_chunks(
    stages: int, chunks: int, rounds: int
) -> None:
    chain = Chain(
        ((1.0 / chunks,) * chunks,) * stages,
        ((2.0 / chunks,) * chunks,) * stages,
        (EdgeSeconds(0.0, 0.0),) * stages,
        rounds * stages,
    )
    expected = (rounds * stages + (stages - 1) / chunks) * 3.0
    assert run_chain(chain).seconds == pytest.approx(expected)


@given(st.one_of(chains(), chains(chunks=2), chains(chunks=3)))
def test_every_pass_happens_once_and_after_what_it_needs(chain: Chain) -> None:
    events = run_chain(chain)
    expected = {
        (stage, direction, micro_batch, chunk)
        for stage in range(chain.stages)
        for direction in (FORWARD, BACKWARD)
        for micro_batch in range(chain.micro_batches)
        for chunk in range(chain.chunks)
    }
    spans = {
        (span.place, span.direction, span.micro_batch, span.chunk): span for span in events.passes
    }
    assert len(events.passes) == len(expected)
    assert spans.keys() == expected
    for (stage, direction, micro_batch, chunk), span in spans.items():
        if direction == BACKWARD:
            assert span.start >= spans[stage, FORWARD, micro_batch, chunk].end
        elif stage > 0:
            assert span.start >= spans[stage - 1, FORWARD, micro_batch, chunk].end
        elif chunk > 0:
            assert span.start >= spans[chain.stages - 1, FORWARD, micro_batch, chunk - 1].end
    no_stage_does_two_things_at_once(events, chain.stages)


def no_stage_does_two_things_at_once(events: Events, stages: int) -> None:
    for stage in range(stages):
        spans = sorted((span.start, span.end) for span in events.passes if span.place == stage)
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert start >= end - 1e-9


@given(st.one_of(chains(), chains(chunks=2)))
def test_a_stage_computes_as_long_as_its_passes_take(chain: Chain) -> None:
    events = run_chain(chain)
    for stage in range(chain.stages):
        work = sum(chain.forward[stage]) + sum(chain.backward[stage])
        assert events.busy(stage) == pytest.approx(work * chain.micro_batches)


@pytest.mark.parametrize("chain", [even_chain(3, 602), even_chain(3, 602, is_blocking=True)])
def test_of_very_many_micro_batches_the_first_are_simulated_and_the_others_repeat_them(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = replace(chain, backward=((2.0,), (3.5,), (1.0,)))
    whole = run_chain(slow)
    monkeypatch.setattr(pipeline_events, "_PLAYED", 300)
    some = run_chain(slow)
    assert len(some.passes) <= 2 * 300
    assert some.seconds == pytest.approx(whole.seconds)
    assert [some.busy(n) for n in range(3)] == pytest.approx([whole.busy(n) for n in range(3)])
    vast = run_chain(replace(slow, micro_batches=10**9))
    assert vast.seconds == pytest.approx(4.5e9, rel=1e-6)


@given(st.one_of(chains(), chains(chunks=2)), st.data())
def test_a_slower_wire_never_makes_a_step_faster(chain: Chain, data: st.DataObject) -> None:
    if not chain.edges:
        return
    index = data.draw(st.integers(0, len(chain.edges) - 1))
    edges = list(chain.edges)
    edges[index] = replace(edges[index], wire=edges[index].wire + 0.3)
    slower = replace(chain, edges=tuple(edges))
    assert run_chain(slower).seconds >= run_chain(chain).seconds - 1e-9


@given(chains())
def test_overlapping_transfers_are_never_slower_than_blocking_ones(chain: Chain) -> None:
    overlapped = run_chain(replace(chain, is_blocking=False)).seconds
    assert overlapped <= run_chain(replace(chain, is_blocking=True)).seconds + 1e-9


def test_edges_that_leave_by_the_same_rails_go_one_after_the_other() -> None:
    # Stage 1 is sent to while it sends on; with rails of its own nothing waits.
    alone = even_chain(3, 6)
    edges = (EdgeSeconds(4.0, 0.0, 0, 1), EdgeSeconds(4.0, 0.0, 2, 3))
    shared = (EdgeSeconds(4.0, 0.0, 0, 1), EdgeSeconds(4.0, 0.0, 0, 3))
    apart = run_chain(replace(alone, edges=edges)).seconds
    assert run_chain(replace(alone, edges=shared)).seconds > apart + 1.0


@settings(max_examples=300)
@given(chains())
def test_the_estimate_is_near_the_simulation(chain: Chain) -> None:
    """1F1B over stages up to 20 times apart, wires up to five times the shortest pass: 25 %."""
    chain = replace(chain, is_blocking=False)
    assert estimate_chain(chain) == pytest.approx(run_chain(chain).seconds, rel=0.25)


@settings(max_examples=300)
@given(
    st.lists(st.floats(0.85, 1.15), min_size=2, max_size=8), st.integers(1, 8), st.floats(0, 0.05)
)
def test_the_estimate_is_nearer_for_stages_that_are_nearly_balanced(
    speeds: list[float], rounds: int, wire: float
) -> None:
    chain = Chain(
        tuple((speed,) for speed in speeds),
        tuple((2 * speed,) for speed in speeds),
        (EdgeSeconds(wire, 0.0),) * (len(speeds) - 1),
        rounds * len(speeds),
    )
    assert estimate_chain(chain) == pytest.approx(run_chain(chain).seconds, rel=0.03)


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
    speeds: list[float], rounds: int, chunks: int, wire: float
) -> None:
    chain = Chain(
        tuple((speed / chunks,) * chunks for speed in speeds),
        tuple((2 * speed / chunks,) * chunks for speed in speeds),
        (EdgeSeconds(wire / chunks, 0.0),) * len(speeds),
        rounds * len(speeds),
    )
    assert estimate_chain(chain) == pytest.approx(run_chain(chain).seconds, rel=0.12)


@given(st.one_of(chains(), chains(largest_edge=5.0), chains(chunks=2)))
def test_no_schedule_is_shorter_than_the_bound_by_which_plans_are_left_out(chain: Chain) -> None:
    assert least_of_chain(chain) <= run_chain(chain).seconds * (1 + 1e-9)


def test_the_bound_by_which_plans_are_left_out_is_nearly_reached() -> None:
    chain = even_chain(4, 64)
    assert least_of_chain(chain) > 0.99 * run_chain(chain).seconds
