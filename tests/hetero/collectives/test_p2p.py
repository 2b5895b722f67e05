"""Messages between CPUs, between GPUs, whose streams are emulated, and of a rank to itself."""

from __future__ import annotations

import queue
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetero.collectives.layout import Layout, Member
from hetero.collectives.p2p import CpuP2P, GpuP2P, OwnMessages, P2PWork
from hetero.collectives.work import CollectiveWork, SideStream
from hetero.errors import LinkError
from hetero.link.base import Link, as_bytes
from tests.forked_ranks import values
from tests.hetero.collectives.ranks import Side, open_group, run_ranks
from tests.hetero.link.joined import wait_for
from tests.hetero.link.ring.pair import LARGE, SHORT, Pair, opened
from tests.hetero.link.test_handshake import both, both_well

MEMBERS = tuple(
    Member(rank=rank, global_rank=rank, host="here", vendor=vendor)
    for rank, vendor in enumerate(("nvidia", "amd"))
)


class End:
    """One end's messages of CPU tensors to the other."""

    def __init__(self, rank: int, link: Any) -> None:
        links: Any = LateLinks(link)
        links.closed = threading.Event()
        links.close = lambda: (links.closed.set(), link.close())
        self._peer = 1 - rank
        self._p2p = CpuP2P(layout=Layout(MEMBERS, rank), links=links)

    def send(self, tensor: torch.Tensor, tag: int = 0) -> CollectiveWork:
        work = self._work(tensor, 20.0)
        self._p2p.send(tensor, self._peer, tag, work)
        return work

    def recv(self, tensor: torch.Tensor, tag: int = 0, *, seconds: float = 20.0) -> CollectiveWork:
        work = self._work(tensor, seconds)
        self._p2p.recv(tensor, self._peer, tag, work, lambda: None)
        return work

    @property
    def posted(self) -> int:
        """Receives whose message has not begun to come."""
        return len(self._p2p._posted)

    def close(self, why: LinkError | None = None) -> list[threading.Thread]:
        """End it as a group does; the threads that it has left."""
        self._p2p.close(why)
        return [thread for thread in self._p2p._threads if thread.is_alive()]

    def _work(self, tensor: torch.Tensor, seconds: float) -> CollectiveWork:
        return CpuP2P.new_work("a message", [tensor], timeout=seconds, group="0")


def test_threads_that_send_first_at_once_share_a_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    new_queue = queue.SimpleQueue

    def slow_queue() -> Any:
        time.sleep(0.05)
        return new_queue()

    monkeypatch.setattr(queue, "SimpleQueue", slow_queue)
    with opened() as pair:
        left, right = End(0, pair.sender), End(1, pair.receiver)
        targets = [torch.zeros(3), torch.zeros(3)]
        works = [right.recv(target, tag) for tag, target in enumerate(targets)]
        both_well(*(lambda tag=tag: left.send(torch.ones(3), tag) for tag in range(2)))
        assert all(work.wait() for work in works)
        assert len(left._p2p._threads) == 1
        left.close(), right.close()


def test_a_receive_whose_time_is_over_takes_no_message_from_the_next() -> None:
    with opened() as pair:
        left, right = End(0, pair.sender), End(1, pair.receiver)
        given_up, again = torch.zeros(3), torch.zeros(3)
        with pytest.raises(LinkError, match=r"was not done within 0\.1 s"):
            right.recv(given_up, seconds=0.1).wait()
        work = right.recv(again)
        left.send(torch.ones(3))
        work.wait()
        assert (given_up == 0).all()
        assert (again == 1).all()


def test_a_receive_posted_while_its_message_is_read_gets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened() as pair:
        left, right = End(0, pair.sender), End(1, pair.receiver)
        early, late, read = torch.zeros(3), torch.zeros(2), pair.receiver.recv
        works: list[CollectiveWork] = []

        def recv(memory: torch.Tensor) -> Any:
            if memory.numel() == late.nbytes:
                works.append(right.recv(late, tag=1))
            return read(memory)

        monkeypatch.setattr(pair.receiver, "recv", recv)
        works.append(right.recv(early, tag=2, seconds=5.0))
        left.send(torch.ones(2), tag=1)
        left.send(torch.ones(3), tag=2)
        works[0].wait()
        works[1].wait(timedelta(seconds=5))
        assert (late == 1).all()


def test_the_end_leaves_no_thread_and_begins_no_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python aborts a process at whose end a thread is in PyTorch's C++."""
    with opened() as pair:
        left, right = End(0, pair.sender), End(1, pair.receiver)
        reads: list[torch.Tensor] = []
        read = pair.receiver.recv
        monkeypatch.setattr(
            pair.receiver, "recv", lambda tensor: (reads.append(tensor), read(tensor))[1]
        )
        message = torch.zeros(3)
        work = right.recv(message)
        left.send(torch.ones(3))
        work.wait()
        assert right.close() == []
        assert left.close() == []
        assert [tensor.numel() for tensor in reads] == [2, message.nbytes]


def test_a_receive_whose_sender_ends_in_the_middle_of_the_message_says_so() -> None:
    with opened() as pair:
        right = End(1, pair.receiver)
        message = torch.zeros(3)
        work = right.recv(message)
        pair.sender.send(torch.tensor([0, message.nbytes])).wait()
        while right.posted:
            time.sleep(0.01)
        pair.sender.close()
        with pytest.raises(LinkError, match="has ended or closed the link"):
            work.wait()


def test_a_message_that_cannot_be_held_ends_its_receive() -> None:
    with opened() as pair:
        right = End(1, pair.receiver)
        work = right.recv(torch.zeros(3))
        pair.sender.send(torch.tensor([0, 1 << 60])).wait()
        with pytest.raises(RuntimeError, match="memory"):
            work.wait()


def test_no_message_of_a_group_that_has_ended_is_waited_for() -> None:
    """Another thread may send or receive while the group ends, as after a call that failed."""
    with opened() as pair:
        left, right = End(0, pair.sender), End(1, pair.receiver)
        received = right.recv(torch.zeros(3))
        left.send(torch.ones(3)).wait()
        received.wait()
        left.close(), right.close()
        for late in (left.send(torch.ones(3)), right.recv(torch.zeros(3))):
            with pytest.raises(LinkError, match="the group was closed"):
                late.wait()


def test_what_is_under_way_when_the_group_fails_ends_with_its_error() -> None:
    """That one names the rank at fault, and a link that is closed for it the peer alone."""
    with opened() as pair:
        left, right = End(0, pair.sender), End(1, pair.receiver)
        works = [right.recv(torch.zeros(3)), left.recv(torch.zeros(3))]
        right.close(LinkError("rank 7 has ended"))
        works.append(right.send(torch.ones(3)))
        for work in (works[0], works[2]):
            with pytest.raises(LinkError, match="rank 7 has ended"):
                work.wait()
        with pytest.raises(LinkError, match="has ended or closed the link"):
            works[1].wait()
        left.close()


def test_a_receive_under_way_when_another_rank_ends_the_group_names_that_rank() -> None:
    vendors = ("nvidia", "nvidia", "amd")
    said, *_ = values(run_ranks(receive_meanwhile, vendors, backend=None, patience=60.0))
    assert "rank 2 on" in said
    assert "aborted the group: its GPU is lost" in said


def receive_meanwhile(side: Side) -> str:
    from hetero.collectives.communicator import Communicator

    if side.rank == 1:  # it does not learn of the failure, nor close a link because of it
        Communicator._poll_failures = lambda self: None  # type: ignore[method-assign]
    open_group(side, seconds=30.0)
    group: Any = dist.group.WORLD
    if side.rank == 0:
        with pytest.raises(LinkError) as error:
            dist.recv(torch.ones(1), 1)
        side.say("told")
        return str(error.value)
    if side.rank == 2:
        side.hear("waiting")
        group.abort("its GPU is lost")
    else:
        # The link is open, so that the receive of rank 0 waits for its message.
        group._cpu_communicator._p2p._links.to(0)
        side.say("waiting")
    side.hear("told")
    return ""


class LateLinks:
    """A group's links, of which the only one opens when it is asked for."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.by_rank: dict[int, Link] = {}

    def to(self, rank: int, *, store: Any = None) -> Link:
        return self.by_rank.setdefault(rank, self._link)

    def close(self) -> None:
        self._link.close()


class GpuEnd:
    """One end's messages of GPU tensors to the other, matched in the order of their calls."""

    def __init__(self, link: Link, *, timeout: float = 20.0) -> None:
        self._timeout = timeout
        links: Any = LateLinks(link)
        self.p2p = GpuP2P(rank=0, links=links, device=torch.device("cpu"))
        self.finished = 0

    def send(self, tensor: torch.Tensor, tag: int = 0) -> P2PWork:
        work = P2PWork("send", [tensor], timeout=self._timeout, group="0")
        self.p2p.send(tensor, 1, tag, work)
        return work

    def recv(self, tensor: torch.Tensor, tag: int = 0) -> P2PWork:
        work = P2PWork("receive", [tensor], timeout=self._timeout, group="0")
        self.p2p.recv(as_bytes(tensor), 1, tag, work, self._finish)
        return work

    def _finish(self) -> None:
        self.finished += 1


def ends(pair: Pair) -> tuple[GpuEnd, GpuEnd]:
    """Both ends, over links that are open."""
    left, right = GpuEnd(pair.sender), GpuEnd(pair.receiver)
    # The first message of each direction opens the link, in a thread.
    received = [end.recv(torch.zeros(2)) for end in (left, right)]
    for end in (left, right):
        end.send(torch.ones(2))
    for work in received:
        work.wait()
    channels = [end.p2p._channel(1, is_send=True) for end in (left, right)]
    assert wait_for(lambda: not any(channel.worker._pending for channel in channels))
    return left, right


def close(*given: GpuEnd) -> None:
    both(*(end.p2p.close for end in given))


@pytest.mark.parametrize("count", [5, LARGE, 20 * LARGE])
def test_both_ends_send_and_receive_at_once_in_their_own_threads(count: int) -> None:
    with opened() as pair:
        left, right = ends(pair)
        threads = set(threading.enumerate())

        def swap(end: GpuEnd, value: float) -> torch.Tensor:
            target = torch.zeros(count)
            works = [end.send(torch.full((count,), value)), end.recv(target)]
            for work in works:
                assert work.wait()
            assert all(work.is_completed() for work in works)
            return target

        got = both(lambda: swap(left, 1.0), lambda: swap(right, 2.0))
        assert [tensor.unique().tolist() for tensor in got] == [[2.0], [1.0]]
        started = {thread.name for thread in set(threading.enumerate()) - threads}
        # The two that this test itself starts may not have ended yet.
        assert {name for name in started if not name.startswith("ThreadPoolExecutor")} == set()
        close(left, right)


def test_what_nobody_waits_for_arrives_and_ends_once_it_is_asked_after() -> None:
    with opened() as pair:
        left, right = ends(pair)
        before = right.finished
        target = torch.zeros(7)
        work = right.recv(target)
        assert not work.is_completed()
        left.send(torch.ones(7))
        assert wait_for(work.is_completed)
        work.wait()
        assert right.finished == before + 1, "what is to be done with a message is done once"
        assert (target == 1).all()
        close(left, right)


def test_a_future_and_a_short_deadline_leave_the_wait_to_another_thread() -> None:
    with opened() as pair:
        left, right = ends(pair)
        targets = [torch.zeros(7), torch.zeros(7)]
        future = right.recv(targets[0]).get_future()
        late = right.recv(targets[1])
        with pytest.raises(LinkError, match=r"receive in group 0 was not done within 0\.1 s"):
            late.wait(timedelta(seconds=0.1))
        assert not future.done()
        for value in (1.0, 2.0):
            left.send(torch.full((7,), value))
        assert (future.wait()[0] == 1).all()
        assert late.wait()
        assert (targets[1] == 2).all()
        close(left, right)


@pytest.mark.parametrize("method", ["record_end", "wait_event"])
def test_a_gpu_that_fails_ends_the_wait_of_another_thread(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    with opened() as pair:
        left, right = ends(pair)
        target = torch.zeros(7)
        work = right.recv(target)
        monkeypatch.setattr(SideStream, method, failing)
        left.send(torch.ones(7)).wait()
        with pytest.raises(RuntimeError, match="illegal memory access"):
            work.wait(timedelta(seconds=5))
        monkeypatch.undo()
        close(left, right)


def test_a_message_with_another_tag_is_an_error() -> None:
    with opened(timeout=SHORT) as pair:
        left, right = ends(pair)
        left.send(torch.ones(7), tag=3)
        with pytest.raises(LinkError, match="tag 3 instead of 4"):
            right.recv(torch.zeros(7), tag=4).wait()
        close(left, right)


class Own:
    """The messages of rank 3 to itself."""

    def __init__(self) -> None:
        self.messages = OwnMessages(3, torch.device("cpu"))
        self.received: list[float] = []

    def send(self, value: float, tag: int = 0, count: int = 2) -> CollectiveWork:
        work = self._work("send")
        self.messages.send(torch.full((count,), value), tag, work)
        return work

    def recv(self, tensor: torch.Tensor, tag: int = 0) -> CollectiveWork:
        work = self._work("receive")
        self.messages.recv(tensor, tag, work, lambda: self.received.append(tensor[0].item()))
        return work

    def _work(self, what: str) -> CollectiveWork:
        return CollectiveWork(what, [], timeout=20.0, group="0")


@pytest.mark.parametrize("receives_first", [True, False])
def test_messages_of_one_tag_keep_their_order(receives_first: bool) -> None:
    own, targets = Own(), [torch.zeros(2) for _ in range(4)]

    def send() -> list[CollectiveWork]:
        return [own.send(1.0), own.send(2.0, tag=7), own.send(3.0), own.send(4.0)]

    def receive() -> list[CollectiveWork]:
        tags = (0, 0, 7, 0)
        return [own.recv(target, tag) for target, tag in zip(targets, tags, strict=True)]

    works = [*receive(), *send()] if receives_first else [*send(), *receive()]
    for work in works:
        assert work.wait()
        assert work.source_rank() == 3
    assert [target.tolist() for target in targets] == [[1.0] * 2, [3.0] * 2, [2.0] * 2, [4.0] * 2]
    assert sorted(own.received) == [1.0, 2.0, 3.0, 4.0]


def test_a_wait_that_nobody_could_end_is_an_error_at_once() -> None:
    own, target = Own(), torch.zeros(2)
    with pytest.raises(LinkError, match=r"send in group 0 failed: there is no irecv .* with tag 1"):
        own.send(1.0, tag=1).wait()
    with pytest.raises(LinkError, match=r"there is no isend .* with tag 2"):
        own.recv(target, tag=2).wait()
    # Those that were given up take no part in later messages.
    works = [own.recv(target, tag=1), own.send(5.0, tag=1)]
    assert all(work.wait() for work in works)
    assert target.tolist() == [5.0, 5.0]
    assert not own.recv(target).is_completed()


def test_sizes_that_differ_end_both_ends_with_both_sizes() -> None:
    own = Own()
    works = [own.recv(torch.zeros(3)), own.send(1.0)]
    for work in works:
        with pytest.raises(LinkError, match="8 bytes were sent with tag 0 where 12 were to be"):
            work.wait()


def test_the_end_of_the_group_ends_what_is_posted_and_what_comes_later() -> None:
    own = Own()
    early = own.recv(torch.zeros(2))
    own.messages.close(LinkError("rank 7 has ended"))
    for work in (early, own.send(1.0)):
        with pytest.raises(LinkError, match="rank 7 has ended"):
            work.wait()


def test_a_callback_of_a_message_may_post_the_next() -> None:
    own, targets = Own(), [torch.zeros(2), torch.zeros(2)]
    first = own.recv(targets[0])
    first.get_future().then(lambda _: own.recv(targets[1]))
    own.send(1.0)
    assert own.send(2.0).wait()
    assert [target[0].item() for target in targets] == [1.0, 2.0]


def test_threads_that_post_at_once_lose_no_message() -> None:
    own, count = Own(), 200
    targets = [torch.zeros(2) for _ in range(count)]
    works: list[CollectiveWork] = []
    threads = [
        threading.Thread(target=lambda: works.extend(own.send(1.0, tag=t) for t in range(count))),
        threading.Thread(
            target=lambda: works.extend(own.recv(targets[t], tag=t) for t in range(count))
        ),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(work.wait() for work in works)
    assert all((target == 1).all() for target in targets)


def test_a_gpu_copies_after_what_both_ends_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream is played by a list of what was asked of it."""
    own, asked = Own(), []
    stream: Any = own.messages._stream

    @contextmanager
    def as_current() -> Any:
        asked.append("begin")
        yield
        asked.append("end")

    events = iter(("receive", "send"))
    monkeypatch.setattr(stream, "record_event", lambda: next(events))
    monkeypatch.setattr(stream, "wait_event", asked.append)
    monkeypatch.setattr(stream, "as_current", as_current)
    monkeypatch.setattr(stream, "record_end", lambda held: asked.append("recorded"))
    target = torch.zeros(2)
    own.recv(target)
    assert asked == []
    own.send(1.0)
    assert asked == ["send", "receive", "begin", "recorded", "end"]
    assert target.tolist() == [1.0, 1.0]


def test_ranks_of_several_vendors_send_to_themselves_in_any_group() -> None:
    values(run_ranks(exchange, ("nvidia", "amd", "amd"), timeout=30.0))


def exchange(side: Side) -> None:
    """A hand-made all-to-all in one batch, also strided, and what no batch holds both ends of."""
    pairs = [dist.new_group([0, 1]), dist.new_group([0, 2])]
    for group in (dist.group.WORLD, *pairs):
        ranks = dist.get_process_group_ranks(group)
        if side.rank not in ranks:
            continue
        got = torch.zeros(len(ranks), 3)
        given = torch.full((3, len(ranks)), float(side.rank)).t()
        ops = [dist.P2POp(dist.irecv, got[i], rank, group) for i, rank in enumerate(ranks)]
        ops += [dist.P2POp(dist.isend, given[i], rank, group) for i, rank in enumerate(ranks)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert got.tolist() == [[float(rank)] * 3 for rank in ranks]
    with pytest.raises(LinkError, match=f"send to rank {side.rank} .*there is no irecv of this"):
        dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(2), side.rank)])[0].wait()
    # A receive from any rank takes it too, whichever is posted first.
    target = torch.zeros(2)
    for receives_first in (True, False):
        if receives_first:
            received = dist.irecv(target, tag=4)
            sent = dist.isend(torch.full((2,), 1.0), side.rank, tag=4)
        else:
            sent = dist.isend(torch.full((2,), 2.0), side.rank, tag=4)
            received = dist.irecv(target, tag=4)
        assert received.wait()
        assert sent.wait()
        assert received.source_rank() == side.rank
    assert target.tolist() == [2.0, 2.0]
    dist.all_reduce(target)
    assert target.tolist() == [2.0 * side.size] * 2
