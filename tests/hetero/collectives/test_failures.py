"""What each rank is told when a call fails: who is at fault, where, and what the others called."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetero.collectives import failures
from hetero.collectives.failures import (
    ABORTED,
    IDLE,
    IN_A_CALL,
    LEFT,
    RankStatus,
    Report,
    Statuses,
    explain,
)
from hetero.collectives.layout import Layout, Member
from hetero.collectives.work import Call, CollectiveError
from hetero.errors import LinkError
from tests.forked_ranks import Outcome, values
from tests.hetero.collectives.ranks import (
    THREE_AND_ONE,
    TIMEOUT,
    TWO_AND_TWO,
    Side,
    run_ranks,
)
from tests.hetero.link.joined import wait_for

SHORT = timedelta(seconds=3)


@pytest.fixture(scope="module")
def told() -> list[dict[str, str]]:
    """By rank: what each case's call ended with. One set of processes for all cases."""
    return values(run_ranks(fail_in_every_way, TWO_AND_TWO))


def fail_in_every_way(side: Side) -> dict[str, str]:
    cases = (
        other_operation,
        other_size,
        other_sizes,
        other_splits,
        other_order,
        absent,
        late_to_the_next_call,
        later_than_the_call_may_take,
        later_than_other_calls_may_take,
        aborted,
        refused,
    )
    told = {}
    for case in cases:
        group = dist.new_group()
        dist.all_reduce(torch.ones(3), group=group)
        # Only now: a busy machine may take longer to build a group and its links.
        group.set_timeout(SHORT)
        try:
            case(side, group)
            told[case.__name__] = "nothing"
        except Exception as error:
            told[case.__name__] = f"{type(error).__name__}: {error}"
        side.say(f"{case.__name__}/{side.rank}")
        for rank in range(side.size):
            side.hear(f"{case.__name__}/{rank}")
    return told


def other_operation(side, group):
    """One rank calls a broadcast where the others reduce."""
    tensor = torch.ones(8)
    dist.broadcast(tensor, 0, group=group) if side.rank == 3 else dist.all_reduce(
        tensor, group=group
    )


def other_size(side, group):
    dist.all_reduce(torch.ones(9 if side.rank == 2 else 8), group=group)


def other_sizes(side, group):
    """Every rank has another size, and one is mistaken about the last of them."""
    last = 5 if side.rank == 2 else side.size
    sizes = [*range(1, side.size), last]
    parts = [torch.empty(size) for size in sizes]
    dist.all_gather(parts, torch.ones(sizes[side.rank]), group=group)


def other_splits(side, group):
    """One rank gives another of its vendor more than that one takes."""
    given = [0, 6, 3, 3] if side.rank == 0 else [3] * side.size
    dist.all_to_all_single(torch.empty(12), torch.ones(12), [3] * side.size, given, group=group)


def other_order(side, group):
    """A rank has the operations of a later call first."""
    calls = [
        lambda: dist.all_reduce(torch.ones(8), group=group),
        lambda: dist.all_reduce(torch.ones(8, dtype=torch.int32), group=group),
    ]
    for call in reversed(calls) if side.rank == 2 else calls:
        call()


def absent(side, group):
    """A rank does something else; it is asked why, and answers."""
    if side.rank == 1:
        side.hear("absent/0")
        return
    dist.all_reduce(torch.ones(8), group=group)


def late_to_the_next_call(side, group):
    """A group that has failed says so at once, whatever is called."""
    if side.rank != 0:
        try:
            dist.all_reduce(torch.ones(8), group=group)
        except Exception:
            # Both would wait for rank 0, which comes once rank 1 has been told.
            group.set_timeout(timedelta(seconds=TIMEOUT))
            with pytest.raises(CollectiveError):
                dist.recv(torch.ones(8), 0, group=group)
            dist.barrier(group=group)
    else:
        side.hear("late_to_the_next_call/1")
        dist.barrier(group=group)


def aborted(side, group):
    if side.rank == 0:
        group.abort()
    dist.all_reduce(torch.ones(8), group=group)


def refused(side, group):
    dist.all_reduce(torch.ones(8), op=dist.ReduceOp.BXOR, group=group)


def test_a_call_that_differs_is_told_with_what_each_called(told):
    for rank, cases in enumerate(told):
        text = cases["other_operation"]
        assert "broadcast" in text, f"rank {rank}: {text}"
        assert "all_reduce" in text, f"rank {rank}: {text}"
        assert "rank 3" in text, f"rank {rank}: {text}"


def test_another_size_is_told_with_both_sizes(told):
    for rank, cases in enumerate(told):
        assert "[8]" in cases["other_size"], f"rank {rank}: {cases['other_size']}"
        assert "[9]" in cases["other_size"], f"rank {rank}: {cases['other_size']}"


def test_sizes_that_differ_for_one_rank_are_told(told):
    for rank, cases in enumerate(told):
        assert "[1, 2, 3, 4]" in cases["other_sizes"], f"rank {rank}: {cases['other_sizes']}"
        assert "[1, 2, 3, 5]" in cases["other_sizes"], f"rank {rank}: {cases['other_sizes']}"


def test_who_gives_more_than_is_taken_is_named(told):
    for rank, cases in enumerate(told[:2]):
        text = cases["other_splits"]
        assert re.search("rank 0 on .* gives (0|24) bytes to .* takes 12", text), f"{rank}: {text}"


def test_another_order_is_told(told):
    for rank, cases in enumerate(told):
        assert "int32" in cases["other_order"], f"rank {rank}: {cases['other_order']}"


def test_who_does_not_come_is_named_with_its_last_call(told):
    for rank in (0, 2, 3):
        text = told[rank]["absent"]
        assert "rank 1 on" in text, f"rank {rank}: {text}"
        assert "is in no call since all_reduce" in text, f"rank {rank}: {text}"


def test_a_group_that_has_failed_fails_at_once(told):
    for rank, cases in enumerate(told):
        text = cases["late_to_the_next_call"]
        assert text.startswith("CollectiveError"), f"rank {rank}: {text}"


def test_an_abort_ends_the_others(told):
    for rank, cases in enumerate(told):
        assert cases["aborted"].startswith("CollectiveError"), f"rank {rank}: {cases['aborted']}"
    assert "was aborted" in told[0]["aborted"]


def later_than_the_call_may_take(side, group):
    """A rank comes within the group's timeout, but not within that of the call."""
    if side.rank == 1:
        time.sleep(1.5)
    group.allreduce([torch.ones(8)], dist.ReduceOp.SUM, timedelta(seconds=0.5)).wait()


def test_a_call_that_exceeds_its_own_timeout_fails_with_that_timeout(told):
    for rank in (0, 2, 3):
        text = told[rank]["later_than_the_call_may_take"]
        assert "all_reduce (SUM, float32 [8]) as number 2" in text, f"rank {rank}: {text}"
        assert "with a timeout of 0.5 s, failed" in text, f"rank {rank}: {text}"


def later_than_other_calls_may_take(side, group):
    if side.rank == 1:
        time.sleep(SHORT.total_seconds() + 0.5)
    tensor = torch.ones(8)
    group.broadcast([tensor], 0, timedelta(seconds=30)).wait()
    dist.all_reduce(tensor, group=group)
    assert {link.description.timeout for link in group.links()} == {SHORT.total_seconds()}


def test_a_call_may_have_a_longer_timeout_than_those_after_it(told):
    assert {cases["later_than_other_calls_may_take"] for cases in told} == {"nothing"}


def test_what_is_not_supported_is_refused_on_every_rank(told):
    assert {cases["refused"].partition(":")[0] for cases in told} == {"NotImplementedError"}


@pytest.fixture(scope="module")
def ended() -> dict[Callable[[Side], Any], list[Outcome]]:
    """The outcomes of scenarios in which ranks wait for one that is gone: all at once."""
    scenarios: dict[Callable[[Side], Any], dict[str, Any]] = {
        die_in_a_call: {"vendors": THREE_AND_ONE, "timeout": 20.0},
        die_before_links_are_open: {"vendors": TWO_AND_TWO, "timeout": 30.0},
        die_in_backward: {"vendors": TWO_AND_TWO, "timeout": 20.0},
        call_a_stopped_host: {"vendors": ("nvidia", "amd"), "backend": None},
        die_with_the_store: {"vendors": TWO_AND_TWO, "backend": None},
    }
    with ThreadPoolExecutor(len(scenarios)) as pool:
        running = {one: pool.submit(run_ranks, one, **how) for one, how in scenarios.items()}
        return {one: run.result() for one, run in running.items()}


def test_a_rank_that_dies_is_named_to_all_others(ended):
    outcomes = ended[die_in_a_call]
    assert outcomes[1].exit_code == -signal.SIGKILL
    for rank in (0, 2, 3):
        assert not outcomes[rank].hung
        text = outcomes[rank].value
        assert "rank 1 on" in text, f"rank {rank}: {text}"
        assert "did not report" in text, f"rank {rank}: {text}"
        assert "all_reduce (SUM, float32 [8]) as number 2" in text, f"rank {rank}: {text}"


def die_in_a_call(side: Side) -> str:
    dist.all_reduce(torch.ones(8))
    if side.rank == 1:
        side.say("end/1")
        os.kill(os.getpid(), signal.SIGKILL)
    return end_of_a_call()


def test_only_the_rank_that_died_is_named_where_links_were_to_be_opened(ended):
    outcomes = ended[die_before_links_are_open]
    for rank in (0, 2, 3):
        assert not outcomes[rank].hung
        text = outcomes[rank].value
        assert re.search("failed on rank . on [^ ]+: rank 1 on [^ ]+ did not report", text), text


def die_before_links_are_open(side: Side) -> str:
    dist.all_reduce(torch.ones(3))
    if side.rank == 1:
        side.say("end/1")
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_to_all_single(torch.empty(side.size), torch.ones(side.size))
    except Exception as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("go", [dist.destroy_process_group, partial(os._exit, 0)])
def test_who_waits_for_a_rank_that_has_gone_is_told_so(go):
    (outcome, _) = run_ranks(wait_for_one_that_goes, ("nvidia", "amd"), go=go)
    for text in outcome.value:
        assert re.search("rank 1 on [^ ]+ has exited or left the group", text), text


def wait_for_one_that_goes(side: Side) -> list[str]:
    if side.rank == 1:
        side.say("end/1")
        side.options["go"]()
        return []
    tensor, told = torch.ones(3), []
    waits = (
        partial(dist.recv, src=1),
        partial(dist.send, dst=1),
        dist.recv,
        lambda _: dist.new_group(),
        dist.all_reduce,
    )
    for wait in waits:
        with pytest.raises(LinkError) as raised:
            wait(tensor)
        told.append(str(raised.value))
    assert re.match("receive from rank 1 on .* by rank 0 on .* with tag 0 in group 0 fail", told[0])
    assert re.match("send to rank 1 on .* by rank 0 on .* with tag 0 in group 0 fail", told[1])
    return told


def test_who_leaves_one_group_and_lives_on_is_named_to_those_who_wait_there():
    (outcome, *_) = run_ranks(wait_for_one_that_leaves_a_group, ("nvidia", "amd"))
    text, total = outcome.value
    assert re.search("rank 1 on [^ ]+ has exited or left the group", text), text
    assert total == 2.0


def wait_for_one_that_leaves_a_group(side: Side) -> tuple[str, float]:
    some, text = dist.new_group([0, 1]), ""
    if side.rank == 1:
        dist.destroy_process_group(some)
    else:
        text = end_of(lambda: dist.recv(torch.ones(3), src=1, group=some))
    total = torch.ones(1)
    dist.all_reduce(total)
    return text, total.item()


@pytest.mark.parametrize(
    ("go", "words"),
    [
        (dist.destroy_process_group, "has exited or left the group"),
        (partial(os._exit, 0), "was not done within 3 s"),
    ],
    ids=["leaves", "exits"],
)
def test_who_goes_after_rank_0_has_ended_is_named_at_once_or_at_the_timeout(go, words):
    """As a rank 0 of a job whose launcher hosts the store, and ends no other rank."""
    outcomes = run_ranks(outlive_rank_0, ("nvidia", "amd", "nvidia"), go=go)
    assert not outcomes[1].hung
    assert re.search(f"rank 2 on .*{words}", outcomes[1].value), outcomes[1].value
    assert "rank 0" not in outcomes[1].value


def outlive_rank_0(side: Side) -> str:
    dist.group.WORLD.set_timeout(SHORT)
    if side.rank == 0:
        side.say("end/0")
        side.say("gone/0")
        os._exit(0)
    side.hear("gone/0")
    if side.rank == 2:
        side.say("end/2")
        side.options["go"]()
        return ""
    return end_of(lambda: dist.recv(torch.ones(3), src=2))


def test_a_stopped_rank_that_hosts_the_store_is_a_failure_and_not_a_wait(ended):
    _, (text, then) = values(ended[call_a_stopped_host])
    assert "all_reduce (SUM, float32 [8]) as number 2 of group" in text
    assert "the process that hosts the store has not answered" in text
    assert "rank 1 - rank 0" in text
    assert then == text, "the group is at its end, and says so at once"


def call_a_stopped_host(side: Side) -> tuple[str, str]:
    open_group_whose_store_rank_0_hosts(side)
    dist.all_reduce(torch.ones(8))
    dist.group.WORLD.set_timeout(SHORT)
    if side.rank == 0:
        side.store.set("process", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        return "", ""
    stopped = int(side.store.get("process"))
    while "T (stopped)" not in Path(f"/proc/{stopped}/status").read_text():
        time.sleep(0.01)
    try:
        return end_of_a_call(), end_of_a_call()
    finally:
        os.kill(stopped, signal.SIGCONT)


def open_group_whose_store_rank_0_hosts(side: Side) -> None:
    """As where no launcher hosts it."""
    if side.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        side.store.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(side.store.get("port")), is_master=False)
    dist.init_process_group("hetero", store=store, rank=side.rank, world_size=side.size)


def end_of_a_call() -> str:
    return end_of(lambda: dist.all_reduce(torch.ones(8)))


def end_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_who_dies_with_the_store_is_named_and_the_others_are_not(ended):
    for rank in (1, 2, 3):
        outcome = ended[die_with_the_store][rank]
        assert outcome.value is not None, outcome.error
        assert "rank 0 on" in outcome.value["call"]
        assert "has exited or left the group; the process that hosts" in outcome.value["call"]
        assert "did not report" not in outcome.value["call"]
        for what in ("group", "monitored barrier"):
            assert "that hosts the store, rank 0 or the launcher, has ended" in outcome.value[what]
        assert outcome.value["group"].startswith("LinkError: group 1 could not be built")


def die_with_the_store(side: Side) -> dict[str, str]:
    open_group_whose_store_rank_0_hosts(side)
    dist.all_reduce(torch.ones(8))
    dist.group.WORLD.set_timeout(SHORT)
    if side.rank == 0:
        side.say("end/0")
        os.kill(os.getpid(), signal.SIGKILL)
    group: Any = dist.group.WORLD
    return {
        "call": end_of_a_call(),
        "group": end_of(dist.new_group),
        "monitored barrier": end_of(group.monitored_barrier),
    }


def test_a_rank_that_dies_in_the_backward_of_ddp_ends_the_others_with_its_name(ended):
    outcomes = ended[die_in_backward]
    for rank in (0, 2, 3):
        text = outcomes[rank].value
        assert text is not None, f"rank {rank} ended with {outcomes[rank].exit_code}"
        assert "rank 1 on" in text, f"rank {rank}: {text}"
        assert "did not report" in text, f"rank {rank}: {text}"


def die_in_backward(side: Side) -> str:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    loss = model(torch.ones(2, 8)).sum()
    if side.rank == 1:
        side.say("end/1")
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        loss.backward()
    except Exception as error:
        return str(error)
    return "nothing"


def test_ddp_over_models_that_differ_ends_every_rank_with_the_difference():
    for text in values(run_ranks(wrap_another_model, TWO_AND_TWO)):
        assert "params[0] in this process with sizes [5, 4]" in text, text


def wrap_another_model(side: Side) -> str:
    with pytest.raises(RuntimeError) as raised:
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 5 if side.rank == 1 else 4))
    return str(raised.value)


def test_what_this_rank_sees_to_be_wrong_is_refused_and_the_group_goes_on():
    for told in values(run_ranks(make_mistakes, ("nvidia", "amd"))):
        assert told[:6] == [
            "recv: source 9 is out of range for a group of 2 ranks; give one of 0 to 1",
            "send: destination 7 is out of range for a group of 2 ranks; give one of 0 to 1",
            "broadcast: a quantized tensor is not carried; give it to_dense() or dequantize()",
            "recv: a tensor of torch.sparse_coo is not carried; give it to_dense() or dequantize()",
            "there is no reduction MAX of sparse tensors; take SUM",
            "all_to_all: the output has 2 rows and the split sizes are [3, -1]; give 2 of 0 or "
            "more that add up to it",
        ]
        for text in told[6:]:  # the root's
            assert "for rank 0 of the group has 12 bytes and this rank's own 8" in text


def make_mistakes(side: Side) -> list[str]:
    parts, own = [torch.zeros(3) for _ in range(side.size)], torch.zeros(2)
    quantized = torch.quantize_per_tensor(own, 1.0, 0, torch.quint8)
    mistakes: list[Callable[[], object]] = [
        lambda: dist.irecv(own, group_src=9),
        lambda: dist.send(own, group_dst=7),
        lambda: dist.broadcast(quantized, 0),
        lambda: dist.recv(own.to_sparse(), 1 - side.rank),
        lambda: dist.all_reduce(own.to_sparse(), op=dist.ReduceOp.MAX),
        lambda: dist.all_to_all_single(own.clone(), own, [3, -1], [3, -1]),
    ]
    if side.rank == 0:
        mistakes += [lambda: dist.gather(own, parts), lambda: dist.scatter(own, parts)]
    told = []
    for mistake in mistakes:
        with pytest.raises((ValueError, RuntimeError), match=r"give|take") as raised:
            mistake()
        told.append(str(raised.value))
    dist.barrier()
    return told


def test_a_call_of_a_group_that_was_destroyed_fails_at_once():
    for text in values(run_ranks(call_after_the_end, ("nvidia", "amd"))):
        assert "was destroyed; make a new one" in text


def call_after_the_end(side: Side) -> str:
    """By one that has kept it, as DDP does."""
    group = dist.group.WORLD
    assert group is not None
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    loss = model(torch.ones(2)).sum()
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="was destroyed"):
        loss.backward()
    with pytest.raises(CollectiveError) as raised:
        group.allreduce([torch.ones(2)]).wait()
    return str(raised.value)


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
    """To rank 0 of the group; `statuses` in the order in which they were submitted."""
    own = next(status for status in statuses if status.rank == 0)
    return explain("dp", LAYOUT, Report(statuses), own=own, timeout=30.0)


def status(rank: int, call: Call | None = CALL, state: str = IN_A_CALL, **more) -> RankStatus:
    return RankStatus(rank=rank, state=state, call=call, **more)


def test_a_rank_that_says_nothing_is_named_with_its_host():
    text = explained(status(0), status(1))
    assert "rank 6 on host2 did not report" in text
    assert (
        "all_reduce (SUM, float32 [4, 2]) as number 7 of group dp, with a timeout of 30 s, failed"
        in text
    )


def test_ranks_that_called_different_things_are_listed():
    text = explained(status(0), status(1), status(2, OTHER))
    assert "ranks 4-5 called all_reduce (SUM, float32 [4, 2]) as number 7" in text
    assert "rank 6 on host2 (amd) called broadcast (float32 [4, 2], root 0) as number 7" in text


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


def statuses_of(store: dist.Store, rank: int, *, gone: Sequence[int] = ()) -> Statuses:
    return Statuses(
        store, replace(LAYOUT, rank=rank), has_exited=lambda member: member.rank in gone
    )


def test_statuses_are_read_as_they_were_submitted_the_first_one_first():
    store = dist.HashStore()
    boards = [statuses_of(store, rank) for rank in range(3)]
    left, own, other = status(1, None, LEFT), status(0, error="so"), status(2, None, IDLE)
    assert not boards[0].has_failure()
    boards[1].submit(left)
    assert not boards[0].has_failure(), "a rank that leaves has not failed"
    boards[2].submit(other)
    assert boards[0].has_failure()
    boards[0].submit(own)
    boards[0].submit(status(0, None, IDLE))  # as where a call fails because of an abort
    assert boards[0].collect(own, seconds=0.2) == Report([left, other, own])


def test_a_rank_has_gone_once_it_has_said_that_it_leaves_or_has_exited(monkeypatch) -> None:
    monkeypatch.setattr(failures, "_LOOK_SECONDS", 0.0)
    store = dist.HashStore()
    board, other = statuses_of(store, 0, gone=[2]), statuses_of(store, 1)
    assert [board.has_gone(member) for member in LAYOUT.members] == [False, False, True]
    other.submit(status(1, None, LEFT))
    assert board.has_gone(LAYOUT.members[1])


def test_a_rank_that_has_failed_has_not_gone(monkeypatch) -> None:
    monkeypatch.setattr(failures, "_LOOK_SECONDS", 0.0)
    store = dist.HashStore()
    statuses_of(store, 1).submit(status(1, error="so"))
    assert not statuses_of(store, 0).has_gone(LAYOUT.members[1])


class FailingStore(dist.Store):
    """A store that fails at once, or hangs, the first time that it is asked, until it goes on."""

    def __init__(self, *, hangs: bool) -> None:
        super().__init__()
        self._hangs = hangs
        self.asked = 0
        self.goes_on = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        if not self._hangs:
            raise dist.DistNetworkError("Connection was likely closed")
        if self.asked == 1:
            self.goes_on.wait(60)
        return False

    def append(self, key: str, value: str) -> None:
        raise dist.DistNetworkError("Connection was likely closed")


def test_a_store_whose_host_has_ended_is_asked_no_more():
    """Every rank that is left would else log a stack trace every 2 seconds to its end."""
    store = FailingStore(hangs=False)
    board = statuses_of(store, 0)
    assert [board.has_failure() for _ in range(3)] == [False] * 3
    assert store.asked == 1


def test_a_store_that_does_not_answer_is_asked_again(monkeypatch):
    monkeypatch.setattr(failures, "POLL_SECONDS", 0.1)
    store = FailingStore(hangs=True)
    board = statuses_of(store, 0)
    for _ in range(2):
        assert not board.has_failure()
    assert store.asked <= 1
    store.goes_on.set()
    assert wait_for(lambda: board.has_failure() or store.asked > 1)
    assert not board.has_failure()


def test_nobody_is_blamed_where_the_store_cannot_be_asked():
    own = status(0, error="the link to rank 5 timed out")
    text = explain("dp", LAYOUT, Report([own], "the store's host hangs"), own=own, timeout=30.0)
    assert text.endswith(
        "failed on rank 4 on host0: the store's host hangs (the link to rank 5 timed out)"
    )
    assert "did not report" not in text


def test_where_the_store_ended_with_its_rank_that_rank_alone_is_blamed():
    """The others cannot say that they are there, and some leave before they are asked."""
    board = statuses_of(FailingStore(hangs=False), 0, gone=[1, 2])
    own = status(0, error="the link is closed")
    board.submit(own)
    report = board.collect(own)
    assert report.store_error.startswith("rank 5 on host1 has exited or left the group; the")
    text = explain("dp", LAYOUT, report, own=own, timeout=30.0)
    assert "did not report" not in text
    assert "rank 6" not in text
    assert text.endswith("(the link is closed)")


def test_beside_who_is_to_blame_only_the_first_error_is_told():
    """Later ones name ranks that have closed their links because of it."""
    text = explained(
        status(1, error="rank 6 has closed the link"),
        status(0, error="rank 5 has closed the link"),
    )
    assert "rank 6 on host2 did not report" in text
    assert text.endswith("(rank 5 on host1: rank 6 has closed the link)")


def test_why_a_rank_aborted_the_group_is_told_once():
    text = explained(
        status(1, None, ABORTED, error="its GPU is lost"),
        status(0, error="a link is closed"),
        status(2, error="a link is closed"),
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
        status(1, error="the cause"),
        status(0, error="another rank failed"),
        status(2),
    )
    assert "rank 5 on host1: the cause" in text


def test_a_rank_that_had_gone_on_to_the_next_call_did_not_call_something_else():
    text = explained(
        status(1, error="the cause"),
        status(0, Call(8, "barrier"), error="a consequence"),
        status(2, error="a consequence"),
    )
    assert "different" not in text
    assert f"rank 5 on host1 failed in {CALL}: the cause" in text
    assert "; rank 4 on host0 (nvidia) had gone on to barrier as number 8" in text


def test_where_a_rank_has_ended_one_that_is_a_call_behind_is_not_to_blame():
    text = explained(status(0), status(1, replace(CALL, sequence=6)))
    assert "rank 6 on host2 did not report" in text
    assert "different collectives" not in text
