"""Messages in the order in which each pair asks for them, as between GPUs. Streams are emulated."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch

from hetero.collectives.gpu_p2p import GpuP2P, P2PWork
from hetero.collectives.side_stream import SideStream
from hetero.errors import LinkError
from hetero.link.base import Link, as_bytes
from tests.hetero.link.joined import wait_for
from tests.hetero.link.ring.pair import LARGE, SHORT, Pair, opened
from tests.hetero.link.test_handshake import both


class LateLinks:
    """A group's links, of which the only one opens when it is asked for."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.by_rank: dict[int, Link] = {}

    def to(self, rank: int, *, store: Any = None) -> Link:
        return self.by_rank.setdefault(rank, self._link)

    def close(self) -> None:
        self._link.close()


class End:
    """One end's messages to the other."""

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


def ends(pair: Pair) -> tuple[End, End]:
    """Both ends, over links that are open."""
    left, right = End(pair.sender), End(pair.receiver)
    # The first message of each direction opens the link, in a thread.
    received = [end.recv(torch.zeros(2)) for end in (left, right)]
    for end in (left, right):
        end.send(torch.ones(2))
    for work in received:
        work.wait()
    channels = [end.p2p._channel(1, is_send=True) for end in (left, right)]
    assert wait_for(lambda: not any(channel.worker._pending for channel in channels))
    return left, right


def close(*given: End) -> None:
    both(*(end.p2p.close for end in given))


@pytest.mark.parametrize("count", [5, LARGE, 20 * LARGE])
def test_both_ends_send_and_receive_at_once_in_their_own_threads(count: int) -> None:
    with opened() as pair:
        left, right = ends(pair)
        threads = set(threading.enumerate())

        def swap(end: End, value: float) -> torch.Tensor:
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
