"""What a link does when an end fails, hangs or closes while it is in use. Streams are emulated."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero.device.device import CurrentStream, Word
from hetero.device.host import HostDevice
from hetero.errors import LinkError
from hetero.link import ring_link as link_module
from hetero.native.binding import Step
from tests.emulated_streams import EmulatedDevice
from tests.hetero.link.joined import CPU, is_broken, meanwhile, wait_for
from tests.hetero.link.ring.pair import (
    LARGE,
    SHORT,
    Pair,
    cross,
    number_of,
    opened,
    recv_from_held,
)
from tests.hetero.link.test_handshake import both_well


def test_a_peer_whose_device_never_gets_there_breaks_the_link_in_time() -> None:
    """The sender's program has gone on; its device hangs. Nobody waits on the CPU for it."""
    with opened(timeout=SHORT) as pair:
        sent, work = recv_from_held(pair)
        pair.receiver.check()
        assert wait_for(lambda: is_broken(pair.receiver))
        with pytest.raises(LinkError, match=r"rank 1 \(stage 1\).*nothing moved for 1 s"):
            pair.receiver.check()
        assert wait_for(work.is_completed)
        with pytest.raises(LinkError, match="rank 1"):
            work.wait()
        assert wait_for(lambda: is_broken(pair.sender)), "the sender was not told"
        with pytest.raises(LinkError):
            sent.wait()


def test_the_failure_is_known_before_the_stream_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that whoever waits for the device and then asks the link never uses what was not sent."""
    with opened(timeout=SHORT) as pair:
        known: list[bool] = []
        release = pair.receiver._unblock_streams

        def watched() -> None:
            known.append(is_broken(pair.receiver))
            release()

        monkeypatch.setattr(pair.receiver, "_unblock_streams", watched)
        recv_from_held(pair)
        assert wait_for(lambda: bool(known))
        assert known[0]


def test_what_a_failed_peer_released_is_not_taken_for_a_message() -> None:
    """It writes words that its own device waits for, and this end's device has not."""
    with opened() as pair:
        _, work = recv_from_held(pair)
        with pair.sender._lock:
            # As if an entry waited for the first to be consumed.
            pair.sender._out._state.awaited = 1
            pair.sender._fail(LinkError("its device is lost"))
        assert pair.receiver._ends.incoming.consumed == 1
        assert not work.is_completed() or is_broken(pair.receiver)
        with pytest.raises(LinkError, match="its device is lost"):
            pair.receiver.check()


class Memory(bytearray):
    """Memory of a tensor that can be seen to be let go of."""


def test_failed_link_keeps_memory_of_pending_copies_until_close() -> None:
    with opened() as pair:
        pair.devices[0].held = True
        memory = Memory(4 * LARGE)
        kept = weakref.ref(memory)
        work = pair.sender.send(torch.frombuffer(memory, dtype=torch.float32))
        with pair.sender._lock:
            pair.sender._fail(LinkError("its device is lost"))
        del memory, work
        gc.collect()
        assert kept() is not None
        pair.devices[0].released.set()
    gc.collect()
    assert kept() is None


class RestlessDevice(EmulatedDevice):
    """A device whose work never ends."""

    def synchronize(self, seconds: float) -> bool:
        return False


def test_memory_that_a_device_goes_on_using_outlives_its_link() -> None:
    with opened(device=RestlessDevice) as pair:
        ends = weakref.ref(pair.sender._ends)
    del pair
    gc.collect()
    left = ends()
    assert left is not None
    left.close()


def test_memory_that_a_wait_goes_on_looking_at_outlives_its_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C would read where there is nothing any more, which ends the process."""
    monkeypatch.setattr(link_module, "_JOIN_SECONDS", 0.1)
    with opened() as pair:
        work = pair.receiver.recv(torch.zeros(10))
        entered, leave = threading.Event(), threading.Event()

        def held(*seen: object, **spin: float) -> None:
            entered.set()
            leave.wait(120)

        def wait() -> None:
            with pytest.raises(LinkError):
                work.wait()

        monkeypatch.setattr(pair.receiver._ends.local, "sleep", held)
        with meanwhile(wait):
            assert entered.wait(120)
            both_well(pair.receiver.close, pair.sender.close)
            assert pair.receiver._ends.incoming.posted == 0
            leave.set()
        pair.receiver._ends.close()


def test_a_link_that_another_thread_closes_ends_the_wait_with_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened() as pair:
        work = pair.receiver.recv(torch.zeros(10))
        real, asleep = pair.receiver._ends.local.sleep, threading.Event()

        def wake_late(expected: int, seconds: float, **spin: float) -> None:
            if threading.current_thread() is threading.main_thread():
                asleep.set()
                time.sleep(0.5)
            else:
                real(expected, seconds, **spin)

        def close() -> None:
            assert asleep.wait(120)
            both_well(pair.receiver.close, pair.sender.close)

        monkeypatch.setattr(pair.receiver._ends.local, "sleep", wake_late)
        with meanwhile(close), pytest.raises(LinkError, match="closed while a transfer was under"):
            work.wait()


def test_nothing_is_enqueued_once_another_thread_has_closed_the_link() -> None:
    with opened() as pair:
        real = pair.sender._device.current_stream

        def closed_meanwhile() -> CurrentStream:
            both_well(pair.sender.close, pair.receiver.close)
            return real()

        pair.devices[0].current_stream = closed_meanwhile
        for use in (pair.sender.send, pair.sender.recv):
            with pytest.raises(LinkError, match="the link is closed"):
                use(torch.ones(10))


def test_a_transfer_that_ended_may_be_asked_after_its_link_was_closed() -> None:
    with opened() as pair:
        works = [pair.receiver.recv(torch.zeros(LARGE)), pair.sender.send(torch.ones(LARGE))]
        for work in works:
            work.wait()
    for work in works:
        assert work.is_completed()
        work.wait()


def test_a_receive_that_was_posted_long_ago_is_not_overdue_while_earlier_ones_arrive() -> None:
    with opened() as pair:
        targets = [torch.zeros(4) for _ in range(3)]
        works: list[Any] = [pair.receiver.recv(target) for target in targets]
        for work in works:
            work.begun_at = 0.0
        for work in works:
            pair.sender.send(torch.ones(4))
            work.wait()
            with pair.receiver._lock:
                pair.receiver._fail_if_stalled()
        pair.receiver.check()


def test_a_call_of_the_driver_that_does_not_return_is_released_after_the_deadline() -> None:
    """A stream that is full, and waits for a peer that hangs, blocks whoever gives it more work."""
    with opened(timeout=SHORT) as pair:
        recv_from_held(pair)
        released = []

        def full_stream(step: Step) -> int:
            if step is Step.COPY:
                released.append(wait_for(lambda: pair.receiver._ends.incoming.produced != 0))
            return 0

        pair.devices[1].driver_for_c.before = full_stream
        with suppress(LinkError):
            pair.receiver.send(torch.ones(LARGE)).wait()
        assert set(released) == {True}
        with pytest.raises(LinkError, match="rank 1"):
            pair.receiver.check()


def test_a_thread_has_its_stream_asked_for_before_the_driver_is_called() -> None:
    """That gives it a context, without which a GPU's driver refuses its calls."""
    with opened() as pair:
        asked: list[threading.Thread] = []
        real = pair.devices[0].current_stream

        def asking() -> CurrentStream:
            asked.append(threading.current_thread())
            return real()

        sending = pair.sender.send(torch.ones(20 * LARGE))
        pair.devices[0].current_stream = asking
        with meanwhile(sending.wait) as waiting:
            pair.receiver.recv(torch.zeros(20 * LARGE)).wait()
        assert waiting in asked


def test_a_close_waits_for_as_long_as_the_peer_goes_on_taking_what_was_sent() -> None:
    """Longer than the timeout in all."""
    timeout = 4.0
    with opened(timeout=timeout, device=lambda: HostDevice(CPU)) as pair:
        sent = [torch.full((20 * LARGE,), float(number)) for number in range(4)]
        for message in sent:
            pair.sender.send(message)
        with meanwhile(pair.sender.close):
            for message in sent:
                time.sleep(0.3 * timeout)
                target = torch.zeros_like(message)
                pair.receiver.recv(target).wait()
                assert torch.equal(target, message)


def test_several_threads_may_close_a_link() -> None:
    with opened(device=lambda: HostDevice(CPU)) as pair, ThreadPoolExecutor() as pool:
        pair.sender.send(torch.ones(LARGE))
        closing = [pool.submit(pair.sender.close) for _ in range(4)]
        pair.receiver.recv(torch.zeros(LARGE)).wait()
        for one in closing:
            one.result()


def test_a_link_keeps_its_memory_while_a_thread_waits_for_a_word_in_it() -> None:
    read, has_begun = [], threading.Event()
    with opened() as pair, ThreadPoolExecutor() as pool:

        def wait_value(_: object) -> None:
            has_begun.set()
            time.sleep(0.1)
            read.append(pair.receiver._ends.incoming.produced)

        stream: Any = SimpleNamespace(wait_value=wait_value)
        waiting = pool.submit(pair.receiver.wait_value, stream, Word(0, 0))
        assert has_begun.wait(120)
        pair.receiver.close()
        waiting.result()
    assert read == [0]


def test_a_fork_that_closes_a_link_leaves_it_to_its_rank() -> None:
    with opened(device=lambda: HostDevice(CPU)) as pair:
        if (child := os.fork()) == 0:
            try:
                pair.sender.close()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert cross(pair, torch.ones(20 * LARGE))


def test_a_fork_cannot_use_a_link_of_its_parents() -> None:
    """It has the link's memory, and would overwrite what its parent sends."""
    with opened(device=lambda: HostDevice(CPU)) as pair:
        posted = pair.receiver.recv(torch.zeros(3))
        uses = {
            "send": lambda: pair.sender.send(torch.ones(3)),
            "recv": lambda: pair.receiver.recv(torch.ones(3)),
            "wait": posted.wait,
            "check": pair.sender.check,
        }
        child, told = refusals_in_fork(uses)
        os.waitpid(child, 0)
        assert told.keys() == uses.keys()
        for text in told.values():
            assert "belongs to the process that this one was forked from" in text
        pair.sender.send(torch.ones(3))
        posted.wait()
        assert cross(pair, torch.ones(20 * LARGE))


def test_a_fork_keeps_what_its_parents_messages_hold() -> None:
    """A GPU's event among it, say: to free one aborts a process that was forked."""
    with opened() as pair:
        pair.receiver.recv(torch.zeros(3))
        held = weakref.ref(pair.receiver._in.waiting[0].tensor)
        if (child := os.fork()) == 0:
            os._exit(0 if held() is not None else 1)
        assert os.waitpid(child, 0)[1] == 0


def refusals_in_fork(uses: dict[str, Callable[[], object]]) -> tuple[int, dict[str, str]]:
    """A fork, and what it is told by each of these that fail in it."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            told = {}
            for name, use in uses.items():
                try:
                    use()
                except LinkError as error:
                    told[name] = str(error)
            os.write(writing, json.dumps(told).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        return child, json.loads(pipe.read())


def test_an_interrupted_wait_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as pair:
        receiving = pair.receiver.recv(torch.zeros(10))

        def interrupted(**arguments: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(pair.receiver, "_enqueue", interrupted)
            with pytest.raises(KeyboardInterrupt):
                receiving.wait()
        assert pair.receiver._waiters == 0
        pair.sender.send(torch.ones(10))
        receiving.wait()


def test_a_failure_of_the_driver_names_the_link_and_both_ends_hear_of_it() -> None:
    with opened() as pair:
        pair.devices[0].driver_for_c.before = lambda step: 719 if step is Step.COPY else 0
        sending = pair.sender.send(torch.ones(LARGE))
        with pytest.raises(LinkError, match=r"link rank 0 .* COPY failed \(719\).*message 0"):
            sending.wait()
        with pytest.raises(LinkError, match=r"link rank 1 .* rank 0 aborted the link"):
            pair.receiver.recv(torch.zeros(LARGE)).wait()
        # The copy may be under way for all that is known.
        assert [number_of(transfer) for transfer in pair.sender._out.aborted] == [0]


def send_interrupted(pair: Pair, tensor: torch.Tensor) -> None:
    """A send that an exception ends once C has enqueued it, before Python has noted that."""
    flow = pair.sender._out
    real = flow._call

    def interrupted(*arguments: object) -> None:
        flow._call = real
        real(*arguments)
        raise KeyboardInterrupt

    flow._call = interrupted
    with pytest.raises(KeyboardInterrupt):
        pair.sender.send(tensor)


def test_an_exception_that_hides_what_c_did_does_not_lose_the_tensor() -> None:
    with opened() as pair:
        send_interrupted(pair, torch.ones(LARGE))
        with pair.sender._lock:
            pair.sender._out.abort()
        assert [number_of(transfer) for transfer in pair.sender._out.aborted] == [0]


def test_a_message_that_an_exception_hid_arrives_once() -> None:
    with opened() as pair:
        send_interrupted(pair, torch.ones(10))
        pair.sender.send(torch.full((10,), 2.0))
        for sent in (1.0, 2.0):
            target = torch.zeros(10)
            pair.receiver.recv(target).wait()
            assert torch.equal(target, torch.full((10,), sent))


def test_what_others_left_under_way_is_brought_on_when_a_wait_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The link's thread leaves it to whoever waits, and is told when nobody does any more."""
    with opened() as pair:
        monkeypatch.setattr(link_module, "WATCH_SECONDS", 60.0)
        pair.sender.send(torch.ones(20 * LARGE))
        receiving = pair.sender.recv(torch.zeros(10))
        with meanwhile(receiving.wait):
            assert wait_for(lambda: pair.sender._waiters == 1)
            time.sleep(0.1)
            pair.receiver.send(torch.ones(10))
        target = torch.zeros(20 * LARGE)
        pair.receiver.recv(target).wait()
        assert torch.equal(target, torch.ones(20 * LARGE))
