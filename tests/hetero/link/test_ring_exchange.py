"""Messages of several links that one call of C enqueues together. Streams are emulated."""

from __future__ import annotations

import gc
import random
import time
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hetero.device.host import HostDevice
from hetero.errors import LinkError
from hetero.link import ring_link as link_module
from hetero.link.base import Link, as_bytes
from hetero.link.ring_exchange import Message, RingExchange, begin
from hetero.native.binding import Step
from tests.emulated_streams import EmulatedDevice
from tests.hetero.link.joined import CPU, is_broken, wait_for
from tests.hetero.link.ring.pair import LARGE, Pair, number_of, opened
from tests.hetero.link.test_handshake import both_well

PATIENCE = 20_000_000
"""Microseconds; a peer comes long before."""
DEVICES = pytest.mark.parametrize("device", [EmulatedDevice, lambda: HostDevice(CPU)])


def whole(link: Link, tensor: torch.Tensor, is_receive: bool) -> Message:
    return link, tensor, 0, tensor.nbytes, is_receive


def together(*messages: tuple[Link, torch.Tensor, bool], tag: int = 0, patience: int = 0) -> int:
    """Exchange messages and wait for what is left; how many that were."""
    exchange = RingExchange()
    left = exchange.order([whole(*m) for m in messages], tag=tag, microseconds=patience)
    for work in left:
        work.wait()
    return len(left)


def swap(pair: Pair, sizes: Sequence[int], *, patience: int = PATIENCE) -> list[Any]:
    """Both ends send and receive so many elements at once; what `together` says at each."""

    def end(link: Link, number: int) -> int:
        sent = [torch.full((size,), number + place) for place, size in enumerate(sizes)]
        got = [torch.zeros_like(tensor) for tensor in sent]
        messages = [(link, tensor, False) for tensor in sent]
        left = together(*messages, *((link, tensor, True) for tensor in got), patience=patience)
        for place, tensor in enumerate(got):
            assert (tensor == 100 - number + place).all()
        return left

    return both_well(lambda: end(pair.sender, 0), lambda: end(pair.receiver, 100))


def test_messages_that_the_stream_waits_for_leave_their_tensors_to_it() -> None:
    with opened() as pair:
        assert swap(pair, [5, LARGE]) == [0, 0]
        assert not [*pair.sender._out.transfers(), *pair.sender._in.transfers()]


@DEVICES
def test_messages_of_one_call_may_be_waited_for_one_after_another(device: Any) -> None:
    sizes = 3, LARGE, LARGE + 1

    def end(link: Link, number: int) -> None:
        exchange = RingExchange()
        sent = [torch.full((size,), float(number)) for size in sizes]
        got = [torch.zeros_like(tensor) for tensor in sent]
        messages = [
            whole(link, tensor, is_receive)
            for pair in zip(sent, got, strict=True)
            for tensor, is_receive in zip(pair, (False, True), strict=True)
        ]
        left = list(exchange.order(messages, tag=0, microseconds=PATIENCE, waited=2))
        is_over = len(left) == 4  # a host device leaves all of the waits to Python
        for place, tensor in enumerate(got):
            works = [] if is_over and place == 0 else [left.pop(0), left.pop(0)]
            if works and not exchange.progress(works, microseconds=0):
                for work in works:
                    work.wait()
            assert (tensor == 3 - number).all()
        assert not left

    with opened(device=device) as pair:
        both_well(lambda: end(pair.sender, 1), lambda: end(pair.receiver, 2))


@pytest.mark.parametrize("late", [0.0, 0.02])
@DEVICES
def test_started_messages_go_on_where_they_are_whoever_is_late(device: Any, late: float) -> None:
    def end(link: Link, number: int, late: float) -> None:
        exchange = RingExchange()
        for size in (3, LARGE, 40 * LARGE):
            time.sleep(late)
            sent, got = torch.full((size,), float(number)), torch.zeros(size)
            works = exchange.start([whole(link, sent, False), whole(link, got, True)], tag=size)
            if not exchange.progress(works, microseconds=PATIENCE // 100):
                for work in works:
                    work.wait()
            assert (got == 3 - number).all()

    with opened(device=device) as pair:
        both_well(lambda: end(pair.sender, 1, late), lambda: end(pair.receiver, 2, 0.0))


def test_messages_do_not_overtake_what_waits_for_room_that_they_would_have() -> None:
    with opened() as pair:
        exchange = RingExchange()
        sent = [torch.full((size,), float(size)) for size in (10, 20 * LARGE, 11, 12)]
        targets = [torch.zeros_like(tensor) for tensor in sent]
        first, large, second, third = (whole(pair.sender, tensor, False) for tensor in sent)
        works = [begin(first, tag=0), begin(large, tag=0)]
        works += (started := exchange.start([second], tag=0))
        works += exchange.order([third], tag=0, microseconds=0)
        assert not exchange.progress(started, microseconds=0)
        for target in targets:
            works += exchange.start([whole(pair.receiver, target, True)], tag=0)
        for work in reversed(works):
            work.wait()
        assert all(map(torch.equal, targets, sent))


@pytest.mark.parametrize(("size", "by_callers"), [(10, 2), (LARGE, 0)], ids=["small", "large"])
def test_exchange_completes_on_the_callers_stream_unless_it_is_large(
    size: int, by_callers: int
) -> None:
    with opened() as pair:
        assert swap(pair, [size]) == [0, 0]
        assert [device.moved_by_callers for device in pair.devices] == [by_callers] * 2
        assert pair.sender.counters.messages_sent == pair.sender.counters.messages_received == 1


@DEVICES
def test_messages_of_all_sizes_arrive_among_others_whoever_is_late(device: Any) -> None:
    chance = random.Random(1)
    with opened(device=device) as pair:
        for _ in range(60):
            sizes = [
                chance.choice([0, 1, 100, LARGE, 20 * LARGE]) for _ in range(chance.choice([1, 2]))
            ]
            swap(pair, sizes, patience=chance.choice([0, 200]))
            target = torch.zeros(7)
            pair.sender.send(torch.ones(7))
            pair.receiver.recv(target).wait()
            assert (target == 1).all()


def test_one_call_serves_several_links() -> None:
    with opened() as one, opened() as other:
        exchange = RingExchange()
        for number in range(5):
            got = [torch.zeros(10), torch.zeros(10)]
            for pair in (one, other):
                pair.sender.send(as_bytes(torch.full((10,), float(number))))
            messages = [
                whole(pair.receiver, target, True)
                for pair, target in zip((one, other), got, strict=True)
            ]
            messages += [whole(pair.receiver, torch.ones(3), False) for pair in (one, other)]
            for work in exchange.order(messages, tag=0, microseconds=PATIENCE):
                work.wait()
            assert all((target == number).all() for target in got)
            for pair in (one, other):
                pair.sender.recv(as_bytes(torch.zeros(3))).wait()


@DEVICES
def test_a_link_goes_on_while_its_caller_waits_for_another(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the two ends could wait for each other until the monitor's next look at its links."""
    monkeypatch.setattr(link_module, "WATCH_SECONDS", 60.0)
    with opened(device=device) as one, opened(device=device) as other:
        sent, awaited = torch.ones(20 * LARGE), torch.zeros(10)
        messages = whole(one.sender, awaited, True), whole(other.sender, sent, False)
        works = RingExchange().order(messages, tag=0, microseconds=0)
        taken = other.receiver.recv(as_bytes(torch.zeros_like(sent)))
        assert wait_for(taken.is_completed)
        one.receiver.send(as_bytes(torch.ones(10)))
        for work in works:
            work.wait()
        assert (awaited == 1).all()


@pytest.mark.parametrize("alone", [False, True], ids=["told to C together", "by itself"])
def test_a_piece_of_a_tensor_arrives_in_a_piece_of_another(alone: bool) -> None:
    with opened() as pair:
        sent, got = torch.arange(10, dtype=torch.int32), torch.zeros(5, dtype=torch.int64)
        messages = (pair.sender, sent, 4, 16, False), (pair.receiver, got, 8, 16, True)
        if alone:
            works = [begin(message, tag=3) for message in messages]
        else:
            works = [
                work
                for message in messages
                for work in RingExchange().order([message], tag=3, microseconds=1000)
            ]
        for work in works:
            work.wait()
        assert got.view(torch.int32).tolist() == [0, 0, 1, 2, 3, 4, 0, 0, 0, 0]


def test_a_message_with_another_tag_is_refused_at_both_ends() -> None:
    with opened() as pair:
        together((pair.sender, torch.ones(10), False), tag=1, patience=1000)
        with pytest.raises(LinkError, match="tag 1 instead of 2"):
            together((pair.receiver, torch.zeros(10), True), tag=2, patience=1000)
        assert is_broken(pair.sender)


@pytest.mark.parametrize("refused", [Step.COPY, Step.WRITE_VALUE, Step.RECORD_EVENT])
def test_what_the_driver_refuses_is_named_and_both_ends_hear_of_it(refused: Step) -> None:
    with opened() as pair:
        pair.devices[0].driver_for_c.before = lambda step: 719 if step is refused else 0
        with pytest.raises(LinkError, match=rf"{refused.name} failed \(719\).*message 0"):
            together(
                (pair.sender, torch.ones(LARGE), False),
                (pair.sender, torch.zeros(10), True),
                patience=1000,
            )
        with pytest.raises(LinkError, match="rank 0 aborted the link"):
            together((pair.receiver, torch.zeros(LARGE), True))


def test_an_exception_that_hides_what_c_did_does_not_lose_the_tensors() -> None:
    with opened() as pair:
        exchange = RingExchange()
        real = exchange._call

        def interrupted(*arguments: Any) -> None:
            real(*arguments)
            raise KeyboardInterrupt

        exchange._call = interrupted
        message = whole(pair.sender, torch.ones(20 * LARGE), False)  # more than the ring holds
        with pytest.raises(KeyboardInterrupt):
            exchange.order([message], tag=0, microseconds=0)
        with pair.sender._lock:
            pair.sender._out.abort()
        assert [number_of(transfer) for transfer in pair.sender._out.aborted] == [0]


def test_an_exception_before_there_are_handles_does_not_free_what_c_has_queued() -> None:
    with opened() as pair:
        exchange = RingExchange()
        tensor = torch.ones(20 * LARGE)  # more than the ring holds
        states, kept = weakref.ref(exchange._new), weakref.ref(tensor)

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        exchange._add_transfers = interrupted
        with pytest.raises(KeyboardInterrupt):
            exchange.order([whole(pair.sender, tensor, False)], tag=0, microseconds=0)
        del tensor, exchange
        gc.collect()
        assert states() is not None
        assert kept() is not None
        with pair.sender._lock:
            pair.sender._out.abort()


def test_a_peer_that_has_failed_meanwhile_is_not_believed() -> None:
    """It lets this end's streams go on, with what it never sent."""
    with opened() as pair:
        pair.sender.send(as_bytes(torch.ones(10)))
        pair.sender._ends.local.fail("its device is lost")
        with pytest.raises(LinkError, match="its device is lost"):
            together((pair.receiver, torch.zeros(10), True), patience=1000)
