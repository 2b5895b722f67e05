"""What a link whose streams order themselves promises beyond the contract. Streams are emulated."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetero.device.base import Mark
from hetero.device.ordered import CurrentStream, OrderedStream
from hetero.errors import LinkError
from hetero.transport.base import LinkDescription
from hetero.transport.ordered import link as link_module
from hetero.transport.ordered.link import OrderedLink
from hetero.transport.ordered.opening import RingMemory, open_ordered
from tests.emulated_streams import EmulatedOrderedDevice
from tests.hetero.transport.test_handshake import both, meeting

SHORT = 1.0
LARGE = 5_000
"""Elements of a message that goes through streams of the link."""


class HeldDevice(EmulatedOrderedDevice):
    """A device whose next sends can be held back: its work before them never ends."""

    def __init__(self) -> None:
        super().__init__()
        self.held = False
        self.let_go = threading.Event()

    def mark(self) -> Mark:
        return _NeverReached(self.let_go) if self.held else super().mark()


class _NeverReached(Mark):
    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def reached(self) -> bool:
        return self._event.is_set()

    def synchronize(self) -> None:
        self._event.wait()

    def order_current_stream(self) -> None:
        self._event.wait()


class Pair:
    """Both ends of one link, in one process."""

    def __init__(
        self, memory: RingMemory, *, timeout: float, device: Callable[[], Any] = HeldDevice
    ) -> None:
        store = dist.HashStore()
        self.devices = [device(), device()]

        def open_end(rank: int) -> OrderedLink:
            ours = meeting(rank, store, timeout=20.0)
            description = LinkDescription(
                rank=rank, peer=1 - rank, stage=rank, peer_stage=1 - rank, job="j", timeout=timeout
            )
            return open_ordered(
                replace(ours, description=description),
                memory=memory,
                ring_bytes=64 << 10,
                chunk_bytes=16 << 10,
                device=self.devices[rank],
            )

        opened: list[Any] = both(lambda: open_end(0), lambda: open_end(1))
        self.sender: OrderedLink = opened[0]
        self.receiver: OrderedLink = opened[1]


@contextmanager
def opened(
    memory: RingMemory = "host", *, timeout: float = 20.0, device: Callable[[], Any] = HeldDevice
) -> Iterator[Pair]:
    pair = Pair(memory, timeout=timeout, device=device)
    try:
        yield pair
    finally:
        for end in pair.devices:
            if isinstance(end, HeldDevice):
                end.let_go.set()
        both(pair.sender.close, pair.receiver.close)


def wait_for(condition: Any, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


def is_broken(link: OrderedLink) -> bool:
    try:
        link.check()
    except LinkError:
        return True
    return False


def test_a_message_larger_than_the_ring_is_taken_in_parts() -> None:
    sent = torch.arange(50_000, dtype=torch.int32)
    target = torch.zeros_like(sent)
    with opened("device") as pair:
        works = [pair.receiver.recv(target), pair.sender.send(sent)]
        for work in works:
            work.wait()
        assert torch.equal(target, sent)


def test_a_message_of_many_rings_goes_on_while_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a pipeline sends are never waited for. The link's thread must be told that there is more
    to do: were it to look only now and then, this would not end in time."""
    monkeypatch.setattr(link_module, "_WATCH_SECONDS", 60.0)
    with opened() as pair:
        for count in (1, 2, 3):
            sent = torch.arange(count << 17, dtype=torch.int32)
            target = torch.zeros_like(sent)
            pair.sender.send(sent)
            work = pair.receiver.recv(target)
            assert wait_for(work.done)
            assert torch.equal(target, sent)


def test_a_stream_is_never_told_to_wait_for_what_is_not_enqueued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rule that keeps two GPUs from waiting for each other for ever."""
    stream_type = type(EmulatedOrderedDevice().stream())
    broken: list[str] = []
    with opened() as pair:
        real = stream_type.wait_value
        ends = pair.sender._ends, pair.receiver._ends

        def checked(self: OrderedStream, word: int, value: int, *, aside: bool = False) -> None:
            for end in ends:
                posted, retired = end.incoming.posted, end.outgoing.retired
                if word == end.incoming.produced_word and posted < value:
                    broken.append(f"waits for entry {value}, {posted} posted")
                if word == end.outgoing.consumed_word and retired < value:
                    broken.append(f"waits for room {value}, {retired} retired")
            real(self, word, value)

        monkeypatch.setattr(stream_type, "wait_value", checked)
        sent = [torch.full((30_000,), n, dtype=torch.uint8) for n in range(40)]
        targets = [torch.zeros_like(tensor) for tensor in sent]
        works = [pair.sender.send(tensor) for tensor in sent[:20]]
        works += [pair.receiver.recv(target) for target in targets]
        works += [pair.sender.send(tensor) for tensor in sent[20:]]
        for work in works:
            work.wait()
        assert all(torch.equal(t, s) for t, s in zip(targets, sent, strict=True))
    assert broken == []


def test_counters_may_count_round() -> None:
    start = 2**32 - 7
    with opened() as pair:
        for link, flow, direction in (
            (pair.sender, pair.sender._out, pair.sender._ends.outgoing),
            (pair.receiver, pair.receiver._in, pair.receiver._ends.incoming),
        ):
            flow.count = start
            link._out.allotment._freed = start
            direction.release_receiver(start)
            direction.release_sender(start)
            direction._words[direction._posted] = start
            direction.retire(start)
        for number in range(40):
            sent = torch.full((20_000,), number, dtype=torch.uint8)
            target = torch.zeros_like(sent)
            works = [pair.sender.send(sent), pair.receiver.recv(target)]
            for work in works:
                work.wait()
            assert torch.equal(target, sent), number


def test_a_peer_whose_device_never_gets_there_breaks_the_link_in_time() -> None:
    """The sender's program has gone on; its device hangs. Nobody waits on the CPU for it."""
    with opened(timeout=SHORT) as pair:
        pair.devices[0].held = True
        sent = pair.sender.send(torch.ones(LARGE))
        work = pair.receiver.recv(torch.zeros(LARGE))
        pair.receiver.progress_until_enqueued(work)  # type: ignore[arg-type]
        pair.receiver.check()
        begin = time.monotonic()
        assert wait_for(lambda: is_broken(pair.receiver))
        assert time.monotonic() - begin < SHORT + 5
        with pytest.raises(LinkError, match=r"rank 1 \(stage 1\).*nothing moved for 1 s"):
            pair.receiver.check()
        assert work.done()
        with pytest.raises(LinkError, match="rank 1"):
            work.wait()
        assert wait_for(lambda: is_broken(pair.sender)), "the sender was not told"
        with pytest.raises(LinkError):
            sent.wait()


def test_the_failure_is_known_before_the_stream_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that whoever waits for the device and then asks the link never uses what was not sent."""
    with opened(timeout=SHORT) as pair:
        pair.devices[0].held = True
        pair.sender.send(torch.ones(LARGE))
        known: list[bool] = []
        release = pair.receiver._release_streams

        def watched() -> None:
            known.append(is_broken(pair.receiver))
            release()

        monkeypatch.setattr(pair.receiver, "_release_streams", watched)
        work = pair.receiver.recv(torch.zeros(LARGE))
        pair.receiver.progress_until_enqueued(work)  # type: ignore[arg-type]
        assert wait_for(lambda: bool(known))
        assert known[0]


def test_an_idle_link_wakes_nobody() -> None:
    with opened() as pair:
        target = torch.zeros(10)
        works = [pair.sender.send(torch.ones(10)), pair.receiver.recv(target)]
        for work in works:
            work.wait()
        time.sleep(1.5)
        before = time.process_time()
        time.sleep(1.0)
        # The emulated streams sleep too; a thread that woke ten times a second would show.
        assert time.process_time() - before < 0.01


def test_ends_that_were_given_other_rings_do_not_open() -> None:
    store = dist.HashStore()

    def open_end(rank: int) -> OrderedLink:
        return open_ordered(
            meeting(rank, store),
            memory="host",
            ring_bytes=(1 + rank) << 16,
            chunk_bytes=16 << 10,
            device=EmulatedOrderedDevice(),
        )

    for error in both(lambda: open_end(0), lambda: open_end(1)):
        assert isinstance(error, LinkError)
        assert "ring_bytes" in str(error)


class UnpinnableDevice(EmulatedOrderedDevice):
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


def test_memory_that_cannot_be_pinned_ends_the_opening_at_both_ends_and_leaves_nothing() -> None:
    store = dist.HashStore()
    refusing = UnpinnableDevice()
    held = len(list(Path("/proc/self/fd").iterdir()))

    def open_end(rank: int) -> OrderedLink:
        return open_ordered(
            meeting(rank, store),
            memory="host",
            ring_bytes=1 << 16,
            chunk_bytes=16 << 10,
            device=refusing if rank == 0 else EmulatedOrderedDevice(),
        )

    first, second = both(lambda: open_end(0), lambda: open_end(1))
    assert isinstance(first, LinkError)
    assert "locked-memory limit" in str(first)
    assert isinstance(second, OSError)
    assert refusing.pinned == []
    assert len(list(Path("/proc/self/fd").iterdir())) == held


class CountingDevice(EmulatedOrderedDevice):
    """A device that counts the messages which go through the callers' own streams."""

    def __init__(self) -> None:
        super().__init__()
        self.by_caller = 0

    def current_stream(self) -> CurrentStream:
        stream = super().current_stream()
        real = stream.copy_and_write

        def counted(target: int, source: int, nbytes: int, *, word: int, value: int) -> None:
            self.by_caller += 1
            real(target, source, nbytes, word=word, value=value)

        stream.copy_and_write = counted  # type: ignore[method-assign]
        return stream


def cross(pair: Pair, sent: torch.Tensor) -> bool:
    target = torch.zeros_like(sent)
    receiving = pair.receiver.recv(target)
    sending = pair.sender.send(sent)
    receiving.wait()
    sending.wait()
    return torch.equal(target, sent)


def test_a_small_message_goes_through_the_callers_streams_and_a_large_one_does_not() -> None:
    with opened(device=CountingDevice) as pair:
        assert cross(pair, torch.arange(100))
        assert [device.by_caller for device in pair.devices] == [1, 1]
        assert cross(pair, torch.arange(LARGE))
        assert [device.by_caller for device in pair.devices] == [1, 1]


def test_a_small_message_does_not_overtake_a_large_one() -> None:
    with opened(device=CountingDevice) as pair:
        for number in range(20):
            sent = [torch.full((size,), number) for size in (7, LARGE, 1, 3 * LARGE, 2)]
            targets = [torch.zeros_like(tensor) for tensor in sent]
            sending = [pair.sender.send(tensor) for tensor in sent]
            receiving = [pair.receiver.recv(target) for target in targets]
            for work in reversed([*sending, *receiving]):
                work.wait()
            assert all(torch.equal(t, s) for t, s in zip(targets, sent, strict=True)), number
        assert pair.devices[0].by_caller >= 20


def test_what_another_thread_waits_for_does_not_go_through_its_stream() -> None:
    """Its stream knows nothing of the work before the call of `recv`."""
    with opened(device=CountingDevice) as pair:
        target = torch.zeros(10)
        receiving = pair.receiver.recv(target)
        pair.sender.send(torch.ones(10))
        waiting = threading.Thread(target=receiving.wait)
        waiting.start()
        waiting.join()
        assert torch.equal(target, torch.ones(10))
        assert pair.devices[1].by_caller == 0


def test_what_a_failed_peer_released_is_not_taken_for_a_message() -> None:
    """It writes words that its own device waits for, and this end's device has not."""
    with opened() as pair:
        work = pair.receiver.recv(torch.zeros(LARGE))
        pair.devices[0].held = True
        pair.sender.send(torch.ones(LARGE))
        pair.receiver.progress_until_enqueued(work)  # type: ignore[arg-type]
        with pair.sender._lock:
            pair.sender._out.awaited = 1
            pair.sender._break(LinkError("its device is lost"))
        assert pair.receiver._ends.incoming.consumed == 1
        assert not work.done() or is_broken(pair.receiver)
        with pytest.raises(LinkError, match="its device is lost"):
            pair.receiver.check()


def test_a_transfer_that_ended_may_be_asked_after_its_link_was_closed() -> None:
    with opened() as pair:
        works = [pair.receiver.recv(torch.zeros(LARGE)), pair.sender.send(torch.ones(LARGE))]
        for work in works:
            work.wait()
    for work in works:
        assert work.done()
        work.wait()
