"""The state of a run, from records of its ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from hetero.observe.collect import Seen
from hetero.observe.record import LinkState, Phase, RailState, Recorder, Snapshot, Wait
from hetero.observe.state import (
    EdgeDescription,
    History,
    MeshDescription,
    Point,
    RankDescription,
    Rates,
    RunDescription,
    StageDescription,
    build_state,
    kind_of,
)

PLAN = RunDescription(
    world_size=4,
    ranks=tuple(
        RankDescription(
            rank=rank,
            host="ab"[rank // 2],
            vendor=("amd", "nvidia")[rank // 2],
            mesh=rank // 2,
            stage=rank // 2,
            data=rank % 2,
            tensor=0,
            is_simulated=rank > 1,
        )
        for rank in range(4)
    ),
    meshes=(
        MeshDescription(mesh=0, vendor="amd", tensor=1, context=1, data=2, stages=(0,)),
        MeshDescription(mesh=1, vendor="nvidia", tensor=1, context=1, data=2, stages=(1,)),
    ),
    stages=(
        StageDescription(stage=0, mesh=0, layers=3, ranks=(0, 1)),
        StageDescription(stage=1, mesh=1, layers=5, ranks=(2, 3)),
    ),
    edges=(EdgeDescription(source=0, target=1, is_boundary=True),),
    total_iterations=100,
)


def snapshot(rank: int, *, forward: float = 0.0, waiting: float = 0.0, **more: Any) -> Snapshot:
    spent: dict[str, float] = {Phase.FORWARD: forward, Phase.WAIT_NEXT: waiting}
    return Snapshot(rank=rank, pid=1, host="ab"[rank // 2], phase_seconds=spent, **more)


def seen(*snapshots: Snapshot, age: float = 0.0) -> dict[int, Seen]:
    return {each.rank: Seen(each, age) for each in snapshots}


def state(before: dict[int, Seen], after: dict[int, Seen], seconds: float = 10.0) -> dict[str, Any]:
    rates = Rates()
    rates.look(before, 100.0)
    rates.look(after, 100.0 + seconds)
    return build_state(PLAN, after, rates=rates)


def busy(*forward: float, seconds: float = 10.0) -> dict[str, Any]:
    """Each rank has computed for so long and waited for the rest of the time."""
    start = seen(*(snapshot(rank) for rank in range(4)))
    end = seen(
        *(snapshot(rank, forward=each, waiting=seconds - each) for rank, each in enumerate(forward))
    )
    return state(start, end, seconds)


def test_the_time_of_a_stage_is_the_mean_of_its_ranks() -> None:
    first, second = busy(2.0, 4.0, 8.0, 8.0)["stages"]
    assert first["shares"] == pytest.approx({"busy": 0.3, "waiting": 0.7, "data": 0, "rest": 0})
    assert second["shares"]["busy"] == pytest.approx(0.8)


def test_the_stage_that_waits_least_is_named() -> None:
    assert busy(2.0, 4.0, 8.0, 8.0)["bottleneck"]["stage"] == 1
    assert busy(9.0, 9.0, 8.0, 8.0)["bottleneck"]["stage"] == 0


def test_a_rank_slower_than_its_peers_is_a_straggler() -> None:
    (found,) = busy(2.0, 2.0, 4.0, 6.0)["stragglers"]
    assert (found["rank"], found["stage"], found["factor"]) == (3, 1, 1.5)


def test_a_slower_vendor_or_stage_has_no_stragglers() -> None:
    assert busy(2.0, 2.0, 8.0, 8.0)["stragglers"] == []


def test_ranks_are_not_compared_before_they_were_watched_for_a_while() -> None:
    found = busy(0.2, 0.2, 0.2, 0.9, seconds=1.0)
    assert found["stragglers"] == []
    assert found["ranks"][3]["shares"]["busy"] == pytest.approx(0.9)


def test_without_an_earlier_record_there_are_no_rates() -> None:
    only = seen(*(snapshot(rank, forward=1.0) for rank in range(4)))
    rates = Rates()
    rates.look(only, 100.0)
    found = build_state(PLAN, only, rates=rates)
    assert not found["has_rates"]
    assert [stage["shares"] for stage in found["stages"]] == [None, None]


def test_a_record_seen_again_makes_no_rate_of_nothing() -> None:
    rates = Rates()
    for now, age in ((100.0, 0.0), (101.0, 0.0), (102.0, 1.0), (103.0, 2.0)):
        rates.look({0: Seen(snapshot(0, forward=min(now, 101.0)), age)}, now)
    found = rates.of(0)
    assert found is not None
    assert found.shares["busy"] == 1.0


def link(peer: int, sent: int, **more: Any) -> LinkState:
    rails = (RailState(name="tcp 0"), RailState(name="tcp 1", state="lost"))
    return LinkState(
        peer=peer, transport="tcp", is_boundary=True, bytes_sent=sent, rails=rails, **more
    )


def test_bandwidth_is_bytes_over_time_summed_over_the_links_of_two_stages() -> None:
    def records(bytes_sent: int) -> dict[int, Seen]:
        peers = {0: 2, 1: 3, 2: 0, 3: 1}
        return seen(
            *(
                snapshot(rank, links=(link(peer, bytes_sent * (1 + rank // 2), queued=rank),))
                for rank, peer in peers.items()
            )
        )

    (edge,) = state(records(1000), records(6000))["edges"]
    assert edge["forward_per_second"] == 2 * 500
    assert edge["backward_per_second"] == 2 * 1000
    assert edge["transports"] == ["tcp"]
    assert edge["rails"] == {"up": 4, "lost": 4}
    assert edge["queued"] == 6


def test_ages_grow_until_the_next_record() -> None:
    wait = Wait(what="receive message 1", seconds=4.0, peers=(1,))
    found = build_state(PLAN, seen(snapshot(0, seconds=2.0, waits=(wait,)), age=3.0), rates=Rates())
    rank = found["ranks"][0]
    assert (rank["phase_seconds"], rank["waits"][0]["seconds"]) == (5.0, 7.0)
    assert found["waiting_for"] == [{"rank": 1, "ranks_waiting": 1, "seconds": 7.0}]


def test_a_rank_that_sends_nothing_more_is_silent() -> None:
    records = seen(snapshot(0), snapshot(1)) | seen(snapshot(2), age=9.0)
    found = build_state(PLAN, records, rates=Rates(), silent_after=6.0)
    assert found["silent"] == [2]
    assert found["ranks"][3]["phase"] is None  # has never sent one


def test_simulated_vendors_are_called_so() -> None:
    found = build_state(PLAN, {}, rates=Rates())
    assert found["is_simulated"]
    assert [mesh["is_simulated"] for mesh in found["meshes"]] == [False, True]


def test_throughput_is_shown_against_the_prediction_if_there_is_one() -> None:
    records = seen(snapshot(0, values={"tokens_per_s": 80.0, "iteration": 7.0, "loss": 2.0}))
    found = build_state(replace(PLAN, predicted_tokens_per_second=100.0), records, rates=Rates())
    assert found["prediction"] == {"tokens_per_second": 100.0, "reached": 0.8}
    assert found["progress"]["values"] == {"loss": 2.0}
    assert found["progress"]["completed_iterations"] == 7
    assert build_state(PLAN, records, rates=Rates())["prediction"] is None


def test_a_script_without_a_plan_has_ranks_and_links() -> None:
    records = seen(snapshot(0, links=(link(1, 10),)), snapshot(1))
    found = build_state(RunDescription(world_size=2), records, rates=Rates())
    assert [rank["host"] for rank in found["ranks"]] == ["a", "a"]
    assert found["ranks"][0]["links"][0]["bytes_sent"] == 10
    assert (found["meshes"], found["stages"], found["edges"]) == ([], [], [])


def test_it_is_json() -> None:
    found = busy(1.0, 2.0, 3.0, 4.0)
    assert json.loads(json.dumps(found, allow_nan=False))["ranks"] == found["ranks"]


def test_a_large_world_is_told_without_the_links_of_each_rank() -> None:
    def links(world_size: int) -> int:
        records = {rank: Seen(snapshot(0, links=(link(1, 10),)), 0.0) for rank in range(world_size)}
        found = build_state(RunDescription(world_size=world_size), records, rates=Rates())
        assert len(found["ranks"]) == world_size
        return sum(len(rank["links"]) for rank in found["ranks"])

    assert links(1024) == 1024
    assert links(1025) == 0


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_counts_as_one_kind(phase: Phase) -> None:
    assert kind_of(phase) in ("busy", "waiting", "data", "rest")


def test_a_long_history_keeps_its_ends_and_stays_bounded() -> None:
    history = History(most=64)
    for iteration in range(1, 10_001):
        history.add(Point(iteration, 1.0 / iteration, 0.5, 100.0))
        assert len(history.as_json()["loss"]) <= 64
    iterations = history.as_json()["iteration"]
    assert iterations[0] == 1
    assert iterations[-1] > 9_500
    assert len(iterations) >= 16
    assert iterations == sorted(set(iterations))


def test_an_iteration_is_kept_once_however_often_it_is_looked_at() -> None:
    recorder, history = Recorder(), History()
    history.look(recorder)
    for iteration in (1, 2):
        values = {"iteration": float(iteration), "loss": 3.0}
        recorder.end_iteration(seconds=0.5, tokens=10, values=values)
        history.look(recorder)
        history.look(recorder)
    assert history.as_json()["iteration"] == [1, 2]
