"""Who holds a run up: sentences from records."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.observe import blame as blame_module
from hetero.observe.blame import Cause, HostProcess, Surroundings
from hetero.observe.collect import Seen
from hetero.observe.record import (
    WAITING,
    CallState,
    LinkState,
    Phase,
    ProcessState,
    Snapshot,
    Wait,
)
from hetero.startup.liveness import silent_after

blame = partial(blame_module.blame, silent_after=6.0)

NAMES = {
    rank: f"rank {rank} on {'ab'[rank // 2]} (stage {rank // 2}, {('amd', 'nvidia')[rank // 2]})"
    for rank in range(4)
}
AROUND = Surroundings(
    names=NAMES,
    previous={0: (), 1: (), 2: (0,), 3: (1,)},
    following={0: (2,), 1: (3,), 2: (), 3: ()},
    replicas={0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)},
    ends=(0, 1, 2, 3),
)


def seen(rank: int, phase: str, seconds: float = 20.0, *, age: float = 0.5, **values) -> Seen:
    values = {"iteration": 7, **values}
    return Seen(
        Snapshot(
            rank=rank, pid=100 + rank, host="ab"[rank // 2], phase=phase, seconds=seconds, **values
        ),
        age,
    )


def by_rank(*found: Seen) -> dict[int, Seen]:
    return {one.snapshot.rank: one for one in found}


def message(peer: int, seconds: float = 20.0) -> Wait:
    return Wait(what=f"message 12 (activations) from rank {peer}", seconds=seconds, peers=(peer,))


WAITS_FOR_0 = seen(2, Phase.WAIT_PREVIOUS, waits=(message(0),))


@pytest.mark.parametrize(
    ("culprit", "cause", "words"),
    [
        (seen(0, Phase.DATA, 40.0), Cause.DATA, "has been in its data loader for 40 s"),
        (
            seen(0, Phase.DATA, 40.0, frame="loader.py:7 in read"),
            Cause.DATA,
            "in its data loader for 40 s (at loader.py:7 in read)",
        ),
        (seen(0, Phase.SAVE), Cause.SAVE, "has been saving a checkpoint for 20 s"),
        (
            seen(0, Phase.WAIT_NEXT, waits=(message(2),), process=ProcessState(main_thread="t")),
            Cause.DEBUGGED,
            "is held by a debugger: that has stopped the main thread of its process 100",
        ),
        (
            seen(0, Phase.SAVE, process=ProcessState(main_thread="D")),
            Cause.SAVE,
            "a checkpoint for 20 s, in disk sleep: its file system does not answer",
        ),
        (
            seen(0, Phase.FORWARD, process=ProcessState(main_thread="R", cpu=1.0)),
            Cause.COMPUTE,
            "computes on one core without an end, in phase 'forward' for 20 s",
        ),
        (
            seen(0, Phase.FORWARD, process=ProcessState(main_thread="R", cpu=0.5, queued=0.49)),
            Cause.COMPUTE,
            "computes on one core without an end",
        ),
        (
            seen(0, Phase.FORWARD, process=ProcessState(main_thread="D")),
            Cause.DISK,
            "is in disk sleep",
        ),
        (
            seen(0, Phase.FORWARD, process=ProcessState(main_thread="D", major_faults=900.0)),
            Cause.SWAPPING,
            "swaps: 900 pages a second are read from disk",
        ),
        (
            seen(0, Phase.GRAD_SYNC),
            Cause.BUSY,
            "is in phase 'grad sync' for 20 s, and in no call of a group or link",
        ),
        (
            seen(0, Phase.FORWARD, micro_batch=3),
            Cause.BUSY,
            "is in phase 'forward' of micro-batch 3 for 20 s",
        ),
        (
            seen(
                0,
                Phase.GRAD_SYNC,
                calls=(
                    CallState(
                        group="5",
                        sequence=9,
                        operation="allreduce",
                        state="started",
                        seconds=19.0,
                        in_library=True,
                    ),
                ),
            ),
            Cause.LIBRARY,
            "inside its vendor's library for 19 s: allreduce as number 9 of group 5",
        ),
        (seen(0, Phase.FORWARD, age=30.0), Cause.SILENT, "has sent no record for 30 s"),
    ],
)
def test_the_rank_that_the_others_wait_for_is_named_with_what_it_does(culprit, cause, words):
    (finding,) = blame(by_rank(culprit, WAITS_FOR_0), AROUND)
    assert (finding.cause, finding.ranks, finding.waiting) == (cause, (0,), (2,))
    assert finding.sentence.startswith(
        f"{NAMES[2]} waits 20 s for message 12 (activations) from {NAMES[0]}, which "
    )
    assert words in finding.sentence


@pytest.mark.parametrize(
    ("process", "cause", "words"),
    [
        (HostProcess(exists=True, state="T"), Cause.STOPPED, "its process 100 got SIGSTOP"),
        (
            HostProcess(exists=True, state="t", tracer=77),
            Cause.DEBUGGED,
            "process 77 traces its process 100",
        ),
        (HostProcess(exists=False), Cause.GONE, "its process 100 is gone"),
        (HostProcess(exists=True, state="Z"), Cause.GONE, "its process 100 is gone"),
        (HostProcess(exists=True, state="D"), Cause.DISK, "or its cgroup is frozen"),
        (HostProcess(exists=True, state="R"), Cause.SILENT, "does not give Python's lock back"),
    ],
)
def test_of_a_silent_rank_it_says_what_the_kernel_of_its_host_knows(process, cause, words):
    around = replace(AROUND, processes={0: process})
    (finding,) = blame(by_rank(seen(0, Phase.FORWARD, age=12.0), WAITS_FOR_0), around)
    assert finding.cause == cause
    assert words in finding.sentence
    assert "12 s ago it was in phase 'forward'" in finding.sentence


def test_a_stopped_process_is_named_before_its_silence_means_anything():
    around = replace(AROUND, processes={0: HostProcess(exists=True, state="T")})
    (finding,) = blame(by_rank(seen(0, Phase.WAIT_NEXT, age=3.0), WAITS_FOR_0), around)
    assert (finding.cause, finding.ranks) == (Cause.STOPPED, (0,))


def test_a_late_record_of_a_process_that_runs_means_nothing():
    around = replace(AROUND, processes={0: HostProcess(exists=True, state="R")})
    (finding,) = blame(by_rank(seen(0, Phase.DATA, age=3.0), WAITS_FOR_0), around)
    assert finding.cause == Cause.DATA


def test_the_root_of_a_collective_waits_for_those_that_are_behind():
    wait = Wait(what="broadcast", seconds=20.0, peers=(0,), group="g", sequence=9)
    behind = CallState(group="g", sequence=8, operation="broadcast", state="completed", seconds=20)
    found = by_rank(
        seen(0, Phase.OTHER, waits=(wait,)), seen(1, Phase.SAVE, calls=(behind,)), WAITS_FOR_0
    )
    (finding,) = blame(found, AROUND)
    assert (finding.cause, finding.ranks) == (Cause.SAVE, (1,))


def test_a_host_that_does_not_answer_is_told_once_for_all_its_ranks():
    around = replace(AROUND, answers={2: False, 3: False})
    found = by_rank(
        seen(0, Phase.WAIT_NEXT, waits=(message(2),)),
        seen(1, Phase.WAIT_NEXT, waits=(message(3),)),
        *(seen(rank, Phase.FORWARD, age=4.0) for rank in (2, 3)),
    )
    (finding,) = blame(found, around)
    assert (finding.cause, finding.waiting) == (Cause.UNREACHABLE, (0, 1))
    assert "its host b (with rank 3) does not answer a, the host of rank 0" in finding.sentence
    assert "the network between the two is cut; 4 s ago it was in phase" in finding.sentence


def test_a_process_that_hangs_alone_on_its_host_is_told_from_a_host_that_is_gone():
    around = replace(AROUND, answers={0: True})
    (finding,) = blame(by_rank(seen(0, Phase.FORWARD, age=12.0), WAITS_FOR_0), around)
    assert finding.cause == Cause.SILENT
    assert "although its host a answers: its process 100 hangs, or is stopped" in finding.sentence


def test_a_call_of_the_library_that_no_rank_misses_is_told_with_all_its_ranks():
    call = CallState(
        group="5", sequence=9, operation="gather", state="started", seconds=19.0, in_library=True
    )
    found = by_rank(*(seen(rank, Phase.WAIT_ALL, calls=(call,)) for rank in range(4)))
    (finding,) = blame(found, AROUND)
    assert (finding.cause, finding.ranks) == (Cause.LIBRARY, (0, 1, 2, 3))
    assert finding.sentence.endswith(
        "are inside the same call of their vendor's library for 19 s: gather as number 9 of group "
        "5; no rank is missing in it: the library hangs, or the network that it uses"
    )


@pytest.mark.parametrize(
    ("sent", "queued", "cause"),
    [(13, 0, Cause.NETWORK), (12, 0, Cause.CYCLE), (13, 1, Cause.CYCLE)],
)
def test_a_message_that_has_left_its_sender_and_does_not_arrive_is_the_networks(
    sent, queued, cause
):
    link = LinkState(peer=0, is_boundary=True, messages_sent=sent, sends_queued=queued)
    found = by_rank(
        seen(0, Phase.WAIT_NEXT, waits=(replace(message(2), message=12),)),
        seen(2, Phase.WAIT_PREVIOUS, waits=(message(0),), links=(link,)),
    )
    (finding,) = blame(found, AROUND)
    assert (finding.cause, finding.ranks) == (cause, (0, 2))
    if cause == Cause.NETWORK:
        assert f"from {NAMES[2]}, which has sent it: the network between b and a" in (
            finding.sentence
        )


def test_a_chain_is_followed_to_its_end_and_the_others_are_counted():
    (finding,) = blame(
        by_rank(
            seen(0, Phase.DATA, 40.0),
            seen(1, Phase.GRAD_SYNC, iteration=7),
            WAITS_FOR_0,
            seen(3, Phase.WAIT_PREVIOUS, waits=(message(1, 15.0),)),
        ),
        AROUND,
    )
    assert (finding.ranks, finding.waiting) == ((0,), (1, 2, 3))
    assert "wait" in finding.sentence
    assert finding.sentence.count("which") >= 1


def test_without_a_message_the_phase_says_who_is_waited_for():
    (finding,) = blame(by_rank(seen(0, Phase.SAVE), seen(2, Phase.WAIT_PREVIOUS)), AROUND)
    assert finding.ranks == (0,)
    assert f"{NAMES[2]} waits 20 s in phase 'wait prev' for {NAMES[0]}" in finding.sentence


def test_where_all_reduce_gradients_the_one_that_has_not_come_is_named():
    found = by_rank(
        seen(0, Phase.GRAD_SYNC),
        seen(1, Phase.BACKWARD),
        seen(2, Phase.WAIT_ALL),
        seen(3, Phase.WAIT_ALL),
    )
    (finding,) = blame(found, AROUND)
    assert finding.ranks == (1,)
    assert finding.waiting == (0, 2, 3)


def test_two_ranks_that_wait_for_each_other_are_both_named():
    sends = {
        rank: Wait(what=f"message 3 to rank {1 - rank}", seconds=30.0, peers=(1 - rank,))
        for rank in (0, 1)
    }
    (finding,) = blame(
        by_rank(*(seen(r, Phase.OTHER, waits=(sends[r],)) for r in (0, 1))),
        Surroundings(names=NAMES),
    )
    assert (finding.cause, finding.ranks) == (Cause.CYCLE, (0, 1))
    assert finding.sentence.startswith("these ranks wait for each other: ")
    assert "message 3 to" in finding.sentence


def test_a_rank_that_has_sent_nothing_is_named():
    (finding,) = blame(by_rank(seen(0, Phase.FORWARD, 0.1)), AROUND, expected=(0, 2))
    assert (finding.ranks, finding.cause) == ((2,), Cause.SILENT)


def test_a_record_is_old_only_beyond_what_heartbeats_of_so_many_ranks_take():
    late = by_rank(seen(0, Phase.FORWARD, 0.1), seen(2, Phase.FORWARD, 0.1, age=12.0))
    (finding,) = blame_module.blame(late, AROUND, silent_after=silent_after(4))
    assert finding.ranks == (2,)
    assert blame_module.blame(late, AROUND, silent_after=silent_after(16_384)) == []


def test_a_run_that_goes_on_has_no_findings():
    assert blame(by_rank(*(seen(r, Phase.FORWARD, 0.1) for r in range(4))), AROUND) == []


@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(Phase)),
            st.floats(0.0, 100.0),
            st.floats(0.0, 20.0),
            st.none() | st.integers(0, 3),
        ),
        min_size=2,
        max_size=4,
    )
)
def test_the_end_of_a_chain_waits_for_nobody_that_is_known_or_is_a_cycle(ranks):
    found = {}
    for rank, (phase, seconds, age, peer) in enumerate(ranks):
        waits = () if peer in (None, rank) or peer >= len(ranks) else (message(peer, seconds),)
        found[rank] = seen(rank, phase, seconds, age=age, waits=waits)
    for finding in blame(found, AROUND, expected=range(len(ranks))):
        assert finding.sentence
        if finding.cause == Cause.CYCLE:
            assert len(finding.ranks) > 1
            continue
        (end,) = finding.ranks
        snapshot = found[end].snapshot
        named = [wait for wait in snapshot.waits if wait.seconds >= 1.0]
        is_silent = found[end].age > 6.0
        assert is_silent or not named or snapshot.phase not in WAITING or not named[0].peers


def test_a_rank_of_a_script_outside_its_calls_is_told_with_its_line() -> None:
    wait = Wait(what="all_reduce as number 3 of 0", seconds=70.0, peers=(1,), group="0", sequence=3)
    found = by_rank(
        seen(0, Phase.SCRIPT, 900.0, waits=(wait,)),
        seen(1, Phase.SCRIPT, 900.0, frame="train.py:30 in read"),
    )
    (finding,) = blame(found, Surroundings(names={0: "rank 0 on a", 1: "rank 1 on b"}))
    assert finding.ranks == (1,)
    assert finding.sentence == (
        "rank 0 on a waits 70 s in all_reduce as number 3 of 0 for rank 1 on b, which is in no "
        "call of a group (at train.py:30 in read)"
    )
