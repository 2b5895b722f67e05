"""Messages of a rank to itself, of a CPU and of a GPU, whose stream is emulated."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetero.collectives.own_messages import OwnMessages
from hetero.collectives.work import CollectiveWork
from hetero.errors import LinkError
from tests.forked_ranks import values
from tests.hetero.collectives.ranks import Side, run_ranks


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
