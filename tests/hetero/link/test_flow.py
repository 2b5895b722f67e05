"""What C gives to a GPU's driver, call by call. The driver is a stand-in that notes its calls."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.device.cuda_driver import CudaDriver
from hetero.device.device import COMPLETED, CurrentStream, Event
from hetero.device.driver_base import GpuDriver
from hetero.device.hip_driver import HipDriver
from hetero.errors import LinkError
from hetero.link.flow import UnexpectedEntry
from hetero.link.header import Header
from hetero.link.ring import COUNTER_MASK, ahead
from hetero.native.binding import RING_ENTRIES, Progress, RingRecord
from tests.hetero.link.ring.driven import CONTROL, INCOMING_RING, JOIN, OUTGOING_RING, World
from tests.hetero.link.ring.pair import count_from

VENDORS = pytest.mark.parametrize("vendor", [CudaDriver, HipDriver])
ONE, THREE = (0xA0, 0xA0, 0xA0), (0xA0, 0xB0, 0xC0)
KEYS = (0x51, 0x52)
RING_BYTES = 16 << 10

sizes = st.sampled_from([0, 1, 511, 512, 513, 3000, 4096, 4097, 9000, 16384, 40_000])
keys = st.sampled_from(KEYS)
streams = st.none() | keys
# Whose message it is and the stream of whoever calls, which are mostly one.
callers = keys.map(lambda key: (key, key)) | st.tuples(keys, streams)
MARKS = {"unmarked": None, "idle": COMPLETED, "event": Event(0xD0)}
steps = st.one_of(
    st.tuples(st.just("send"), sizes, callers, st.sampled_from(sorted(MARKS))),
    st.tuples(st.just("expect what was sent"), callers),
    st.tuples(st.just("wait"), streams),
    st.tuples(
        st.just("advance"),
        st.sampled_from(["produced", "consumed"]),
        st.sampled_from([1, 2, RING_ENTRIES]),
    ),
    st.tuples(st.just("again"), streams),
    st.tuples(st.just("exchange"), st.lists(sizes, max_size=2), st.booleans(), keys),
)


@pytest.fixture(autouse=True)
def at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch says that the callers' device is the current one."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)


def _stream(world: World, end: int, key: int | None) -> CurrentStream | None:
    return None if key is None else world.devices[end].callers(key)


def send(world: World, nbytes: int, callers: tuple[int, int | None], mark: str) -> None:
    caller, key = callers
    stream = _stream(world, 0, key)
    # Only its caller may begin what follows the caller's own stream.
    by_caller = key == caller and stream is not None and stream.is_current_device()
    event = MARKS[mark] if by_caller or MARKS[mark] else world.devices[0].record_event()
    transfer = world.transfer(nbytes, is_receive=False, caller=caller, event=event)
    world.enqueue(world.sender, stream)
    if transfer.event is None and transfer.end_count is None:
        transfer.follow(world.devices[0].record_event())


def receive(world: World, nbytes: int, callers: tuple[int, int | None], mark: str) -> None:
    caller, key = callers
    world.transfer(nbytes, is_receive=True, caller=caller, event=MARKS[mark])
    world.enqueue(world.receiver, _stream(world, 1, key))


def expect(world: World, callers: tuple[int, int | None]) -> None:
    sent = [t for t in world.transfers if t.flow is world.sender]
    if (number := world.messages(world.receiver)) < len(sent):
        receive(world, sent[number].state.nbytes, callers, "idle")


def wait(world: World, key: int | None) -> None:
    if world.receiver.waiting:
        awaited = world.receiver.waiting[0]
        world.enqueue(world.receiver, _stream(world, 1, key), awaited=awaited)


def again(world: World, key: int | None) -> None:
    world.enqueue(world.sender, _stream(world, 0, key))


def exchange(world: World, sent_sizes: list[int], receives: bool, key: int) -> None:
    """Sends, and with them what was sent before, by one call of C."""
    messages = [] if world.sender.waiting else [(nbytes, False) for nbytes in sent_sizes]
    sent = [t for t in world.transfers if t.flow is world.sender]
    number = world.messages(world.receiver)
    if receives and not world.receiver.waiting and number < len(sent):
        messages.append((sent[number].state.nbytes, True))
    if messages:
        world.exchange(messages, caller=key)


STEPS = {
    "exchange": exchange,
    "send": send,
    "expect what was sent": expect,
    "wait": wait,
    "advance": World.advance,
    "again": again,
}


class Observer:
    """Looks after each step whether the link's rules hold."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._looked_at = [0, 0]
        self._posted = world.direction.posted
        self._offset = 0

    def look(self) -> None:
        self._no_stream_waits_for_what_is_not_enqueued()
        self._entries_are_the_messages_parts_in_order()
        self._entries_in_flight_lie_apart()

    def _no_stream_waits_for_what_is_not_enqueued(self) -> None:
        """The rule that keeps two GPUs from waiting for each other for ever."""
        direction = self._world.direction
        limits = {
            direction.produced_word: direction.posted,
            direction.consumed_word: direction.retired,
        }
        for end, recorder in enumerate(self._world.recorders):
            for call in recorder.calls[self._looked_at[end] :]:
                if "WaitValue32" in call[0]:
                    assert ahead(call[3], limits[call[2]]) <= 0, call
            self._looked_at[end] = len(recorder.calls)

    def _entries_are_the_messages_parts_in_order(self) -> None:
        while self._posted != self._world.direction.posted:
            entry = self._world.direction.record(self._posted)
            assert entry.offset == self._offset
            number = Header.unpack(bytes(entry.header)).sequence
            sent = [t for t in self._world.transfers if t.flow is self._world.sender]
            whole = sent[number].state.nbytes
            self._offset = entry.offset + entry.nbytes
            assert self._offset <= whole
            if self._offset == whole:
                self._offset = 0
            self._posted = (self._posted + 1) & COUNTER_MASK

    def _entries_in_flight_lie_apart(self) -> None:
        direction = self._world.direction
        count = ahead(direction.posted, direction.retired)
        assert count <= RING_ENTRIES
        found = [direction.record(direction.retired + number) for number in range(count)]
        in_flight = sorted((e for e in found if e.nbytes), key=lambda e: e.slot)
        for one, other in itertools.pairwise(in_flight):
            assert one.slot + one.nbytes <= other.slot
        assert all(_is_inside(entry) for entry in found)


def _is_inside(entry: Any) -> bool:
    return entry.slot >= 0 and entry.slot + entry.nbytes <= RING_BYTES


@VENDORS
@settings(max_examples=200, deadline=None)
@given(
    script=st.lists(steps, min_size=15, max_size=50),
    handles=st.sampled_from([ONE, THREE]),
    start=st.sampled_from([0, 1, 3 * 2**30 - 60]),
)
def test_the_rules_of_the_ring_hold_whatever_the_order_of_calls(
    vendor: type[GpuDriver],
    script: list[tuple[Any, ...]],
    handles: tuple[int, int, int],
    start: int,
) -> None:
    check_script(vendor, script, handles=handles, start=start)


@settings(max_examples=50, deadline=None)
@given(script=st.lists(steps, min_size=15, max_size=50))
def test_they_hold_while_counters_count_round(script: list[tuple[Any, ...]]) -> None:
    check_script(CudaDriver, script, handles=THREE, start=2**32 - 5)


def check_script(
    vendor: type[GpuDriver],
    script: list[tuple[Any, ...]],
    *,
    handles: tuple[int, int, int],
    start: int,
) -> None:
    world = World(vendor, handles=handles, ring_bytes=RING_BYTES)
    count_from(start, flows=(world.sender, world.receiver), directions=(world.direction,))
    observer = Observer(world)
    for name, *arguments in script:
        before = world.sender.count, world.receiver.count
        STEPS[name](world, *arguments)
        observer.look()
        moved = [world.receiver.count != before[1], world.sender.count != before[0]]
        assert world.rung() == moved, name


def test_the_ring_holds_as_many_entries_as_it_has_records_for() -> None:
    world = World(CudaDriver)
    for _ in range(RING_ENTRIES + 3):
        send(world, 0, (KEYS[0], None), "idle")
    assert world.sender.count == RING_ENTRIES
    assert len(world.sender.waiting) == 3


@pytest.mark.parametrize("field", ["offset", "nbytes", "slot", "header"])
def test_a_record_that_was_overwritten_is_refused(field: str) -> None:
    world = World(CudaDriver)
    send(world, 100, (KEYS[0], None), "idle")
    within = 40 if field == "header" else getattr(RingRecord, field).offset + 3
    world.control.bytes[world.direction._records + within] = 0x7F
    with pytest.raises(UnexpectedEntry):
        receive(world, 100, (KEYS[1], None), "idle")
    assert world.receiver.count == 0
    assert world.recorders[1].calls == []


def test_a_callers_stream_is_not_held_up_until_the_peer_has_made_room() -> None:
    """What needs room goes through the link's stream, which waits."""
    world = World(CudaDriver)
    for _ in range(5):
        send(world, 4096, (KEYS[0], KEYS[0]), "unmarked")
        expect(world, (KEYS[1], None))
    consumed = world.direction.consumed_word
    waits = [call for call in world.recorders[0].calls if consumed in call]
    assert waits == [("cuStreamWaitValue32_v2", THREE[1], consumed, 1, 0)]


def test_the_parts_of_a_message_wait_and_write_in_streams_of_their_own() -> None:
    world = World(CudaDriver, ring_bytes=16 << 10, chunk_bytes=8 << 10)
    send(world, 12 << 10, (KEYS[0], None), "event")
    copies, _, writes = THREE
    produced = world.direction.produced_word
    assert world.recorders[0].calls == [
        ("cuStreamWaitEvent", copies, 0xD0, 0),
        ("cuMemcpyAsync", OUTGOING_RING, 0x7_0000_0000, 8 << 10, copies),
        ("cuEventRecord", JOIN, copies),
        ("cuStreamWaitEvent", writes, JOIN, 0),
        ("cuStreamWriteValue32_v2", writes, produced, 1, 0),
        ("cuMemcpyAsync", OUTGOING_RING + (8 << 10), 0x7_0000_2000, 4 << 10, copies),
        ("cuEventRecord", JOIN, copies),
        ("cuStreamWaitEvent", writes, JOIN, 0),
        ("cuStreamWriteValue32_v2", writes, produced, 2, 0),
    ]


@pytest.mark.parametrize("end", ["sender", "receiver"])
def test_a_message_without_a_handle_is_on_its_way_until_its_device_has_done_it(end: str) -> None:
    world = World(CudaDriver)
    world.exchange([(100, False)], caller=KEYS[0])
    world.exchange([(100, True)], caller=KEYS[1])
    flow = getattr(world, end)
    flow.in_flight.clear()
    header = flow.first_header()
    assert header is not None
    assert Header.unpack(header).shape == (100,)
    assert not flow.is_idle()
    assert [flow.is_overdue(timeout=0.0) for _ in range(2)] == [False, True]
    world.advance("produced", 1)
    world.advance("consumed", 1)
    assert flow.is_idle()
    assert [flow.is_overdue(timeout=0.0) for _ in range(2)] == [False, False]
    assert flow.first_header() is None


@pytest.mark.parametrize("together", [False, True], ids=["each by itself", "by one call of C"])
def test_small_messages_go_through_their_callers_streams(together: bool) -> None:
    world = World(CudaDriver)
    if together:
        sender = receiver = KEYS[0]
        assert world.exchange([(100, False), (100, True)], caller=sender) == Progress.ENQUEUED
    else:
        sender, receiver = KEYS
        send(world, 100, (sender, sender), "unmarked")
        receive(world, 100, (receiver, receiver), "event")
    produced, consumed = world.direction.produced_word, world.direction.consumed_word
    assert world.recorders[0].calls == [
        ("cuMemcpyAsync", OUTGOING_RING, 0x7_0000_0000, 100, sender),
        ("cuStreamWriteValue32_v2", sender, produced, 1, 0),
    ]
    assert world.recorders[1].calls == [
        ("cuStreamWaitValue32_v2", receiver, produced, 1, 0),
        ("cuMemcpyAsync", 0x7_0000_0000, INCOMING_RING, 100, receiver),
        ("cuStreamWriteValue32_v2", receiver, consumed, 1, 0),
    ]
    assert produced >= CONTROL


def test_what_is_large_follows_its_callers_stream_which_goes_on_behind_all_of_it() -> None:
    world = World(CudaDriver, ring_bytes=16 << 10, chunk_bytes=4 << 10)
    assert world.exchange([(6 << 10, False), (6 << 10, True)], caller=KEYS[0]) == Progress.ENQUEUED
    copies, _, writes = THREE
    produced, consumed = world.direction.produced_word, world.direction.consumed_word
    sent, received = (recorder.calls for recorder in world.recorders)
    assert sent[:3] == [
        ("cuEventRecord", JOIN, KEYS[0]),
        ("cuStreamWaitEvent", copies, JOIN, 0),
        ("cuMemcpyAsync", OUTGOING_RING, 0x7_0000_0000, 4 << 10, copies),
    ]
    assert sent[-1] == ("cuStreamWaitValue32_v2", KEYS[0], produced, 2, 0)
    assert sent[-2] == ("cuStreamWriteValue32_v2", writes, produced, 2, 0)
    assert received[:2] == sent[:2]
    assert received[-1] == ("cuStreamWaitValue32_v2", KEYS[0], consumed, 2, 0)


def test_a_callers_stream_waits_for_nothing_while_a_peer_has_not_come() -> None:
    world = World(CudaDriver)
    assert world.exchange([(100, True)], caller=KEYS[0]) == Progress.WAITING
    assert world.recorders[1].calls == []
    assert [transfer.has_begun for transfer in world.receiver.waiting] == [False]


def test_a_message_waits_for_the_one_before_it_in_the_same_direction() -> None:
    world = World(CudaDriver, ring_bytes=16 << 10, chunk_bytes=8 << 10)
    messages = [(40 << 10, False), (100, False)]
    assert world.exchange(messages, caller=KEYS[0]) == Progress.WAITING
    assert [transfer.state.offset for transfer in world.sender.waiting] == [16 << 10, 0]


@pytest.mark.parametrize("is_begun", [False, True])
def test_an_exception_while_a_message_begins_loses_no_message(
    is_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the handler of a signal raises it, before C has begun the message or after."""
    world = World(CudaDriver)
    flow, really_begin = world.sender, world.sender._begin

    def interrupted(address: int) -> None:
        if is_begun:
            really_begin(address)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(flow, "_begin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            send(world, 100, (KEYS[0], KEYS[0]), "event")
    assert [transfer.state.nbytes for transfer in flow.waiting] == [100]
    send(world, 200, (KEYS[0], KEYS[0]), "event")
    world.enqueue(flow)
    assert [transfer.end_count is not None for transfer in flow.in_flight] == [True, True]


@pytest.mark.parametrize("key", KEYS)
def test_a_caller_on_another_device_does_not_lend_its_stream(
    monkeypatch: pytest.MonkeyPatch, key: int
) -> None:
    """The driver would take its default stream for that of the other device."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
    world = World(CudaDriver)
    send(world, 100, (key, key), "unmarked")
    assert [call[-1] for call in world.recorders[0].calls if call[0] == "cuMemcpyAsync"] == [0xA0]


@VENDORS
@pytest.mark.parametrize("failing", range(1, 6))
def test_a_call_that_fails_is_named_and_none_follows_it(
    vendor: type[GpuDriver], failing: int
) -> None:
    world = World(vendor, failing=failing)
    with pytest.raises(LinkError) as raised:
        send(world, 9000, (KEYS[0], None), "event")
    calls = world.recorders[0].calls
    assert len(calls) == failing
    assert str(raised.value).startswith(f"{calls[-1][0]} failed (error 719) to ")


def test_hip_is_never_told_to_wait_past_the_wrap() -> None:
    """It compares without wrapping, and would let the stream go too early."""
    world = World(HipDriver)
    start = 3 * 2**30 - 2
    count_from(start, flows=(world.sender, world.receiver), directions=(world.direction,))
    for _ in range(2):
        send(world, 100, (KEYS[0], None), "idle")
    receive(world, 100, (KEYS[0], None), "idle")
    before = len(world.recorders[1].calls)
    with pytest.raises(LinkError, match="HIP cannot wait for"):
        receive(world, 100, (KEYS[0], None), "idle")
    assert len(world.recorders[1].calls) == before
