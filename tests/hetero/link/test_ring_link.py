"""A link over streams that order themselves, beyond the contract. Streams and GPUs are emulated."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from hetero.device.device import CurrentStream, Word
from hetero.device.gpu import GpuDevice
from hetero.device.host import HostDevice
from hetero.errors import LinkError
from hetero.link import ring_link as link_module
from hetero.link.ring_link import RingTransfer
from tests.emulated_streams import EmulatedDevice
from tests.hetero.link.conftest import nothing_left_behind
from tests.hetero.link.joined import CPU, meanwhile, times_asleep, tried, wait_for
from tests.hetero.link.ring.pair import LARGE, Pair, Setup, count_from, cross, opened


def test_a_message_of_many_rings_goes_on_while_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a pipeline sends are never waited for. The link's thread must be told that there is more
    to do: were it to look only now and then, this would not end in time."""
    monkeypatch.setattr(link_module, "WATCH_SECONDS", 60.0)
    with opened() as pair:
        for count in (1, 2, 3):
            sent = torch.arange(count << 17, dtype=torch.int32)
            target = torch.zeros_like(sent)
            pair.sender.send(sent)
            work = pair.receiver.recv(target)
            assert wait_for(work.is_completed)
            assert torch.equal(target, sent)


@pytest.mark.parametrize("start", [2**31 + 5, 2**32 - 7], ids=["far ahead", "counting round"])
def test_counters_may_count_round(start: int) -> None:
    """Nor is one that is far ahead of the last wait taken for a held stream."""
    with opened() as pair:
        ends = pair.sender._ends.outgoing, pair.receiver._ends.incoming
        count_from(start, flows=(pair.sender._out, pair.receiver._in), directions=ends)
        for number in range(20):
            assert cross(pair, torch.full((20_000,), number, dtype=torch.uint8)), number
        pair.sender.close()
        pair.receiver.check()


class _OnlyEnqueues(CurrentStream):
    """A GPU's stream: to make it wait takes no time."""

    key = 2**64 - 1

    def wait_value(self, word: Word) -> None:
        return


def test_a_tensor_is_left_to_the_stream_that_waits_before_the_device_has_come_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with NCCL. A CPU may enqueue a whole step ahead; all its tensors would be held."""
    with opened() as pair:
        device = pair.devices[0]
        monkeypatch.setattr(device, "current_stream", _OnlyEnqueues)
        device.held = True
        memory = bytearray(4 * LARGE)
        unused = sys.getrefcount(memory)
        work = pair.sender.send(torch.frombuffer(memory, dtype=torch.float32))
        assert sys.getrefcount(memory) > unused
        work.wait()
        assert not work.is_completed()
        assert sys.getrefcount(memory) == unused


@pytest.mark.parametrize("verb", ["send", "recv"])
def test_a_tensor_that_no_link_carries_costs_the_next_message_nothing(verb: str) -> None:
    with opened() as pair:
        end = pair.sender if verb == "send" else pair.receiver
        with pytest.raises(TypeError, match="bits8"):
            getattr(end, verb)(torch.empty(4, dtype=torch.bits8))
        assert cross(pair, torch.ones(4))


def test_an_idle_link_wakes_nobody() -> None:
    others = {*os.listdir("/proc/self/task")}
    with opened() as pair:
        target = torch.zeros(10)
        works = [pair.sender.send(torch.ones(10)), pair.receiver.recv(target)]
        for work in works:
            work.wait()
        its_threads = {*os.listdir("/proc/self/task")} - others

        def is_idle() -> bool:
            before = times_asleep(its_threads)
            time.sleep(1.0)
            # The emulated streams sleep too; a thread that woke ten times a second would show.
            return (times_asleep(its_threads) - before).total() < 5

        # At once or, on a busy machine, once its threads have come to an end of what they did.
        assert wait_for(is_idle)


def test_a_close_that_has_interrupted_a_call_leaves_it_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As from the handler of a signal, in the thread that holds the link's lock."""
    monkeypatch.setattr(link_module, "_JOIN_SECONDS", 0.05)
    with opened() as pair:
        with pair.sender._lock:
            pair.sender.close()
            assert pair.sender._ends.local.is_closed
        with pytest.raises(LinkError):
            pair.sender.send(torch.ones(3))


def test_ends_that_were_given_other_rings_do_not_open() -> None:
    first, second = Setup(ring_bytes=(1 << 16, 2 << 16)).errors()
    assert "ring_bytes is 65536 here and 131072 on rank 1" in first
    assert "ring_bytes is 131072 here and 65536 on rank 0" in second


class UnpinnableDevice(EmulatedDevice):
    """A device that refuses to pin the third piece of memory it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[int] = []

    def register(self, address: int, nbytes: int) -> int:
        if len(self.pinned) == 2:
            raise LinkError(f"{nbytes} bytes cannot be pinned; raise the locked-memory limit")
        self.pinned.append(address)
        return address

    def unregister(self, address: int) -> None:
        self.pinned.remove(address)


def test_memory_that_cannot_be_pinned_fails_the_opening_at_both_ends() -> None:
    refusing = UnpinnableDevice()
    with nothing_left_behind():
        first, second = tried(Setup(devices=(refusing, EmulatedDevice())).open)
        assert isinstance(first, LinkError)
        assert "locked-memory limit" in str(first)
        assert isinstance(second, OSError)
    assert refusing.pinned == []


@pytest.fixture
def callers_alone(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[Pair]]:
    """Opens pairs whose monitor does not look at them unless it is asked to."""

    @contextmanager
    def opened_and_left() -> Iterator[Pair]:
        monkeypatch.setattr(link_module, "WATCH_SECONDS", 600.0)
        with opened() as pair:
            for end in (pair.sender, pair.receiver):
                # Its first look is over once the next is due in ten minutes.
                assert wait_for(
                    lambda end=end: (end._watch.next_check or 0) > time.monotonic() + 60
                )
            yield pair

    return opened_and_left


def test_a_small_message_goes_through_the_callers_streams_and_a_large_one_does_not(
    callers_alone: Callable[..., Any],
) -> None:
    with callers_alone() as pair:
        assert cross(pair, torch.arange(100))
        assert [device.moved_by_callers for device in pair.devices] == [1, 1]
        assert cross(pair, torch.arange(LARGE))
        assert [device.moved_by_callers for device in pair.devices] == [1, 1]


def test_a_small_message_does_not_overtake_a_large_one(callers_alone: Callable[..., Any]) -> None:
    with callers_alone() as pair:
        for number in range(20):
            sent = [torch.full((size,), number) for size in (7, LARGE, 1, 3 * LARGE, 2)]
            targets = [torch.zeros_like(tensor) for tensor in sent]
            sending = [pair.sender.send(tensor) for tensor in sent]
            receiving = [pair.receiver.recv(target) for target in targets]
            for work in reversed([*sending, *receiving]):
                work.wait()
            assert all(torch.equal(t, s) for t, s in zip(targets, sent, strict=True)), number
        assert pair.devices[0].moved_by_callers >= 20


def test_what_another_thread_waits_for_does_not_go_through_its_stream() -> None:
    """Its stream knows nothing of the work before the call of `recv`."""
    with opened() as pair:
        target = torch.zeros(10)
        receiving = pair.receiver.recv(target)
        pair.sender.send(torch.ones(10))
        with meanwhile(receiving.wait):
            pass
        assert torch.equal(target, torch.ones(10))
        assert pair.devices[1].moved_by_callers == 0


def test_waiting_for_one_message_does_not_hold_the_caller_up_for_the_next(
    callers_alone: Callable[..., Any],
) -> None:
    """Its stream would otherwise not compute with the first before the peer has made the next."""
    with callers_alone() as pair:
        targets = [torch.zeros(10), torch.zeros(10)]
        works = [pair.receiver.recv(target) for target in targets]
        for _ in targets:
            pair.sender.send(torch.ones(10))
        works[0].wait()
        assert pair.devices[1].moved_by_callers == 1
        works[1].wait()
        assert all(torch.equal(target, torch.ones(10)) for target in targets)


def test_waiting_for_a_send_does_not_hold_the_caller_up_for_a_message(
    callers_alone: Callable[..., Any],
) -> None:
    with callers_alone() as pair:
        target = torch.zeros(10)
        receiving = pair.receiver.recv(target)
        sending = pair.receiver.send(torch.ones(50_000))
        pair.sender.send(torch.ones(10))
        taking = pair.sender.recv(torch.zeros(50_000))
        sending.wait()
        assert pair.devices[1].moved_by_callers == 0
        receiving.wait()
        taking.wait()
        assert torch.equal(target, torch.ones(10))


def test_a_message_that_is_only_asked_after_arrives_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it, so the link's thread must be told of it."""
    with opened() as pair:
        assert cross(pair, torch.arange(10))
        monkeypatch.setattr(link_module, "WATCH_SECONDS", 60.0)
        time.sleep(0.2)
        for number in range(3):
            target = torch.zeros(10)
            pair.sender.send(torch.full((10,), float(number)))
            work = pair.receiver.recv(target)
            assert wait_for(work.is_completed)
            assert torch.equal(target, torch.full((10,), float(number)))


@pytest.fixture
def host_pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Of tensors in host memory, whose monitor looks only where it is asked to."""
    monkeypatch.setattr(link_module, "WATCH_SECONDS", 60.0)
    with opened(device=lambda: HostDevice(torch.device("cpu"))) as pair:
        yield pair


@pytest.mark.parametrize("count", [10, 200_000])
@pytest.mark.parametrize("is_send", [True, False])
def test_who_awaits_news_sleeps_until_the_peer_has_moved(
    count: int, is_send: bool, host_pair: Pair
) -> None:
    pair, target = host_pair, torch.zeros(count)
    sending, receiving = None, None
    if is_send:
        sending = awaited = pair.sender.send(torch.ones(count))
    else:
        receiving = awaited = pair.receiver.recv(target)
    assert isinstance(awaited, RingTransfer)
    is_early = is_send and count == 10
    assert awaited.link.await_news(awaited, 0.0) is is_early
    returned: list[bool] = []

    def wait() -> None:
        while not (returned and returned[-1]):
            returned.append(awaited.link.await_news(awaited, 60.0))

    with meanwhile(wait):
        assert is_early or wait_for(lambda: awaited.link._waiters == 1)
        assert is_early or returned == []
        sending = sending or pair.sender.send(torch.ones(count))
        receiving = receiving or pair.receiver.recv(target)
        receiving.wait()
    assert (target == 1).all()
    assert awaited.link._waiters == 0
    assert awaited.link._blocked == []


@pytest.mark.timeout(60)
def test_a_wrong_checksum_in_a_large_message_ends_the_wait_for_it() -> None:
    """The stream that finds it writes no word any more."""
    with opened(device=lambda: HostDevice(CPU, checksum=True)) as pair:
        nbytes = 3 * pair.sender._out._state.chunk_bytes
        sending = pair.sender.send(torch.ones(nbytes, dtype=torch.uint8))
        assert wait_for(sending.is_completed)
        ctypes.memset(pair.sender._ends.outgoing_ring, 0, 1)
        receiving = pair.receiver.recv(torch.zeros(nbytes, dtype=torch.uint8))
        with pytest.raises(LinkError, match="wrong checksum in its bytes"):
            receiving.wait()


def test_who_spins_for_an_entry_returns_with_the_first_that_is_not_received(
    host_pair: Pair,
) -> None:
    link, target = host_pair.receiver, torch.zeros(10)
    link.spin_for_entry(1e-3)
    for number in (1.0, 2.0):
        host_pair.sender.send(torch.full((10,), number))
        link.spin_for_entry(20.0)
        work = link.recv(target)
        work.wait()
        assert (target == number).all()
    link.close()
    link.spin_for_entry(20.0)
    assert link._blocked == []


def test_news_are_awaited_no_longer_than_told_or_than_the_peer_lives(host_pair: Pair) -> None:
    pair = host_pair
    receiving = pair.receiver.recv(torch.zeros(10))
    assert isinstance(receiving, RingTransfer)
    assert not pair.receiver.await_news(receiving, 0.01)
    with meanwhile(lambda: wait_for(lambda: pair.receiver.await_news(receiving, 60.0))):
        assert wait_for(lambda: pair.receiver._waiters == 1)
        pair.sender.close()
    assert "has ended or closed the link" in str(receiving.error)


def test_the_monitor_tells_of_the_progress_that_it_makes(host_pair: Pair) -> None:
    link, told = host_pair.receiver, threading.Event()
    link.on_progress = told.set
    for _ in range(2):
        work = link.recv(torch.zeros(10))
        assert not work.is_completed()
        assert wait_for(lambda: link._is_armed)
        told.clear()
        host_pair.sender.send(torch.ones(10))
        assert told.wait(20)
        assert wait_for(work.is_completed)


class FakeStream:
    """A stream that notes which threads have called the GPU's runtime through it."""

    cuda_stream = 0
    device_index = 0

    def __init__(self) -> None:
        self.asked_by: list[threading.Thread] = []

    def query(self) -> bool:
        self.asked_by.append(threading.current_thread())
        return True


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    made = FakeStream()
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def test_new_thread_gets_a_gpu_context_before_the_driver_is_called(
    stream: FakeStream,
) -> None:
    driver: Any = MagicMock()
    device = GpuDevice(torch.device("cuda:0"), driver)
    threads = [threading.Thread(target=device.current_stream) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    assert stream.asked_by == threads
    for _ in range(2):
        device.current_stream()
    assert stream.asked_by == [*threads, threading.current_thread()]


def test_a_stream_that_a_cuda_graph_captures_is_refused(
    stream: FakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = GpuDevice(torch.device("cuda:0"), MagicMock())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA graph cannot hold"):
        device.current_stream()
    assert stream.asked_by == []
