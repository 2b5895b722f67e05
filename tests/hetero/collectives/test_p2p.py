"""Messages between CPUs, and between GPUs, whose streams are emulated."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetero.collectives import p2p
from hetero.collectives.layout import Layout, Member
from hetero.collectives.p2p import CpuP2P, CpuP2PWork, GpuP2P, P2PWork
from hetero.collectives.work import SideStream
from hetero.device.host import HostDevice
from hetero.errors import LinkError
from hetero.link import ring_link
from hetero.link.base import Link, as_bytes
from tests.forked_ranks import values
from tests.hetero.collectives.ranks import Side, open_group, run_ranks
from tests.hetero.link import tcp_ends
from tests.hetero.link.joined import CPU, JoinedEnds, wait_for
from tests.hetero.link.ring.pair import LARGE, HeldDevice, Pair, Setup, opened
from tests.hetero.link.test_handshake import both, both_well

MEMBERS = tuple(
    Member(rank=rank, global_rank=rank, host="here", vendor=vendor)
    for rank, vendor in enumerate(("nvidia", "amd"))
)


INLINE = p2p._INLINE_BYTES
"""The largest message within its envelope."""
FEW_AND_MANY = [3, 5_000, 300_000]
"""Floats: within an envelope, behind it, and more than a ring holds."""
SHM, TCP = Setup(), tcp_ends.Setup()
over_both = pytest.mark.parametrize("setup", [SHM, TCP], ids=["shm", "tcp"])


@contextmanager
def opened_on_cpu() -> Iterator[Pair]:
    """As groups have their links for tensors of a CPU."""
    with opened(device=partial(HostDevice, CPU)) as pair:
        yield pair


class End:
    """One end's messages of CPU tensors to the other, or to those of several links."""

    def __init__(self, rank: int, *given: Any, members: tuple[Member, ...] = MEMBERS) -> None:
        self.links: Any = LateLinks(*given)
        self._peer = 1 - rank
        self.p2p = CpuP2P(layout=Layout(members, rank), links=self.links)

    def send(self, tensor: torch.Tensor, tag: int = 0, *, peer: int | None = None) -> CpuP2PWork:
        work = self._work(tensor, 20.0)
        self.p2p.send(tensor, self._peer if peer is None else peer, tag, work)
        return work

    def recv(self, tensor: torch.Tensor, tag: int = 0, *, seconds: float = 20.0) -> CpuP2PWork:
        work = self._work(tensor, seconds)
        self.p2p.recv(tensor, self._peer, tag, work, lambda: None)
        return work

    @property
    def arriving(self) -> int | None:
        """The tag of the message that is being read; None while none is."""
        arriving = self.p2p._peers[self._peer].arriving
        return None if arriving is None else arriving.tag

    @property
    def threads(self) -> list[threading.Thread]:
        return [thread for thread in self.p2p._threads if thread.is_alive()]

    def close(self, why: LinkError | None = None) -> None:
        """End it as a group does."""
        self.p2p.close(why)

    def _work(self, tensor: torch.Tensor, seconds: float) -> CpuP2PWork:
        return self.p2p.new_work("a message", [tensor], timeout=seconds, group="0")


@contextmanager
def joined_ends(setup: JoinedEnds = SHM) -> Iterator[tuple[End, End]]:
    """Both ends, whose links are open; who opened them has ended, and other threads sleep."""
    with setup.links() as links:
        left, right = (End(rank, link) for rank, link in enumerate(links))
        for one, other in ((left, right), (right, left)):
            work = one.recv(torch.zeros(1))
            other.send(torch.ones(1)).wait()
            work.wait()
        for end in (left, right):
            assert wait_for(lambda end=end: not any("link to" in t.name for t in end.threads))
            end.p2p._news.clear()
        yield left, right
        both_well(left.close, right.close)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread makes progress for callers that do not wait."""
    monkeypatch.setattr(p2p, "_run_unattended", lambda *_: None)


def envelope(tag: int, nbytes: int) -> torch.Tensor:
    """What comes before a message of so many bytes."""
    made = p2p._Envelope()
    made.fill(torch.empty(nbytes, dtype=torch.uint8, device="meta"), tag)
    return made.memory


def test_threads_that_send_first_at_once_open_one_link() -> None:
    with opened_on_cpu() as pair:
        left, right = End(0, pair.sender), End(1, pair.receiver)
        targets = [torch.zeros(3), torch.zeros(3)]
        works = [right.recv(target, tag) for tag, target in enumerate(targets)]
        both_well(*(lambda tag=tag: left.send(torch.ones(3), tag) for tag in range(2)))
        assert all(work.wait() for work in works)
        assert left.links.asked_for == [1]
        both_well(left.close, right.close)


@pytest.mark.usefixtures("alone")
@over_both
@pytest.mark.parametrize("count", FEW_AND_MANY)
def test_callers_that_wait_need_no_thread(count: int, setup: JoinedEnds) -> None:
    """Both ways at once, each end in one thread."""
    with joined_ends(setup) as ends:

        def swap(end: End, value: float) -> torch.Tensor:
            target = torch.zeros(count)
            works = [end.recv(target), end.send(torch.full((count,), value))]
            assert all(work.wait() for work in works)
            return target

        for _ in range(3):
            got = both_well(lambda: swap(ends[0], 1.0), lambda: swap(ends[1], 2.0))
            assert [tensor.unique().tolist() for tensor in got] == [[2.0], [1.0]]
        assert ends[0].threads == []


@pytest.mark.usefixtures("alone")
def test_a_message_that_the_ring_holds_is_sent_once_isend_returns() -> None:
    with joined_ends() as (left, right):
        tensor, target = torch.ones(INLINE // 4), torch.zeros(INLINE // 4)
        work = left.send(tensor)
        assert work.is_finished
        tensor.zero_()
        assert right.recv(target).wait()
        assert (target == 1).all()


@pytest.mark.usefixtures("alone")
def test_polls_alone_finish_messages() -> None:
    with joined_ends() as (left, right):
        target = torch.zeros(300_000)
        works = [right.recv(target), left.send(torch.ones(300_000))]
        assert wait_for(lambda: all(work.is_completed() for work in works))
        assert (target == 1).all()


@over_both
@pytest.mark.parametrize("count", FEW_AND_MANY)
def test_a_future_is_done_without_a_wait(
    count: int, setup: JoinedEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were the thread not told of news, but to look when the monitor does, it would not be."""
    with joined_ends(setup) as (left, right):
        monkeypatch.setattr(ring_link, "WATCH_SECONDS", 60.0)
        target = torch.zeros(count)
        received = right.recv(target).get_future()
        sent = left.send(torch.ones(count)).get_future()
        for future in (received, sent):
            future.wait()
        assert (target == 1).all()


def test_what_a_callback_of_an_awaited_message_receives_needs_no_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is posted while the link is the waiting caller's, which leaves it to the thread."""
    with joined_ends(SHM) as (left, right):
        monkeypatch.setattr(ring_link, "WATCH_SECONDS", 60.0)
        target, done = torch.zeros(3), threading.Event()

        def receive_next(_: object) -> None:
            future = right.recv(target).get_future()
            future.then(lambda _: done.set())
            time.sleep(0.05)  # longer than the thread leaves a message to its caller

        first = right.recv(torch.zeros(3))
        first.get_future().then(receive_next)
        left.send(torch.ones(3)).wait()
        first.wait()
        left.send(torch.full((3,), 2.0)).wait()
        assert done.wait(20)
        assert (target == 2).all()


@over_both
@pytest.mark.parametrize("is_waiting", [True, False])
def test_nobody_polls_while_nothing_comes(
    is_waiting: bool, setup: JoinedEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[None] = []
    progress = CpuP2P._progress

    def counted(self: CpuP2P, peers: Any) -> None:
        looked.append(None)
        progress(self, peers)

    with joined_ends(setup) as (left, right):
        target = torch.zeros(3)
        work = right.recv(target)
        monkeypatch.setattr(CpuP2P, "_progress", counted)
        if is_waiting:
            with pytest.raises(LinkError, match="was not done within 1 s"):
                work.wait(timedelta(seconds=1))
        else:
            time.sleep(1)
        # Ten times by its caller or the monitor, and what it takes to fall asleep.
        assert 0 < len(looked) < 100
        left.send(torch.ones(3))
        assert work.wait()


@pytest.mark.usefixtures("alone")
@over_both
@pytest.mark.parametrize("count", FEW_AND_MANY)
def test_who_waits_for_a_send_reads_what_the_peer_has_to_send_first(
    count: int, setup: JoinedEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ends wait for their sends; no slice is over in time."""
    with joined_ends(setup) as ends:
        monkeypatch.setattr(p2p, "_SLICE_SECONDS", 60.0)
        monkeypatch.setattr(ring_link, "WATCH_SECONDS", 60.0)

        def swap(end: End) -> torch.Tensor:
            target = torch.zeros(count)
            received = end.recv(target)
            assert end.send(torch.ones(count)).wait()
            assert received.wait()
            return target

        for _ in range(5):
            assert all((got == 1).all() for got in both_well(*(partial(swap, e) for e in ends)))


@pytest.mark.parametrize("nbytes", [0, 1, INLINE, INLINE + 1])
def test_sizes_at_the_limit_of_an_envelope(nbytes: int) -> None:
    with joined_ends() as (left, right):
        for is_early in (True, False):
            sent = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
            target = torch.zeros(nbytes, dtype=torch.uint8)
            works = [left.send(sent)] if is_early else []
            works.append(right.recv(target))
            works += [] if is_early else [left.send(sent)]
            assert all(work.wait() for work in works)
            assert torch.equal(target, sent)
            before = left.links.by_rank[1].counters.messages_sent
            left.send(sent)
            right.recv(target).wait()
            taken = left.links.by_rank[1].counters.messages_sent - before
            assert taken == (1 if nbytes <= INLINE else 2)


@over_both
def test_tags_out_of_order_and_messages_of_one_tag_in_order(setup: JoinedEnds) -> None:
    with joined_ends(setup) as (left, right):
        tags = (5, 6, 5, 7, 6, 5)
        for count in FEW_AND_MANY:
            sent = [left.send(torch.full((count,), float(i)), tag) for i, tag in enumerate(tags)]
            got = []
            for tag in (7, 6, 5, 5, 6, 5):
                target = torch.zeros(count)
                right.recv(target, tag).wait()
                got.append(target.unique().tolist())
            assert got == [[3.0], [1.0], [0.0], [2.0], [4.0], [5.0]]
            assert all(work.wait() for work in sent)


@pytest.mark.parametrize("count", FEW_AND_MANY)
def test_sizes_that_differ_between_ranks_are_told_and_the_next_message_comes(count: int) -> None:
    with joined_ends() as (left, right):
        for is_early in (True, False):
            if is_early:
                sent = left.send(torch.ones(count))
            received = right.recv(torch.zeros(count + 1))
            if not is_early:
                sent = left.send(torch.ones(count))
            words = f"rank 0 .*sent {4 * count} bytes with tag 0 where {4 * count + 4} were"
            with pytest.raises(LinkError, match=words):
                received.wait()
            assert sent.wait()
        target = torch.zeros(2)
        left.send(torch.ones(2))
        assert right.recv(target).wait()


def test_a_receive_whose_time_is_over_takes_no_message_from_the_next() -> None:
    with joined_ends() as (left, right):
        given_up, again = torch.zeros(3), torch.zeros(3)
        late = right.recv(given_up, seconds=0.1)
        for _ in range(2):
            with pytest.raises(LinkError, match=r"was not done within 0\.1 s"):
                late.wait()
        work = right.recv(again)
        left.send(torch.ones(3))
        work.wait()
        assert (given_up == 0).all()
        assert (again == 1).all()


def test_a_wait_with_less_time_than_the_message_has_leaves_it_posted() -> None:
    with joined_ends() as (left, right):
        target = torch.zeros(3)
        work = right.recv(target)
        with pytest.raises(LinkError, match=r"was not done within 0\.05 s"):
            work.wait(timedelta(seconds=0.05))
        left.send(torch.ones(3))
        assert work.wait()
        assert (target == 1).all()


def test_memory_of_a_receive_whose_time_is_over_is_not_written_later() -> None:
    """Although its message had begun to come: its sender's copy has not ended."""
    devices = iter((HeldDevice(), HostDevice(CPU)))
    with opened(device=lambda: next(devices)) as pair:
        right = End(1, pair.receiver)
        target = torch.zeros(LARGE)
        work = right.recv(target, seconds=0.3)
        pair.sender.send(envelope(0, target.nbytes))
        assert wait_for(lambda: right.arriving == 0)
        pair.devices[0].held = True
        pair.sender.send(as_bytes(torch.ones(LARGE)))
        with pytest.raises(LinkError, match=r"was not done within 0\.3 s"):
            work.wait()
        seen = target.clone()
        pair.devices[0].released.set()
        assert wait_for(lambda: pair.sender.state() is None or not pair.sender._out.in_flight)
        assert torch.equal(target, seen)
        with pytest.raises(LinkError, match=r"the time of an earlier receive was over .* rank 0"):
            right.recv(target).wait()
        right.close()


def test_a_send_whose_time_is_over_before_its_link_is_open_is_not_sent() -> None:
    with opened_on_cpu() as pair:
        left, right = End(0, pair.sender), End(1, pair.receiver)
        left.links.may_open.clear()
        work = left.p2p.new_work("a message", [], timeout=0.05, group="0")
        left.p2p.send(torch.zeros(3), 1, 0, work)
        with pytest.raises(LinkError, match=r"was not done within 0\.05 s"):
            work.wait()
        left.links.may_open.set()
        left.send(torch.ones(3)).wait()
        target = torch.zeros(3)
        right.recv(target).wait()
        assert (target == 1).all()
        both_well(left.close, right.close)


def test_neither_isend_nor_irecv_waits_for_a_link() -> None:
    with opened_on_cpu() as pair:
        left, right = End(0, pair.sender), End(1, pair.receiver)
        left.links.may_open.clear()
        targets = [torch.zeros(count) for count in FEW_AND_MANY]
        sent = [left.send(torch.full_like(t, float(i)), i) for i, t in enumerate(targets)]
        back = torch.zeros(3)
        received = left.recv(back)
        assert not any(work.is_completed() for work in (*sent, received))
        left.links.may_open.set()
        right.send(torch.ones(3))
        for tag in (2, 0, 1):
            assert right.recv(targets[tag], tag).wait()
            assert (targets[tag] == tag).all()
        assert all(work.wait() for work in (*sent, received))
        assert (back == 1).all()
        both_well(left.close, right.close)


def test_a_receive_posted_while_its_message_is_read_gets_it() -> None:
    with opened_on_cpu() as pair:
        right = End(1, pair.receiver)
        early, late = torch.zeros(3), torch.zeros(LARGE)
        works = [right.recv(early, tag=2)]
        pair.sender.send(envelope(1, late.nbytes))
        assert wait_for(lambda: right.arriving == 1)
        works.append(right.recv(late, tag=1))
        pair.sender.send(as_bytes(torch.ones(LARGE)))
        made = p2p._Envelope()
        made.fill(torch.ones(3), 2)
        pair.sender.send(made.memory)
        assert all(work.wait() for work in works)
        assert (late == 1).all()
        assert (early == 1).all()
        right.close()


def test_what_nobody_asks_for_stays_with_its_sender() -> None:
    with joined_ends() as (left, right):
        read = right.links.by_rank[0].counters.messages_received
        left.send(torch.ones(3), tag=1)
        for _ in range(3):
            right.p2p.progress()
        assert right.links.by_rank[0].counters.messages_received == read
        assert right.recv(torch.zeros(3), tag=1).wait()


@pytest.mark.parametrize("count", [1, 8])
def test_one_thread_remains_however_many_peers(count: int) -> None:
    members = tuple(
        Member(rank=rank, global_rank=rank, host="here", vendor=("nvidia", "amd")[rank > 0])
        for rank in range(count + 1)
    )
    with ExitStack() as stack:
        pairs = [stack.enter_context(opened_on_cpu()) for _ in range(count)]
        hub = End(0, *(pair.sender for pair in pairs), members=members)
        for peer in range(1, count + 1):
            hub.send(torch.full((3,), float(peer)), peer=peer).wait()
        for pair in pairs:
            pair.receiver.recv(torch.zeros_like(envelope(0, 0))).wait()
        assert wait_for(lambda: len(hub.threads) == 1)
        assert [thread.name for thread in hub.threads] == ["p2p progress"]
        both(hub.close, lambda: [pair.receiver.close() for pair in pairs])
        assert hub.threads == []


def test_the_end_leaves_no_thread_and_begins_no_read() -> None:
    """Python aborts a process at whose end a thread is in PyTorch's C++."""
    with joined_ends() as (left, right):
        link = right.links.by_rank[0]
        right.recv(torch.zeros(3)), left.send(torch.ones(3)).wait()
        assert wait_for(lambda: not right.p2p._posted)
        read = link.counters.messages_received
        both_well(left.close, right.close)
        right.p2p.progress()
        assert link.counters.messages_received == read
        assert left.threads == right.threads == []


def test_a_receive_whose_sender_ends_in_the_middle_of_the_message_says_so() -> None:
    with opened_on_cpu() as pair:
        right = End(1, pair.receiver)
        message = torch.zeros(LARGE)
        work = right.recv(message)
        pair.sender.send(envelope(0, message.nbytes)).wait()
        assert wait_for(lambda: right.arriving == 0)
        pair.sender.close()
        with pytest.raises(LinkError, match="has ended or closed the link"):
            work.wait()
        right.close()


def test_a_message_that_cannot_be_held_ends_its_receive() -> None:
    with opened_on_cpu() as pair:
        right = End(1, pair.receiver)
        work = right.recv(torch.zeros(3))
        pair.sender.send(envelope(0, 1 << 60)).wait()
        with pytest.raises(RuntimeError, match="memory"):
            work.wait()
        right.close()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("is_waiting", [True, False])
def test_an_interrupt_while_a_message_is_read_ends_what_comes_from_there(
    is_waiting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be lost, so that later ones would be taken for it."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with joined_ends() as (_, right):
        work = right.recv(torch.zeros(3))
        with monkeypatch.context() as patched:
            patched.setattr(CpuP2P, "_begin_read", interrupted)
            with pytest.raises(KeyboardInterrupt):
                work.wait() if is_waiting else work.is_completed()
        for late in (work, right.recv(torch.zeros(3))):
            with pytest.raises(LinkError, match=r"KeyboardInterrupt came while .* rank 0 .* read"):
                late.wait()


def test_a_tensor_without_memory_is_refused_by_both() -> None:
    with joined_ends() as (left, right):
        freed = torch.ones(3)
        freed.untyped_storage().resize_(0)
        for call in (left.send, right.recv):
            with pytest.raises(ValueError, match=r"a tensor of shape \(3,\) has no memory"):
                call(freed)


def test_a_forked_child_is_told_and_takes_nothing_from_its_parent() -> None:
    with joined_ends() as (left, right):
        target = torch.zeros(3)
        waiting = right.recv(target)
        read_end, write_end = os.pipe()
        if (child := os.fork()) == 0:
            told = []
            with suppress(BaseException):
                for call in (
                    waiting.wait,
                    lambda: right.recv(torch.zeros(3)).wait(),
                    lambda: right.send(torch.ones(3)).wait(),
                ):
                    try:
                        call()
                    except LinkError as error:
                        told.append(str(error))
                os.write(write_end, json.dumps(told).encode())
            os._exit(0)
        os.waitpid(child, 0)
        told = json.loads(os.read(read_end, 1 << 16))
        os.close(read_end), os.close(write_end)
        assert len(told) == 3
        assert all("the process that this one was forked from" in text for text in told)
        left.send(torch.ones(3))
        assert waiting.wait()
        assert (target == 1).all()


def test_random_orders_between_three_processes() -> None:
    counts = values(run_ranks(exchange_at_random, ("nvidia", "amd", "nvidia"), rounds=100))
    assert sum(counts) > 900


def exchange_at_random(side: Side) -> int:
    """All ranks draw the same messages. Each posts its own in an order of its own, which keeps that
    of the messages between two ranks with one tag, and finishes them in any order."""
    drawn, own = random.Random(7), random.Random(side.rank)
    received = 0
    for number in range(side.options["rounds"]):
        posts: dict[tuple[int, int, int], list[Callable[[], Any]]] = {}
        expected: list[tuple[torch.Tensor, float]] = []
        for index in range(drawn.randint(4, 16)):
            source, target = drawn.sample(range(side.size), 2)
            count = drawn.choice((0, 1, 700, 1500, 90_000))
            # From any rank, only one that no other message could be taken for.
            from_any = drawn.random() < 0.3
            tag = 100 * number + index if from_any else 1_000_000 + drawn.randint(0, 2)
            value = 100.0 * number + index
            if side.rank == source:
                tensor = torch.full((count,), value)
                post = partial(dist.isend, tensor, target, tag=tag)
            elif side.rank == target:
                tensor = torch.zeros(count)
                expected.append((tensor, value))
                post = partial(dist.irecv, tensor, None if from_any else source, tag=tag)
            else:
                continue
            posts.setdefault((source, target, tag), []).append(post)
        works = []
        while posts:
            key = own.choice(list(posts))
            works.append(posts[key].pop(0)())
            if not posts[key]:
                del posts[key]
        own.shuffle(works)
        for work in works:
            polled = partial(wait_for, work.is_completed)
            own.choice((work.wait, polled, work.get_future().wait))()
        for tensor, value in expected:
            assert (tensor == value).all()
        received += len(expected)
    return received


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
    """A group's links, each of which opens when it is asked for."""

    def __init__(self, *given: Link) -> None:
        """`given` are to rank 1 and so on; of rank 1, the only one is to rank 0."""
        self._given = given
        self.by_rank: dict[int, Link] = {}
        self.asked_for: list[int] = []
        self.may_open, self.closed = threading.Event(), threading.Event()
        self.may_open.set()

    def to(self, rank: int, *, store: Any = None) -> Link:
        self.asked_for.append(rank)
        self.may_open.wait()
        return self.by_rank.setdefault(rank, self._given[max(rank - 1, 0)])

    def close(self) -> None:
        self.closed.set()
        self.may_open.set()
        for link in self._given:
            link.close()


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
            work.wait(timedelta(seconds=20))
        monkeypatch.undo()
        close(left, right)


def test_a_message_with_another_tag_is_an_error() -> None:
    with opened() as pair:
        left, right = ends(pair)
        left.send(torch.ones(7), tag=3)
        with pytest.raises(LinkError, match="tag 3 instead of 4"):
            right.recv(torch.zeros(7), tag=4).wait()
        close(left, right)
