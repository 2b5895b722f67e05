"""Messages between CPUs, matched by source and tag."""

from __future__ import annotations

import queue
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetero.collectives.cpu_p2p import CpuP2P
from hetero.collectives.vendor_layout import Layout, Member
from hetero.collectives.work import CollectiveWork
from hetero.errors import LinkError
from tests.forked_ranks import values
from tests.hetero.collectives.ranks import Side, open_group, run_ranks
from tests.hetero.collectives.test_gpu_p2p import LateLinks
from tests.hetero.link.ring.pair import opened
from tests.hetero.link.test_handshake import both_well

MEMBERS = tuple(
    Member(rank=rank, global_rank=rank, host="here", vendor=vendor)
    for rank, vendor in enumerate(("nvidia", "amd"))
)


class End:
    """One end's messages to the other."""

    def __init__(self, rank: int, link: Any) -> None:
        links: Any = LateLinks(link)
        links.closed = threading.Event()
        links.close = lambda: (links.closed.set(), link.close())
        self._peer = 1 - rank
        self._p2p = CpuP2P(layout=Layout(MEMBERS, rank), links=links, store=dist.HashStore())

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
    from hetero.collectives.group_communicator import Communicator

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
