"""C enqueues as Python does: with the same calls of the driver, words and records."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.device.base import Reached
from hetero.device.cuda_driver import CudaDriver
from hetero.device.driver_base import GpuDriver
from hetero.device.hip_driver import HipDriver
from hetero.device.ordered import CurrentStream
from hetero.errors import LinkError
from hetero.native.library import LIBRARY, native
from hetero.transport.header import HEADER_BYTES
from hetero.transport.ordered.flows import EntryRefused
from hetero.transport.ordered.ring import (
    ENTRIES,
    NBYTES_IN_RECORD,
    PLACE_IN_RECORD,
    DirectionPlaces,
)
from tests.hetero.transport.ordered.driven import (
    CONTROL,
    INCOMING_RING,
    JOIN,
    OUTGOING_RING,
    By,
    World,
)
from tests.hetero.transport.ordered.pair import count_from

pytestmark = pytest.mark.skipif(native() is None, reason=LIBRARY.why_not() or "")

VENDORS = pytest.mark.parametrize("vendor", [CudaDriver, HipDriver])
BY = pytest.mark.parametrize("by", ["python", "c"])
ONE, THREE = (0xA0, 0xA0, 0xA0), (0xA0, 0xB0, 0xC0)
KEYS = (0x51, 0x52)

sizes = st.sampled_from([0, 1, 511, 512, 513, 3000, 4096, 4097, 9000, 16384, 40_000])
keys = st.sampled_from(KEYS)
streams = st.none() | keys
# Whose message it is and the stream of whoever calls, which are mostly one.
callers = keys.map(lambda key: (key, key)) | st.tuples(keys, streams)
marks = st.sampled_from(["idle", "event"])
steps = st.one_of(
    st.tuples(st.just("send"), sizes, callers, st.just("unmarked")),
    st.tuples(st.just("send"), sizes, callers, marks),
    st.tuples(st.just("expect what was sent"), callers),
    st.tuples(st.just("wait"), streams),
    st.tuples(
        st.just("advance"),
        st.sampled_from(["produced", "consumed"]),
        st.sampled_from([1, 2, ENTRIES]),
    ),
    st.tuples(st.just("again"), streams),
)
# Most scripts would end with it, so it comes last.
ends = st.lists(st.tuples(st.just("receive"), sizes, callers, marks), max_size=1)


@pytest.fixture(autouse=True)
def at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch says that the callers' device is the current one."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)


def take(world: World, step: tuple[Any, ...]) -> str:
    """Do a step; what is refused, in words."""
    name, *arguments = step
    try:
        STEPS[name](world, *arguments)
    except EntryRefused as refusal:
        return str(refusal)
    return ""


def _mark(world: World, end: int, kind: str) -> Any:
    return {"unmarked": None, "idle": Reached(), "event": world.devices[end].event(0xD0)}[kind]


def _stream(world: World, end: int, key: int | None) -> CurrentStream | None:
    return None if key is None else world.devices[end].callers(key)


def send(world: World, nbytes: int, callers: tuple[int, int | None], mark: str) -> None:
    caller, key = callers
    ready = _mark(world, 0, mark)
    transfer = world.transfer(nbytes, is_receive=False, caller=caller, ready=ready)
    world.enqueue(world.sender, _stream(world, 0, key))
    if transfer.ready is None and transfer.landed is None:
        transfer.ready = world.devices[0].mark()


def receive(world: World, nbytes: int, callers: tuple[int, int | None], mark: str) -> None:
    caller, key = callers
    ready = _mark(world, 1, mark)
    world.transfer(nbytes, is_receive=True, caller=caller, ready=ready)
    world.enqueue(world.receiver, _stream(world, 1, key))


def expect(world: World, callers: tuple[int, int | None]) -> None:
    sent = [t for t in world.transfers if not t.is_receive]
    if world.receiver.sequence < len(sent):
        receive(world, sent[world.receiver.sequence].nbytes, callers, "idle")


def wait(world: World, key: int | None) -> None:
    if world.receiver.waiting:
        awaited = world.receiver.waiting[0]
        world.enqueue(world.receiver, _stream(world, 1, key), awaited=awaited)


def again(world: World, key: int | None) -> None:
    world.enqueue(world.sender, _stream(world, 0, key))


STEPS = {
    "send": send,
    "receive": receive,
    "expect what was sent": expect,
    "wait": wait,
    "advance": World.advance,
    "again": again,
}


def assert_alike(
    vendor: type[GpuDriver],
    script: list[tuple[Any, ...]],
    *,
    handles: tuple[int, int, int],
    start: int,
) -> None:
    """Python and C do the same at every step, counting from `start`."""
    worlds = [World(vendor, by, handles=handles) for by in ("python", "c")]
    for world in worlds:
        count_from(start, flows=(world.sender, world.receiver), directions=(world.direction,))
    for step in script:
        said = [take(world, step) for world in worlds]
        rung = [world.rung() for world in worlds]
        assert said[0] == said[1], step
        assert worlds[0].state() == worlds[1].state(), step
        if said[0]:
            # That breaks the link, and both ends are told.
            break
        assert rung[0] == rung[1], step


@VENDORS
@settings(max_examples=400)
@given(
    script=st.builds(list.__add__, st.lists(steps, min_size=15, max_size=50), ends),
    handles=st.sampled_from([ONE, THREE]),
    start=st.sampled_from([0, 1, 3 * 2**30 - 60]),
)
def test_c_does_what_python_does(
    vendor: type[GpuDriver],
    script: list[tuple[Any, ...]],
    handles: tuple[int, int, int],
    start: int,
) -> None:
    assert_alike(vendor, script, handles=handles, start=start)


@settings(max_examples=30)
@given(script=st.lists(steps, min_size=15, max_size=50))
def test_c_counts_round_as_python_does(script: list[tuple[Any, ...]]) -> None:
    assert_alike(CudaDriver, script, handles=THREE, start=2**32 - 5)


def both_worlds() -> tuple[World, World]:
    return World(CudaDriver, "python"), World(CudaDriver, "c")


def test_the_ring_holds_as_many_entries_as_it_has_records_for() -> None:
    worlds = both_worlds()
    for world in worlds:
        for _ in range(ENTRIES + 3):
            send(world, 0, (KEYS[0], None), "idle")
        assert world.sender.count == ENTRIES
        assert len(world.sender.waiting) == 3
    assert worlds[0].state() == worlds[1].state()


@pytest.mark.parametrize("field", [HEADER_BYTES, NBYTES_IN_RECORD, PLACE_IN_RECORD, 40])
def test_a_record_that_was_overwritten_is_refused(field: int) -> None:
    """By its offset, size, place or header."""
    said = []
    for world in both_worlds():
        send(world, 100, (KEYS[0], None), "idle")
        world.control.bytes[DirectionPlaces.of(0).records + field + 3] = 0x7F
        said.append(take(world, ("receive", 100, (KEYS[1], None), "idle")))
        assert world.receiver.count == 0
        assert world.recorders[1].calls == []
    assert said[0] == said[1] != ""


def test_a_callers_stream_is_not_held_up_until_the_peer_has_made_room() -> None:
    """What needs room goes through the link's stream, which waits."""
    for world in both_worlds():
        for _ in range(5):
            send(world, 4096, (KEYS[0], KEYS[0]), "unmarked")
            expect(world, (KEYS[1], None))
        consumed = world.direction.consumed_word
        waits = [call for call in world.recorders[0].calls if consumed in call]
        assert waits == [("cuStreamWaitValue32_v2", THREE[1], consumed, 1, 0)]


def test_the_parts_of_a_message_wait_and_write_in_streams_of_their_own() -> None:
    world = World(CudaDriver, "c", ring_bytes=16 << 10, chunk_bytes=8 << 10)
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


def test_a_small_message_goes_through_its_callers_streams() -> None:
    world = World(CudaDriver, "c")
    send(world, 100, (KEYS[0], KEYS[0]), "unmarked")
    receive(world, 100, (KEYS[1], KEYS[1]), "event")
    produced, consumed = world.direction.produced_word, world.direction.consumed_word
    assert world.recorders[0].calls == [
        ("cuMemcpyAsync", OUTGOING_RING, 0x7_0000_0000, 100, KEYS[0]),
        ("cuStreamWriteValue32_v2", KEYS[0], produced, 1, 0),
    ]
    assert world.recorders[1].calls == [
        ("cuStreamWaitValue32_v2", KEYS[1], produced, 1, 0),
        ("cuMemcpyAsync", 0x7_0000_0000, INCOMING_RING, 100, KEYS[1]),
        ("cuStreamWriteValue32_v2", KEYS[1], consumed, 1, 0),
    ]
    assert produced >= CONTROL


@pytest.mark.parametrize("key", KEYS)
def test_a_caller_on_another_device_does_not_lend_its_stream(
    monkeypatch: pytest.MonkeyPatch, key: int
) -> None:
    """The driver would take its default stream for that of the other device."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
    world = World(CudaDriver, "c")
    send(world, 100, (key, key), "unmarked")
    assert [call[-1] for call in world.recorders[0].calls if call[0] == "cuMemcpyAsync"] == [0xA0]


@VENDORS
@pytest.mark.parametrize(
    ("by", "failing"),
    # An event's failure is PyTorch's to raise where Python calls, and it is not here.
    [*(("c", number) for number in range(1, 6)), ("python", 2), ("python", 5)],
)
def test_a_call_that_fails_is_named_and_none_follows_it(
    vendor: type[GpuDriver], by: By, failing: int
) -> None:
    world = World(vendor, by, failing=failing)
    with pytest.raises(LinkError) as raised:
        send(world, 9000, (KEYS[0], None), "event")
    calls = world.recorders[0].calls
    assert len(calls) == failing
    assert str(raised.value).startswith(f"{calls[-1][0]} failed (error 719) to ")


@BY
def test_hip_is_never_told_to_wait_past_the_wrap(by: By) -> None:
    """It compares without wrapping, and would let the stream go too early."""
    world = World(HipDriver, by)
    start = 3 * 2**30 - 2
    count_from(start, flows=(world.sender, world.receiver), directions=(world.direction,))
    for _ in range(2):
        send(world, 100, (KEYS[0], None), "idle")
    receive(world, 100, (KEYS[0], None), "idle")
    before = len(world.recorders[1].calls)
    with pytest.raises(LinkError, match="HIP cannot wait for"):
        receive(world, 100, (KEYS[0], None), "idle")
    assert len(world.recorders[1].calls) == before
