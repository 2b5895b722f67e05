"""Streams that threads of the host play, and words that threads of several processes sleep on."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from ctypes import CFUNCTYPE, c_int, c_size_t, c_uint64, c_void_p, create_string_buffer
from typing import Any

import pytest

from hetero.link.ring import SharedMemory, make_memory
from hetero.native.binding import (
    CHECKSUM_BYTES,
    Checksums,
    CopyStep,
    EntryPoints,
    HostFailure,
    HostGpu,
    RingDoorbell,
    RingWord,
    Vendor,
    native,
    proxy,
)
from tests.hetero.link.joined import meanwhile

CALLER = 1
_, APPEND_BEHIND_TARGET, VERIFY_SOURCE = Checksums
LIBRARY = native()


class Words:
    """Words of memory that processes share, each followed by the count of those who sleep on it."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.memory = SharedMemory(descriptor or make_memory(4096), 4096)

    def address(self, number: int = 0) -> int:
        return self.memory.address + 64 * number

    def __getitem__(self, number: int) -> int:
        return int.from_bytes(self.memory.bytes[64 * number : 64 * number + 4], "little")

    def sleepers(self, number: int = 0) -> int:
        return int.from_bytes(self.memory.bytes[64 * number + 4 : 64 * number + 8], "little")

    def wait(self, value: int, number: int = 0, *, milliseconds: int = 20_000) -> bool:
        return bool(LIBRARY.host_wait_word(self.address(number), value, 40, milliseconds))

    def write(self, value: int, number: int = 0) -> None:
        LIBRARY.host_write_word(self.address(number), value)


@pytest.fixture
def words() -> Words:
    return Words()


class Stream:
    def __init__(self, gpu: Any = None, *, on_write: Any = None, argument: int = 0) -> None:
        request = None if gpu is None else ctypes.byref(gpu)
        self.handle = LIBRARY.host_stream_create(proxy(), request, on_write, argument)
        self._targets: list[Any] = []

    def enqueue(self, **step: Any) -> None:
        assert LIBRARY.host_enqueue(self.handle, ctypes.byref(CopyStep(**step))) == 0

    def copy(self, target: Any, source: Any, nbytes: int) -> None:
        addresses = ctypes.addressof(target), ctypes.addressof(source)
        self.enqueue(target=addresses[0], source=addresses[1], nbytes=nbytes)

    def wait(self, word: int, value: int) -> None:
        self.enqueue(wait=(word, value))

    def write(self, word: int, value: int) -> None:
        self.enqueue(write=(word, value))

    def append_checksum(self, ring: Any, nbytes: int) -> None:
        """As a copy into the ring does, here from the ring itself."""
        place = ctypes.addressof(ring)
        self.enqueue(target=place, source=place, nbytes=nbytes, checksum=APPEND_BEHIND_TARGET)

    def verify_checksum(self, ring: Any, nbytes: int) -> None:
        """As a copy out of the ring does."""
        target = create_string_buffer(nbytes + 1)
        self._targets.append(target)
        addresses = ctypes.addressof(target), ctypes.addressof(ring)
        self.enqueue(
            target=addresses[0], source=addresses[1], nbytes=nbytes, checksum=VERIFY_SOURCE
        )

    def rests(self, milliseconds: int = 20_000) -> bool:
        return bool(LIBRARY.host_stream_synchronize(self.handle, milliseconds))

    @property
    def failure(self) -> HostFailure:
        return HostFailure(LIBRARY.host_stream_failure(self.handle))

    def end(self) -> None:
        LIBRARY.host_stream_destroy(self.handle)


@pytest.fixture
def stream() -> Iterator[Stream]:
    made = Stream()
    yield made
    made.end()


def test_work_is_done_in_order_behind_what_it_waits_for(stream: Stream, words: Words) -> None:
    source, middle, target = (create_string_buffer(text) for text in (b"one", b"...", b"..."))
    stream.wait(words.address(0), 1)
    stream.copy(middle, source, 3)
    stream.copy(target, middle, 3)
    stream.write(words.address(1), 7)
    assert not stream.rests(50)
    assert (target.value, words[1]) == (b"...", 0)
    words.write(1)
    assert words.wait(7, 1)
    assert target.value == b"one"
    assert stream.rests()


def test_much_work_waits_its_turn(stream: Stream, words: Words) -> None:
    stream.wait(words.address(0), 1)
    for number in range(1000):
        stream.write(words.address(1), number + 1)
    words.write(1)
    assert stream.rests()
    assert words[1] == 1000


def test_streams_that_wait_for_each_other_all_come_to_their_turn() -> None:
    """Far more than there are copiers, and those that are given work first can go on last."""
    count, rounds = 100, 5
    words, cells = (RingWord * count)(), (c_uint64 * count)()
    values, seen = (c_uint64 * rounds)(*range(1, rounds + 1)), (c_uint64 * rounds)()
    word = [ctypes.addressof(one) for one in words]
    cell, value, log = (ctypes.addressof(array) for array in (cells, values, seen))
    streams = [Stream() for _ in range(count)]
    for number, stream in reversed(list(enumerate(streams))):
        for turn in range(rounds):
            source = value + 8 * turn if number == 0 else cell + 8 * (number - 1)
            stream.enqueue(
                wait=(word[number], turn + 1), source=source, target=cell + 8 * number, nbytes=8
            )
            if number == count - 1:
                stream.enqueue(source=cell + 8 * number, target=log + 8 * turn, nbytes=8)
            # The last is followed by the first, with the next value.
            following = turn + (1 if number < count - 1 else 2)
            stream.write(word[(number + 1) % count], following)
    assert not streams[0].rests(20)
    LIBRARY.host_write_word(word[0], 1)
    assert all(stream.rests() for stream in streams)
    assert list(seen) == list(values)
    for stream in streams:
        stream.end()


@pytest.mark.parametrize(
    ("now", "value", "is_there"), [(5, 5, True), (5, 6, False), (1, 2**32 - 1, True)]
)
def test_a_word_has_come_to_a_value_or_counting_round_past_it(
    words: Words, now: int, value: int, is_there: bool
) -> None:
    words.write(now)
    assert words.wait(value, milliseconds=20) is is_there


def test_what_the_caller_s_own_stream_is_given_is_done_at_once(words: Words) -> None:
    source, target = create_string_buffer(b"one"), create_string_buffer(3)
    step = CopyStep(
        target=ctypes.addressof(target),
        source=ctypes.addressof(source),
        nbytes=3,
        write=(words.address(), 3),
    )
    assert LIBRARY.host_enqueue(CALLER, ctypes.byref(step)) == 0
    assert (target.raw, words[0]) == (b"one", 3)


def _answer(descriptor: int, rounds: int) -> None:
    words = Words(descriptor)
    for number in range(1, rounds + 1):
        assert words.wait(number, 0)
        words.write(number, 1)


def test_processes_wake_each_other_and_nobody_is_counted_as_asleep_after() -> None:
    descriptor = make_memory(4096)
    context = multiprocessing.get_context("fork")
    other = context.Process(target=_answer, args=(os.dup(descriptor), 200))
    other.start()
    words = Words(descriptor)
    for number in range(1, 201):
        # Now and then long enough for the other to have gone to sleep.
        time.sleep(0.002 if number % 20 == 0 else 0)
        words.write(number)
        assert words.wait(number, 1), number
    other.join(120)
    assert other.exitcode == 0
    assert (words.sleepers(0), words.sleepers(1)) == (0, 0)


def test_a_word_that_is_written_without_a_wake_is_seen_soon(stream: Stream, words: Words) -> None:
    """As a device writes it that wakes nobody."""
    stream.wait(words.address(), 1)
    time.sleep(0.05)
    words.memory.bytes[0] = 1
    assert stream.rests()


def test_a_stream_that_waits_for_ever_can_be_ended(words: Words) -> None:
    made = Stream()
    made.wait(words.address(), 1)
    time.sleep(0.02)
    with meanwhile(made.end):
        pass


def test_a_forked_child_that_forgets_a_stream_of_its_parent_goes_on(stream: Stream) -> None:
    """It has no thread that it could wait for."""
    if (child := os.fork()) == 0:
        signal.alarm(60)
        stream.end()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("nbytes", [0, 1, 100])
def test_a_checksum_is_put_behind_the_bytes_and_verified(stream: Stream, nbytes: int) -> None:
    ring = create_string_buffer(b"x" * nbytes, 128)
    stream.append_checksum(ring, nbytes)
    stream.verify_checksum(ring, nbytes)
    assert stream.rests()
    assert stream.failure is HostFailure.OK


@pytest.mark.parametrize("place", [0, 99, 100, 103], ids=["first", "last", "checksum", "its-end"])
def test_after_a_wrong_checksum_a_stream_does_nothing_more(
    stream: Stream, words: Words, place: int
) -> None:
    ring = create_string_buffer(b"x" * 100, 100 + CHECKSUM_BYTES)
    stream.append_checksum(ring, 100)
    assert stream.rests()
    ring[place] = bytes([ring.raw[place] ^ 4])
    stream.verify_checksum(ring, 100)
    stream.write(words.address(), 1)
    assert stream.rests()
    assert (stream.failure, words[0]) == (HostFailure.WRONG_CHECKSUM, 0)


def test_whoever_asked_is_called_after_each_word(words: Words) -> None:
    seen: list[tuple[int, int]] = []
    called = CFUNCTYPE(None, c_void_p)(lambda argument: seen.append((argument, words[0])))
    made = Stream(on_write=called, argument=42)
    for number in (1, 2):
        made.write(words.address(), number)
        assert made.rests()
    made.end()
    assert seen == [(42, 1), (42, 2)]


class EmulatedGpu:
    """The functions of a driver that a stream of the host calls, by this process's memory."""

    def __init__(self, *, failing: str = "") -> None:
        self.calls: list[str] = []
        self._failing = failing
        self._copying = CFUNCTYPE(c_int, c_uint64, c_uint64, c_size_t, c_void_p)(self._copy)
        names = ("synchronize_stream", "synchronize_event", "set_current")
        self._noting = [
            CFUNCTYPE(c_int, c_void_p)(lambda _, name=name: self._note(name)) for name in names
        ]
        functions = dict(zip(("copy", *names), (self._copying, *self._noting), strict=True))
        addresses = {
            name: ctypes.cast(function, c_void_p).value for name, function in functions.items()
        }
        self.request = HostGpu(EntryPoints(Vendor.CUDA, **addresses), 0, 0x51)

    def _note(self, name: str) -> int:
        self.calls.append(name)
        return int(name == self._failing)

    def _copy(self, target: int, source: int, nbytes: int, stream: int) -> int:
        ctypes.memmove(target, source, nbytes)
        return self._note(f"copy in {stream:#x}")


def given_a_message(gpu: EmulatedGpu, words: Words) -> tuple[Stream, Any]:
    """A stream of the host behind an event of the GPU, and where it copies to."""
    made, source, target = (
        Stream(gpu.request),
        create_string_buffer(b"one"),
        create_string_buffer(3),
    )
    made.enqueue(event=0xE0)
    made.copy(target, source, 3)
    made.write(words.address(), 1)
    assert made.rests()
    return made, target


def test_a_gpu_s_copies_are_waited_for_before_the_word_is_written(words: Words) -> None:
    gpu = EmulatedGpu()
    made, target = given_a_message(gpu, words)
    made.end()
    assert gpu.calls == ["set_current", "synchronize_event", "copy in 0x51", "synchronize_stream"]
    assert (target.raw, words[0]) == (b"one", 1)


@pytest.mark.parametrize("call", ["set_current", "synchronize_event", "synchronize_stream"])
def test_after_a_failure_of_the_gpu_nothing_is_said_to_have_arrived(
    words: Words, call: str
) -> None:
    made, _ = given_a_message(EmulatedGpu(failing=call), words)
    assert (made.failure, words[0]) == (HostFailure.GPU_FAILED, 0)
    made.end()


def test_a_word_that_has_changed_is_not_waited_for() -> None:
    word = RingWord(value=1)
    # Longer than a test may take.
    assert LIBRARY.host_wait_word(ctypes.addressof(word), 1, 0, 310_000)


def test_waiting_ends_after_the_time_given() -> None:
    word = RingWord()
    began = time.monotonic()
    assert not LIBRARY.host_wait_word(ctypes.addressof(word), 1, 0, 200)
    assert time.monotonic() - began >= 0.15


@pytest.mark.parametrize("spin", [0, 30_000_000], ids=["asleep", "polling"])
@pytest.mark.parametrize("before", [0, 2**32 - 1])
def test_whoever_waits_is_woken_and_others_run_meanwhile(before: int, spin: int) -> None:
    word = RingWord(value=before)

    def sleep() -> None:
        assert LIBRARY.host_wait_word(ctypes.addressof(word), before + 1, spin, 30_000)

    with meanwhile(sleep) as sleeper:
        # This thread goes on while the other sleeps: the wait does not hold the GIL.
        time.sleep(0.1)
        assert sleeper.is_alive()
        LIBRARY.host_ring_doorbell(ctypes.addressof(word))
        assert word.value == (before + 1) % 2**32


class Doorbell:
    def __init__(self, value: int = 0) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._bell = RingDoorbell(value=value, event_fd=self._event)
        self._address = ctypes.addressof(self._bell)

    @property
    def value(self) -> int:
        return int(self._bell.value)

    def ring(self) -> None:
        LIBRARY.host_ring_doorbell(self._address)

    def arm(self, value: int) -> bool:
        return bool(LIBRARY.host_arm_doorbell(self._address, value))

    def events(self) -> int:
        """How often the eventfd has been written since."""
        try:
            return os.eventfd_read(self._event)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        os.close(self._event)


@pytest.fixture(params=[0, 2**32 - 2], ids=["from-0", "counting-round"])
def doorbell(request: pytest.FixtureRequest) -> Iterator[Doorbell]:
    made = Doorbell(request.param)
    yield made
    made.close()


def test_a_ring_writes_the_event_once_for_each_time_it_was_armed(doorbell: Doorbell) -> None:
    seen = []
    doorbell.ring()
    seen.append(doorbell.events())
    for _ in range(2):
        assert doorbell.arm(doorbell.value)
        for _ in range(3):
            doorbell.ring()
        seen.append(doorbell.events())
    assert seen == [0, 1, 1]


def test_a_doorbell_that_has_rung_since_is_not_armed(doorbell: Doorbell) -> None:
    before = doorbell.value
    doorbell.ring()
    assert not doorbell.arm(before)
    doorbell.ring()
    assert doorbell.events() == 0


def test_no_ring_is_missed_by_an_end_that_arms_meanwhile(doorbell: Doorbell) -> None:
    """It sleeps only if it was armed, and then every ring that it has not seen wakes it."""
    count = 20_000
    last = (doorbell.value + count) % 2**32

    def ring_all() -> None:
        for _ in range(count):
            doorbell.ring()

    with meanwhile(ring_all) as ringing:
        while (seen := doorbell.value) != last:
            if doorbell.arm(seen):
                while not doorbell.events():
                    assert ringing.is_alive() or doorbell.value != seen
    assert doorbell.value == last
