"""The error of a failed call, from whatever statuses the ranks have reported."""

import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from hetero.collectives import failure_report
from hetero.collectives.calls import Call
from hetero.collectives.failure_report import (
    ABORTED,
    IDLE,
    IN_A_CALL,
    LEFT,
    RankStatus,
    StatusBoard,
    StatusReport,
    explain,
)
from hetero.collectives.vendor_layout import Layout, Member

CALL = Call(7, "all_reduce", dtype="float32", shape=(4, 2), reduction="SUM")
OTHER = Call(7, "broadcast", dtype="float32", shape=(4, 2), root=0)
LAYOUT = Layout(
    tuple(
        Member(rank=r, global_rank=4 + r, host=f"host{r}", vendor=v)
        for r, v in enumerate(("nvidia", "nvidia", "amd"))
    ),
    rank=0,
)


def explained(*statuses: RankStatus) -> str:
    return explain("dp", LAYOUT, StatusReport(statuses), own=statuses[0], timeout=30.0)


def status(rank: int, call: Call | None = CALL, state: str = IN_A_CALL, **more) -> RankStatus:
    return RankStatus(rank=rank, state=state, call=call, **more)


def test_a_rank_that_says_nothing_is_named_with_its_host():
    text = explained(status(0), status(1))
    assert "rank 6 on host2 said nothing" in text
    assert (
        "all_reduce (SUM, float32 [4, 2]) as number 7 of group dp, whose timeout is 30 s, failed"
        in text
    )


def test_ranks_that_called_different_things_are_listed():
    text = explained(status(0), status(1), status(2, OTHER))
    assert "ranks 4-5 called all_reduce (SUM, float32 [4, 2]) as number 7" in text
    assert "rank 6 called broadcast (float32 [4, 2], root 0) as number 7" in text


@pytest.mark.parametrize(
    ("state", "words"), [(IDLE, "is in no call since"), (LEFT, "has left the group since")]
)
def test_a_rank_that_did_not_come_is_named_with_its_last_call(state, words):
    last = Call(6, "barrier")
    assert f"rank 5 on host1 {words} barrier as number 6" in explained(
        status(0), status(1, last, state), status(2)
    )


def test_where_all_called_the_same_the_reason_itself_is_told():
    text = explained(status(0, error="the wire is cut"), status(1), status(2))
    assert text.count("the wire is cut") == 1


def test_statuses_are_read_as_they_were_published():
    board = StatusBoard(dist.HashStore(), LAYOUT, has_gone=lambda _: False)
    own, other = status(0, error="so"), status(2, None, IDLE)
    board.publish(other)
    assert not board.has_failure()
    board.publish(own, failed=True)
    assert board.has_failure()
    assert board.collect(own, seconds=0.2) == StatusReport([own, other])


class FailingStore(dist.Store):
    """A store that fails at once, or hangs, the first time that it is asked."""

    def __init__(self, *, hangs: bool) -> None:
        super().__init__()
        self._hangs = hangs
        self.asked = 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        if not self._hangs:
            raise dist.DistNetworkError("Connection was likely closed")
        if self.asked == 1:
            time.sleep(0.5)
        return True


def test_a_store_whose_host_has_ended_is_asked_no_more():
    """Every rank that is left would else log a stack trace every 2 seconds to its end."""
    store = FailingStore(hangs=False)
    board = StatusBoard(store, LAYOUT, has_gone=lambda _: False)
    assert [board.has_failure() for _ in range(3)] == [False] * 3
    assert store.asked == 1


def test_a_store_that_does_not_answer_is_asked_again(monkeypatch):
    monkeypatch.setattr(failure_report, "POLL_SECONDS", 0.1)
    board = StatusBoard(FailingStore(hangs=True), LAYOUT, has_gone=lambda _: False)
    assert not board.has_failure()
    time.sleep(0.6)
    assert board.has_failure()


def test_nobody_is_blamed_where_the_store_cannot_be_asked():
    own = status(0, error="the link to rank 5 timed out")
    text = explain(
        "dp", LAYOUT, StatusReport([own], "the store's host hangs"), own=own, timeout=30.0
    )
    assert text.endswith(
        "failed on rank 4 on host0: the store's host hangs (the link to rank 5 timed out)"
    )
    assert "said nothing" not in text


def test_where_the_store_ended_with_its_rank_that_rank_alone_is_blamed():
    """The others cannot say that they are there, and some leave before they are asked."""
    board = StatusBoard(FailingStore(hangs=False), LAYOUT, has_gone=lambda member: member.rank > 0)
    own = board.publish(status(0, error="the link is closed"), failed=True)
    report = board.collect(own)
    assert report.store_error.startswith("rank 5 on host1 has ended, or has left the group; the")
    text = explain("dp", LAYOUT, report, own=own, timeout=30.0)
    assert "said nothing" not in text
    assert "rank 6" not in text
    assert text.endswith("(the link is closed)")


def test_beside_who_is_to_blame_only_the_first_error_is_told():
    """Later ones name ranks that have closed their links because of it."""
    text = explained(
        status(0, error="rank 5 has closed the link", failure_order=2),
        status(1, error="rank 6 has closed the link", failure_order=1),
    )
    assert "rank 6 on host2 said nothing" in text
    assert text.endswith("(rank 5 on host1: rank 6 has closed the link)")


def test_why_a_rank_aborted_the_group_is_told_once():
    text = explained(
        status(0, error="a link is closed", failure_order=2),
        status(1, None, ABORTED, error="its GPU is lost", failure_order=1),
        status(2, error="a link is closed", failure_order=3),
    )
    assert text.endswith("rank 5 on host1 aborted the group: its GPU is lost")


def test_calls_that_differ_in_anything_have_other_tags():
    calls = [CALL, OTHER, replace(CALL, sequence=8), replace(CALL, shape=(2, 4))]
    calls += [replace(CALL, dtype="int32"), replace(CALL, reduction="MAX"), replace(OTHER, root=1)]
    assert len({call.tag for call in calls}) == len(calls)
    assert all(0 <= call.tag < 2**32 for call in calls)
    assert replace(CALL).tag == CALL.tag


def test_of_several_errors_the_first_one_is_told():
    text = explained(
        status(0, error="another rank failed", failure_order=2),
        status(1, error="the cause", failure_order=1),
        status(2),
    )
    assert "rank 5 on host1: the cause" in text


def test_a_rank_that_had_gone_on_to_the_next_call_did_not_call_something_else():
    text = explained(
        status(0, Call(8, "barrier"), error="a consequence", failure_order=2),
        status(1, error="the cause", failure_order=1),
        status(2, error="a consequence", failure_order=3),
    )
    assert "different" not in text
    assert f"rank 5 on host1 failed in {CALL}: the cause" in text
    assert "; rank 4 had gone on to barrier as number 8" in text


def test_where_a_rank_has_ended_one_that_is_a_call_behind_is_not_to_blame():
    text = explained(status(0), status(1, replace(CALL, sequence=6)))
    assert "rank 6 on host2 said nothing" in text
    assert "different things" not in text
